"""Pins: the exact packages in a cell, as requirement files with hashes and without an index.

A cell has two parts, so that few environments serve many cells: the *base* is an environment with torch and
FlashAttention, the *layer* on top of it has transformers, the distributions of the project's own axes, and the packages installed with them. ``py311-torch2.15.txt`` and
``py311-tf5.23.txt`` are the pins of ``py311-tf5.23-torch2.15``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

import tomli
from packaging.requirements import Requirement
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from .axes import Axes
from .cells import Cell
from .errors import MatrixError
from .locking import ANY_DAY, ResolutionError, lock


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


def resolve_parts(
    axes: Axes, cells: Sequence[Cell], *, latest: bool = False, jobs: int = 4
) -> dict[str, Part | ResolutionError]:
    """Resolve the bases and layers of cells, by name; a part without a solution is mapped to the resolver's message.

    A base with FlashAttention contains the one without. A layer fits every base of its Python: versions that these agree on are
    constraints of the layer, and the requirements of torch are left to the bases. The releases of axes in the layer take precedence.
    """
    own = project_requirements(axes)
    found: dict[str, Part | ResolutionError] = {}
    with ThreadPoolExecutor(jobs) as pool:

        def each(parts: Mapping[str, tuple[Cell, Iterable[str], Iterable[str]]]) -> dict[str, Part | ResolutionError]:
            names = list(parts)

            def one(name: str) -> Part | ResolutionError:
                cell, requirements, constraints = parts[name]
                try:
                    return Part(name, cell.python, compile_pins(requirements, constraints, cell.python, axes, latest))
                except ResolutionError as error:
                    return error

            return dict(zip(names, pool.map(one, names), strict=True))

        # A layer must fit every torch of its Python, also if only some of the cells are resolved.
        pythons = {cell.python for cell in cells}
        plain = {
            Cell(c.python, "", c.torch).base: Cell(c.python, "", c.torch) for c in axes.cells if c.python in pythons
        }
        bases = each({name: (cell, requirements_of("base", axes, cell, own), ()) for name, cell in plain.items()})
        with_kernel = {}
        for cell in cells:
            below = bases[Cell(cell.python, "", cell.torch).base]
            if cell.flash_attention == "none" or cell.base in with_kernel:
                continue
            if isinstance(below, ResolutionError):
                found[cell.base] = below
            else:
                constraints = [f"{pin.name}=={pin.version}" for pin in below.pins]
                with_kernel[cell.base] = (cell, requirements_of("base", axes, cell, own), constraints)
        layers: dict[str, tuple[Cell, Iterable[str], Iterable[str]]] = {}
        for cell in cells:
            if cell.layer not in layers:
                shared = _agreed([p for p in bases.values() if isinstance(p, Part) and p.python == cell.python])
                chosen = _chosen("layer", axes, cell)
                constraints = [f"{name}=={version}" for name, version in shared if name not in chosen]
                layers[cell.layer] = (cell, requirements_of("layer", axes, cell, own), constraints)
        found |= each({**with_kernel, **layers})
        for name, (cell, *_) in layers.items():
            part = found[name]
            if isinstance(part, Part):
                chosen = _chosen("layer", axes, cell)
                below_names = {
                    pin.name
                    for p in bases.values()
                    if isinstance(p, Part) and p.python == part.python
                    for pin in p.pins
                }
                found[name] = Part(
                    name, part.python, tuple(p for p in part.pins if p.name in chosen or p.name not in below_names)
                )
    wanted = {name for cell in cells for name in (cell.base, cell.layer)}
    return {name: part for name, part in {**bases, **found}.items() if name in wanted}


def _agreed(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """The pins that all bases have in the same version."""
    if not parts:
        return []
    shared = set.intersection(*({(pin.name, pin.version) for pin in part.pins} for part in parts))
    return sorted(shared)


def requirements_of(part: Literal["base", "layer"], axes: Axes, cell: Cell, own: Sequence[Requirement]) -> list[str]:
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


def _chosen(part: Literal["base", "layer"], axes: Axes, cell: Cell) -> dict[str, str]:
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
    pins = []
    for package in lock(requirements, python, axes.folder, before=before, constraints=constraints):
        files = sorted(package.get("wheels", ()), key=lambda wheel: _rank(wheel, python)) or [package["sdist"]]
        pins.append(Pin(canonicalize_name(package["name"]), package["version"], files[0]["hashes"]["sha256"]))
    return tuple(sorted(pins, key=lambda pin: pin.name))


def _rank(wheel: Mapping[str, str], python: str) -> int:
    """The place of a wheel in the order in which installers prefer those for a Python; all of them fit the platform."""
    order = _preferred(python)
    name = unquote((wheel.get("url") or wheel["path"]).rpartition("/")[2])
    return min(order.get((tag.interpreter, tag.abi), len(order)) for tag in parse_wheel_filename(name)[3])


@cache
def _preferred(python: str) -> dict[tuple[str, str], int]:
    version = [int(part) for part in python.split(".")]
    every = [*cpython_tags(version, platforms=["any"]), *compatible_tags(version, platforms=["any"])]
    return {(tag.interpreter, tag.abi): place for place, tag in enumerate(dict.fromkeys(every))}


def of_cells(
    axes: Axes, cells: Sequence[Cell], folder: Path, latest: bool = False
) -> dict[str, Part | ResolutionError]:
    """The bases and layers of cells, by name: as they are committed, or resolved now.

    Raises:
        MatrixError: pins are missing or broken.
    """
    if latest:
        return resolve_parts(axes, cells, latest=True)
    names = {name: cell.python for cell in cells for name in (cell.base, cell.layer)}
    return {name: read(folder / f"{name}.txt", python) for name, python in names.items()}
