"""Pins: the exact packages in a cell, as requirement files with hashes and without an index.

A cell has two parts, so that few environments serve many cells: the *base* is an environment with torch and
FlashAttention, the *layer* on top of it has transformers, the distributions of the project's own axes, and the packages installed with them. ``py311-torch2.15.txt`` and
``py311-tf5.23.txt`` are the pins of ``py311-tf5.23-torch2.15``.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from urllib.parse import unquote

import tomli
from packaging.requirements import Requirement
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from uv import find_uv_bin

from .axes import Axes
from .cells import Cell
from .errors import MatrixError

#: The platform of the pins.
PLATFORM = "x86_64-manylinux_2_28"
#: A day in the far future, before which every release exists.
ANY_DAY = "9999-01-01"


class ResolutionError(MatrixError):
    """No set of releases satisfies the requirements; the message is that of the resolver."""


def lock(
    requirements: Iterable[str],
    python: str,
    folder: Path,
    *options: str,
    before: str | None = None,
    constraints: Iterable[str] = (),
    excluded: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """The ``packages`` of a lock file for Linux on x86-64, with the newest releases that satisfy the requirements.

    Args:
        folder: the folder whose uv settings apply.
        options: further options for ``uv pip compile``.
        before: a day; later releases are ignored. None leaves it to the settings.
        constraints: constraints on the versions of dependencies.
        excluded: distributions to leave out, together with the dependencies that only they have.

    Raises:
        ResolutionError: there is no solution, or the index can't be reached.
    """
    command = [find_uv_bin(), "pip", "compile", "-", "--quiet", "--no-sources", "--format", "pylock.toml"]
    command += ["--python", sys.executable, "--no-python-downloads", "--python-version", python]
    command += ["--python-platform", PLATFORM]
    # Pre-releases are used if there is nothing else, or if a requirement names one.
    command += ["--prerelease", "if-necessary-or-explicit"]
    if before is not None:
        command += ["--exclude-newer", f"{before}T00:00:00Z"]
    with TemporaryDirectory() as scratch:
        for option, lines in (("--constraints", constraints), ("--excludes", excluded)):
            if text := "\n".join(lines):
                path = Path(scratch, option.strip("-"))
                path.write_text(text, encoding="utf-8")
                command += [option, str(path)]
        text = "\n".join(requirements)
        command += options
        done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", cwd=folder, check=False)
    if done.returncode:
        raise ResolutionError(done.stderr.strip() or f"uv ended with {done.returncode}")
    packages: list[dict[str, Any]] = tomli.loads(done.stdout).get("packages", [])
    return packages


Kind = Literal["base", "layer"]


@dataclass(frozen=True)
class Pin:
    """A release of a distribution, with the SHA-256 of its wheel for the platform or, if there is none, of its sdist."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


@dataclass(frozen=True)
class Part:
    """The base or the layer of a cell.

    Attributes:
        name: the name of the pin file, such as ``py311-torch2.15-fa4`` or ``py311-tf5.23``.
        python: ``"3.11"``.
        pins: sorted by name.
    """

    name: str
    python: str
    pins: tuple[Pin, ...]

    @property
    def text(self) -> str:
        """The requirement file."""
        return "".join(f"{pin}\n" for pin in self.pins)

    @property
    def key(self) -> str:
        """A hash of the pins."""
        return hashlib.sha256(f"{self.python}\n{self.text}".encode()).hexdigest()[:12]

    @property
    def versions(self) -> dict[str, str]:
        """The versions of its packages, by name."""
        return {pin.name: pin.version for pin in self.pins}


