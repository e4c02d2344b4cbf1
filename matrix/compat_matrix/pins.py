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
from datetime import date
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from urllib.parse import unquote

import tomli
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from uv import find_uv_bin

from kernel_compat.versions import within

from .axes import Axes
from .cells import Cell
from .errors import MatrixError

#: A day in the far future, before which every release exists.
ANY_DAY = date(9999, 1, 1)

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
    before: date | None = None,
    constraints: Iterable[str] = (),
    without: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """The ``packages`` of a lock file for Linux on x86-64, with the newest releases that satisfy the requirements.

    Args:
        folder: the folder whose uv settings apply.
        options: further options for ``uv pip compile``.
        before: releases from this day on are ignored. None leaves it to the settings.
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
    """The base or the layer of a cell.

    Attributes:
        name: the name of its pin file, such as ``py311-torch2.15-fa4`` or ``py311-tf5.23``.
        problem: without a solution, the resolver's message.
    """

    name: str
    python: str
    pins: tuple[Pin, ...] = ()
    problem: str = ""

    @property
    def text(self) -> str:
        """The requirement file."""
        return "".join(f"{pin}\n" for pin in self.pins)

    @property
    def key(self) -> str:
        """A hash of the pins."""
        return hashlib.sha256(f"{self.python}\n{self.text}".encode()).hexdigest()[:12]

    @cached_property
    def versions(self) -> dict[str, str]:
        """The versions of its packages, by name."""
        return {pin.name: pin.version for pin in self.pins}

    def without(self, names: Collection[str]) -> Part:
        """The part without the pins of these distributions."""
        return replace(self, pins=tuple(pin for pin in self.pins if pin.name not in names))


def read(path: Path, python: str) -> Part:
    """Read a pin file; raises `MatrixError` if it doesn't exist, or a line isn't a pin."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        advice = "create them with `kernel-compat-matrix pin`, or use --latest"
        raise MatrixError(f"{path.stem} has no pins: {advice}") from None
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


def resolve_parts(axes: Axes, cells: Sequence[Cell], *, latest: bool = False) -> dict[str, Part]:
    """Resolve the bases and layers of cells; returns them by name.

    A base with FlashAttention contains the one without. A layer fits every base of its Python: versions that these agree on are
    constraints of the layer, and the requirements of torch are left to the bases. The releases of axes in the layer take precedence.
    """
    own = project_requirements(axes)

    def resolved(kind: Kind, cell: Cell, given: Mapping[str, str]) -> Part:
        name = cell.base if kind == "base" else cell.layer
        constraints = [f"{package}=={version}" for package, version in sorted(given.items())]
        requirements = requirements_of(kind, axes, cell, own)
        try:
            return Part(name, cell.python, compile_pins(requirements, constraints, cell.python, axes, latest))
        except UvError as error:
            return Part(name, cell.python, problem=str(error))

    def base(cell: Cell) -> Part:
        below = plain[_plain(cell).base]
        if below.name == cell.base or below.problem:
            return replace(below, name=cell.base)
        return resolved("base", cell, below.versions)

    def layer(cell: Cell) -> Part:
        bases = [one.versions for one in plain.values() if one.python == cell.python and not one.problem]
        chosen = _chosen("layer", axes, cell)
        brought = {(name, version) for one in bases for name, version in one.items() if name not in chosen}
        agreed = {name: version for name, version in brought if all(one.get(name) == version for one in bases)}
        return resolved("layer", cell, agreed).without({name for name, _ in brought})

    pythons = {cell.python for cell in cells}
    with ThreadPoolExecutor(4) as pool:
        # A layer must fit every torch of its Python, also if only some of the cells are resolved.
        alone = {_plain(cell) for cell in axes.cells if cell.python in pythons}
        plain = {part.name: part for part in pool.map(lambda cell: resolved("base", cell, {}), alone)}
        bases = pool.map(base, {cell.base: cell for cell in cells}.values())
        layers = pool.map(layer, {cell.layer: cell for cell in cells}.values())
        return {part.name: part for part in [*bases, *layers]}


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


