"""Pins: the exact packages in the two parts of a cell, as requirement files with hashes and without an index."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from urllib.parse import unquote

import tomli
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from uv import find_uv_bin

from .axes import Axes
from .cells import Cell
from .errors import MatrixError

#: A day in the far future, before which every release exists.
ANY_DAY = "9999-01-01"

Kind = Literal["base", "layer"]


class UvError(MatrixError):
    """Requirements can't be resolved or installed, or a project can't be built; the message is that of uv."""


def uv(*arguments: str, text: str = "", folder: Path | None = None) -> str:
    """Run uv in a folder, with an input; returns its output, and raises `UvError` if it failed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    pipes: dict[str, Any] = {"input": text, "capture_output": True, "encoding": "utf-8", "errors": "replace"}
    command = [find_uv_bin(), *arguments, "--quiet"]
    done = subprocess.run(command, cwd=folder, env=environment, check=False, **pipes)
    if done.returncode:
        raise UvError(done.stderr.strip() or f"uv ended with {done.returncode}")
    return str(done.stdout)


def lock(
    requirements: Iterable[str],
    python: str,
    folder: Path,
    *options: str,
    before: str | None = None,
    constraints: Iterable[str] = (),
    without: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """The ``packages`` of a lock file for Linux on x86-64, with the newest releases that satisfy the requirements.

    Args:
        folder: the folder whose uv settings apply.
        options: further options for ``uv pip compile``.
        before: a day; later releases are ignored. None leaves it to the settings.
        without: distributions to leave out, with what only they need.

    Raises:
        UvError: there is no solution, or the index can't be reached.
    """
    command = ["pip", "compile", "-", "--no-sources", "--format", "pylock.toml", *options]
    command += ["--python", sys.executable, "--no-python-downloads", "--python-version", python]
    # Pre-releases are used if there is nothing else, or if a requirement names one.
    command += ["--python-platform", "x86_64-manylinux_2_28", "--prerelease", "if-necessary-or-explicit"]
    command += ["--exclude-newer", f"{before}T00:00:00Z"] if before is not None else []
    with TemporaryDirectory() as scratch:
        for name, lines in (("constraints", constraints), ("excludes", without)):
            path = Path(scratch, name)
            path.write_text("\n".join(lines), encoding="utf-8")
            command += [f"--{name}", str(path)]
        found = uv(*command, text="\n".join(requirements), folder=folder)
    packages: list[dict[str, Any]] = tomli.loads(found).get("packages", [])
    return packages


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
    """The base or the layer of a cell, by the name of its pin file, such as ``py311-torch2.15-fa4`` or ``py311-tf5.23``."""

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

    def without(self, names: Collection[str]) -> Part:
        """The part without the pins of these distributions."""
        return replace(self, pins=tuple(pin for pin in self.pins if pin.name not in names))


#: Parts by name; for one that has no solution, the resolver's message.
Parts = Mapping[str, Part | UvError]


def read(path: Path, python: str) -> Part:
    """Read a pin file; raises `MatrixError` if it doesn't exist, or a line isn't a pin."""
    if not path.exists():
        raise MatrixError(f"{path.stem} has no pins: create them with `kernel-compat-matrix pin`, or use --latest")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
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


def write(part: Part, folder: Path) -> None:
    """Write a pin file, replacing an older one as a whole; raises `MatrixError` if it can't be written."""
    path = folder / f"{part.name}.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".part")
        scratch.write_text(part.text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise MatrixError(f"{path} can't be written: {error.strerror}") from None


def resolve_parts(axes: Axes, cells: Sequence[Cell], *, latest: bool = False) -> dict[str, Part | UvError]:
    """Resolve the bases and layers of cells.

    A base with FlashAttention contains the one without. A layer fits every base of its Python: versions that these agree on are
    constraints of the layer, and the requirements of torch are left to the bases. The releases of axes in the layer take precedence.
    """
    own = project_requirements(axes)

    def resolved(kind: Kind, wanted: Mapping[str, tuple[Cell, Mapping[str, str]]]) -> dict[str, Part | UvError]:
        """Parts by name, from a cell that has the part, and the versions that are given."""

        def one(name: str) -> Part | UvError:
            cell, given = wanted[name]
            try:
                constraints = [f"{package}=={version}" for package, version in sorted(given.items())]
                requirements = requirements_of(kind, axes, cell, own)
                return Part(name, cell.python, compile_pins(requirements, constraints, cell.python, axes, latest))
            except UvError as error:
                return error

        with ThreadPoolExecutor(4) as pool:
            return dict(zip(wanted, pool.map(one, wanted), strict=True))

    # A layer must fit every torch of its Python, also if only some of the cells are resolved.
    pythons = {cell.python for cell in cells}
    plain = resolved("base", {cell.base: (cell, {}) for cell in map(_plain, axes.cells) if cell.python in pythons})
    found = {cell.base: plain[_plain(cell).base] for cell in cells}
    below = {name: part.versions for name, part in found.items() if isinstance(part, Part) and name not in plain}
    found |= resolved("base", {cell.base: (cell, below[cell.base]) for cell in cells if cell.base in below})
    layers, brought = {}, {}
    for cell in {cell.layer: cell for cell in cells}.values():
        bases = [part.versions for part in plain.values() if isinstance(part, Part) and part.python == cell.python]
        chosen = _chosen("layer", axes, cell)
        agreed = set.intersection(*({*base.items()} for base in bases)) if bases else set[tuple[str, str]]()
        layers[cell.layer] = cell, {name: version for name, version in agreed if name not in chosen}
        brought[cell.layer] = {*chain(*bases)} - chosen.keys()
    for name, part in resolved("layer", layers).items():
        found[name] = part.without(brought[name]) if isinstance(part, Part) else part
    return found


def _plain(cell: Cell) -> Cell:
    """The cell with the same Python and torch, and nothing else."""
    return Cell(cell.python, "", cell.torch)


def requirements_of(part: Kind, axes: Axes, cell: Cell, own: Sequence[Requirement]) -> list[str]:
    """The requirements of a part of a cell: the releases of its axes, the project's requirements, and further packages."""
    in_layer = {_name(text) for entry in axes.packages if entry.part == "layer" for text in entry.requires}
    in_layer |= {"transformers", *axes.distributions.values()} - {"torch"}
    chosen = _chosen(part, axes, cell).items()
    exactly = [f"{name}=={version}" + ".*" * (version.count(".") < 2) for name, version in chosen]
    packages = [text for entry in axes.packages if entry.part == part and entry.holds(cell) for text in entry.requires]
    mine = [str(one) for one in own if (canonicalize_name(one.name) in in_layer) == (part == "layer")]
    return [*exactly, *mine, *packages]


def _name(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def _chosen(part: Kind, axes: Axes, cell: Cell) -> dict[str, str]:
    """The distributions of a part whose releases are values of the cell's axes, with these."""
    names = {axis: name for axis, name in axes.distributions.items() if (axis == "torch") == (part == "base")}
    return {names[axis]: value for axis, value in cell.axes.items() if axis in names}


def torch_alone(axes: Axes, cells: Sequence[Cell], parts: Parts) -> dict[str, frozenset[str]]:
    """For each base of these cells, by name: torch, and the names of the pins that only torch needs. Uses the package index."""
    own = project_requirements(axes)
    found: dict[str, frozenset[str]] = {}
    # The requirements of transformers other than torch stay. All releases have the same ones in this respect, and a base is
    # shared by all of them, so any cell of the base will do.
    for cell in cells:
        base, layer = parts[cell.base], parts[cell.layer]
        if cell.base not in found and isinstance(base, Part) and isinstance(layer, Part):
            wanted = [*requirements_of("base", axes, cell, own), *requirements_of("layer", axes, cell, own)]
            wanted = [text for text in wanted if _name(text) != "torch"]
            limits = [f"{name}=={version}" for name, version in (base.versions | layer.versions).items()]
            packages = lock(wanted, cell.python, axes.folder, before=ANY_DAY, constraints=limits, without=["torch"])
            needed = {canonicalize_name(package["name"]) for package in packages}
            found[cell.base] = frozenset(base.versions.keys() - needed)
    return found


def project_requirements(axes: Axes) -> list[Requirement]:
    """The requirements in the tested project's pyproject.toml, followed by those of the extras that the axes name."""
    path = axes.folder / "pyproject.toml"
    try:
        project = tomli.loads(path.read_text(encoding="utf-8"))["project"]
    except (OSError, KeyError, tomli.TOMLDecodeError) as error:
        raise MatrixError(f"{path}: no project to test: {error}") from None
    if "dependencies" in project.get("dynamic", ()):
        advice = f"name them under [[packages]] in {axes.path.name}"
        raise MatrixError(f"{path}: dynamic dependencies can't be read; {advice}")
    texts, extras = [*project.get("dependencies", ())], project.get("optional-dependencies", {})
    for extra in axes.project.extras:
        if extra not in extras:
            raise MatrixError(f"{path} has no extra {extra!r}")
        texts += extras[extra]
    return [Requirement(text) for text in texts]


def compile_pins(
    requirements: Iterable[str], constraints: Iterable[str], python: str, axes: Axes, latest: bool = False
) -> tuple[Pin, ...]:
    """The newest releases that satisfy the requirements on Linux, x86-64; raises `UvError` if there are none."""
    before = ANY_DAY if latest else axes.exclude_newer
    version = [int(part) for part in python.split(".")]
    # In the order in which installers prefer them; all wheels in the lock file fit the platform.
    order = [*cpython_tags(version, platforms=["any"]), *compatible_tags(version, platforms=["any"])]

    def rank(wheel: Mapping[str, str]) -> int:
        tags = parse_wheel_filename(unquote((wheel.get("url") or wheel["path"]).rpartition("/")[2]))[3]
        there = {Tag(tag.interpreter, tag.abi, "any") for tag in tags}.intersection(order)
        return min(map(order.index, there), default=len(order))

    pins = []
    for package in lock(requirements, python, axes.folder, before=before, constraints=constraints):
        file = min(package.get("wheels", ()), key=rank, default=None) or package.get("archive") or package["sdist"]
        pins.append(Pin(canonicalize_name(package["name"]), package["version"], file["hashes"]["sha256"]))
    return tuple(sorted(pins, key=lambda pin: pin.name))


def of_cells(axes: Axes, cells: Sequence[Cell], folder: Path, latest: bool = False) -> dict[str, Part | UvError]:
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
            right = version and requirement.specifier.contains(version, prereleases=True)
            if not right and (requirement.marker is None or requirement.marker.evaluate(here)):
                said = (
                    f"the project requires {requirement}, and the pins of {cell} have {version or 'no release of it'}"
                )
                raise MatrixError(f"{said}: `kernel-compat-matrix pin` resolves them again")
    return dict(found)