def read(path: Path, python: str) -> Part:
    """Read a pin file.

    Raises:
        MatrixError: it doesn't exist, or a line isn't a pin.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise MatrixError(
            f"{path.stem} has no pins: create them with `kernel-compat-matrix pin`, or use --latest"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise MatrixError(f"{path} can't be read: {error}") from None
    pins = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"([a-z0-9-]+)==(\S+) --hash=sha256:([0-9a-f]{64})", line)
        if match is None:
            raise MatrixError(f"{path}:{number}: not a pin of the form NAME==VERSION --hash=sha256:...: {line!r}")
        pins.append(Pin(*match.groups()))
    return Part(path.stem, python, tuple(pins))


def write(part: Part, folder: Path) -> bool:
    """Write a pin file; returns whether it changed.

    Raises:
        MatrixError: it can't be written.
    """
    path = folder / f"{part.name}.txt"
    scratch = folder / f"{part.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_text(encoding="utf-8") == part.text:
            return False
        scratch.write_text(part.text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise MatrixError(f"{path} can't be written: {error.strerror}") from None
    return True


def resolve_parts(axes: Axes, cells: Sequence[Cell], *, latest: bool = False) -> dict[str, Part | ResolutionError]:
    """Resolve the bases and layers of cells, by name; a part without a solution is mapped to the resolver's message.

    A base with FlashAttention contains the one without. A layer fits every base of its Python: versions that these agree on are
    constraints of the layer, and the requirements of torch are left to the bases. The releases of axes in the layer take precedence.
    """
    own = project_requirements(axes)
    # A layer must fit every torch of its Python, also if only some of the cells are resolved.
    pythons = {cell.python for cell in cells}
    plain = {cell.base: cell for cell in map(_plain, axes.cells) if cell.python in pythons}
    with ThreadPoolExecutor(4) as pool:

        def each(
            kind: Kind, parts: Mapping[str, Cell], fixed: Callable[[Cell], Mapping[str, str]]
        ) -> dict[str, Part | ResolutionError]:
            def one(name: str) -> Part | ResolutionError:
                cell = parts[name]
                try:
                    constraints = [f"{package}=={version}" for package, version in fixed(cell).items()]
                    requirements = requirements_of(kind, axes, cell, own)
                    return Part(name, cell.python, compile_pins(requirements, constraints, cell.python, axes, latest))
                except ResolutionError as error:
                    return error

            return dict(zip(parts, pool.map(one, parts), strict=True))

        bases = each("base", plain, lambda _: {})

        def below(cell: Cell) -> Mapping[str, str]:
            base = bases[_plain(cell).base]
            if isinstance(base, ResolutionError):
                raise base
            return base.versions

        def there(cell: Cell) -> list[Mapping[str, str]]:
            parts = (bases[name] for name in plain)
            return [one.versions for one in parts if isinstance(one, Part) and one.python == cell.python]

        def agreed(cell: Cell) -> Mapping[str, str]:
            shared = [{*versions.items()} for versions in there(cell)]
            same = set.intersection(*shared) if shared else set[tuple[str, str]]()
            return {name: version for name, version in sorted(same) if name not in _chosen("layer", axes, cell)}

        bases |= each("base", {cell.base: cell for cell in cells if cell.base not in bases}, below)
        of_layers = {cell.layer: cell for cell in cells}
        layers = each("layer", of_layers, agreed)
    for name, part in layers.items():
        if isinstance(part, Part):
            needless = {pin for versions in there(of_layers[name]) for pin in versions}
            needless -= _chosen("layer", axes, of_layers[name]).keys()
            layers[name] = replace(part, pins=tuple(pin for pin in part.pins if pin.name not in needless))
    return {name: part for name, part in bases.items() if name in {cell.base for cell in cells}} | layers


def _plain(cell: Cell) -> Cell:
    """The cell with the same Python and torch, and nothing else."""
    return Cell(cell.python, "", cell.torch)


def requirements_of(part: Kind, axes: Axes, cell: Cell, own: Sequence[Requirement]) -> list[str]:
    """The requirements of a part of a cell: the releases of its axes, the project's requirements, and further packages."""
    layered = _layered(axes)
    exactly = [_exactly(name, version) for name, version in _chosen(part, axes, cell).items()]
    packages = [text for entry in axes.packages if entry.part == part and entry.holds(cell) for text in entry.requires]
    mine = [str(one) for one in own if (canonicalize_name(one.name) in layered) == (part == "layer")]
    return [*exactly, *mine, *packages]


def _layered(axes: Axes) -> set[str]:
    named = {
        canonicalize_name(Requirement(text).name)
        for entry in axes.packages
        if entry.part == "layer"
        for text in entry.requires
    }
    return named | {"transformers", *axes.distributions.values()}