def torch_alone(axes: Axes, cells: Sequence[Cell], parts: Mapping[str, Part]) -> dict[str, frozenset[str]]:
    """For each base of these cells, by name: torch, and the names of the pins that only torch needs. Uses the package index."""
    own = project_requirements(axes)
    found: dict[str, frozenset[str]] = {}
    # The requirements of transformers other than torch stay. All releases have the same ones in this respect, and a base is
    # shared by all of them, so any cell of the base will do.
    for cell in cells:
        base, layer = parts[cell.base], parts[cell.layer]
        if cell.base not in found and not base.problem and not layer.problem:
            wanted = [*requirements_of("base", axes, cell, own), *requirements_of("layer", axes, cell, own)]
            wanted = [text for text in wanted if _name(text) != "torch"]
            limits = [f"{name}=={version}" for name, version in (base.versions | layer.versions).items()]
            packages = lock(wanted, cell.python, axes.folder, before=ANY_DAY, constraints=limits, without=["torch"])
            needed = {canonicalize_name(package["name"]) for package in packages}
            found[cell.base] = frozenset(base.versions.keys() - needed)
    return found


def project_requirements(axes: Axes) -> list[Requirement]:
    """The requirements in pyproject.toml of the tested project and its members, and those of the extras that the axes name.

    One of these distributions on another is left out, as its folder is installed. The extras in it count.
    """
    projects = {folder: _project(axes, folder / "pyproject.toml") for folder in axes.folders}
    names = {canonicalize_name(project["name"]): folder for folder, project in projects.items() if "name" in project}
    wanted = [*((folder, "") for folder in projects), *((axes.folder, extra) for extra in axes.project.extras)]
    found = []
    for folder, extra in wanted:  # which grows
        extras = {**projects[folder].get("optional-dependencies", {}), "": projects[folder].get("dependencies", ())}
        if extra not in extras:
            raise MatrixError(f"{folder / 'pyproject.toml'} has no extra {extra!r}")
        for requirement in map(Requirement, extras[extra]):
            if (own := names.get(canonicalize_name(requirement.name))) is None:
                found.append(requirement)
            else:
                wanted += [one for name in sorted(requirement.extras) if (one := (own, name)) not in wanted]
    return found


def _project(axes: Axes, path: Path) -> dict[str, Any]:
    """The metadata of the tested project or of a member."""
    try:
        if not path.parent.resolve().is_relative_to(axes.folder):  # a link, behind which fingerprints don't look
            raise MatrixError(f"{path} isn't in the project's folder {axes.folder}")
        project: dict[str, Any] = tomli.loads(path.read_text(encoding="utf-8"))["project"]
    except (OSError, KeyError, tomli.TOMLDecodeError) as error:
        raise MatrixError(f"{path}: no project to test: {error}") from None
    if "dependencies" in project.get("dynamic", ()):
        advice = f"name them under [[packages]] in {axes.path.name}"
        raise MatrixError(f"{path}: dynamic dependencies can't be read; {advice}")
    return project


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


def of_cells(axes: Axes, cells: Sequence[Cell], folder: Path, latest: bool = False) -> dict[str, Part]:
    """The bases and layers of cells, by name: as they are committed, or resolved now.

    Raises:
        MatrixError: pins are missing or broken, or lack a release that the tested project requires.
    """
    if latest:
        return resolve_parts(axes, cells, latest=True)
    names = {name: cell.python for cell in cells for name in (cell.base, cell.layer)}
    found = {name: read(folder / f"{name}.txt", python) for name, python in names.items()}
    own = project_requirements(axes)
    for cell in {(cell.base, cell.layer): cell for cell in cells}.values():
        here = {"python_version": cell.python, "python_full_version": f"{cell.python}.0"}
        for requirement in own:
            name = canonicalize_name(requirement.name)
            version = found[cell.layer].versions.get(name) or found[cell.base].versions.get(name)
            right = version and within(version, requirement.specifier)
            if not right and (requirement.marker is None or requirement.marker.evaluate(here)):
                there = version or "no release of it"
                said = f"the project requires {requirement}, and the pins of {cell} have {there}"
                raise MatrixError(f"{said}: `kernel-compat-matrix pin` resolves them again")
    return found