def _chosen(part: Kind, axes: Axes, cell: Cell) -> dict[str, str]:
    """The distributions of a part whose releases are values of the cell's axes, with these."""
    names = {"torch": "torch"} if part == "base" else {"transformers": "transformers", **axes.distributions}
    return {names[axis]: value for axis, value in cell.axes.items() if axis in names}


def _exactly(name: str, version: str) -> str:
    return f"{name}=={version}" if version.count(".") >= 2 else f"{name}=={version}.*"


def project_requirements(axes: Axes) -> list[Requirement]:
    """The requirements in the tested project's pyproject.toml, followed by those of the extras that the axes name.

    Raises:
        MatrixError: there is no pyproject.toml, no such extra, or its dependencies are dynamic.
    """
    path = axes.folder / "pyproject.toml"
    try:
        project = tomli.loads(path.read_text(encoding="utf-8"))["project"]
    except (OSError, KeyError, tomli.TOMLDecodeError) as error:
        raise MatrixError(f"{path}: no project to test: {error}") from None
    if "dependencies" in project.get("dynamic", ()):
        raise MatrixError(
            f"{path}: dynamic dependencies can't be read; name them under [[packages]] in {axes.path.name}"
        )
    texts = list(project.get("dependencies", ()))
    for extra in axes.project.extras:
        try:
            texts += project.get("optional-dependencies", {})[extra]
        except KeyError:
            raise MatrixError(f"{path} has no extra {extra!r}") from None
    return [Requirement(text) for text in texts]


def compile_pins(
    requirements: Iterable[str], constraints: Iterable[str], python: str, axes: Axes, latest: bool = False
) -> tuple[Pin, ...]:
    """The newest releases that satisfy the requirements on Linux, x86-64.

    Raises:
        ResolutionError: there are none.
    """
    before = ANY_DAY if latest else axes.exclude_newer
    order = _preferred(python)

    def rank(wheel: Mapping[str, str]) -> int:  # all of them fit the platform
        tags = parse_wheel_filename(unquote((wheel.get("url") or wheel["path"]).rpartition("/")[2]))[3]
        places = [order.index((tag.interpreter, tag.abi)) for tag in tags if (tag.interpreter, tag.abi) in order]
        return min(places, default=len(order))

    pins = []
    for package in lock(requirements, python, axes.folder, before=before, constraints=constraints):
        file = min(package.get("wheels", ()), key=rank, default=None) or package["sdist"]
        pins.append(Pin(canonicalize_name(package["name"]), package["version"], file["hashes"]["sha256"]))
    return tuple(sorted(pins, key=lambda pin: pin.name))


@cache
def _preferred(python: str) -> list[tuple[str, str]]:
    """Interpreters and ABIs of wheels, in the order in which installers prefer them."""
    version = [int(part) for part in python.split(".")]
    every = [*cpython_tags(version, platforms=["any"]), *compatible_tags(version, platforms=["any"])]
    return [*dict.fromkeys((tag.interpreter, tag.abi) for tag in every)]


def of_cells(
    axes: Axes, cells: Sequence[Cell], folder: Path, latest: bool = False
) -> dict[str, Part | ResolutionError]:
    """The bases and layers of cells, by name: as they are committed, or resolved now.

    Raises:
        MatrixError: pins are missing or broken, or lack a release that the tested project requires.
    """
    if latest:
        return resolve_parts(axes, cells, latest=True)
    names = {name: cell.python for cell in cells for name in (cell.base, cell.layer)}
    found = {name: read(folder / f"{name}.txt", python) for name, python in names.items()}
    own = project_requirements(axes)
    for cell in cells:
        pinned = found[cell.base].versions | found[cell.layer].versions
        here = {"python_version": cell.python, "python_full_version": f"{cell.python}.0"}
        for requirement in own:
            version = pinned.get(canonicalize_name(requirement.name), "")
            if version and requirement.specifier.contains(version, prereleases=True):
                continue
            if requirement.marker is None or requirement.marker.evaluate(here):
                raise MatrixError(
                    f"the project requires {requirement}, and the pins of {cell} have {version or 'no release of it'}: "
                    "`kernel-compat-matrix pin` resolves them again"
                )
    return dict(found)
