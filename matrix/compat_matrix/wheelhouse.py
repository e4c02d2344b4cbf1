"""Wheelhouses: folders with everything that cells need, for installing them without network."""

from __future__ import annotations

import re
import shutil
import sys
import zipfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from json import loads
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit
from zlib import crc32

from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version
from pydantic import BaseModel, Field, StringConstraints, ValidationError

from kernel_compat_atlas.index import File, Index

from .axes import Axes
from .cells import Cell, one_and_more
from .errors import MatrixError
from .fingerprint import sources
from .pins import ANY_DAY, Part, Pin, compile_pins, lock, of_cells, torch_alone, uv, write
from .unpack import sha256

#: The number of files that are fetched at a time.
_THREADS = 4

#: A name of a file or a folder that can't leave the folder it is in.
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.+!-]*"
Name = Annotated[str, StringConstraints(pattern=rf"\A{_NAME}\z")]


class Wheelhouse(BaseModel, frozen=True):
    """A folder that `fetch` has written: files, the pins of its bases and layers in the folder ``pins``, and ``manifest.json``.

    Attributes:
        wheel: the file name of the tested project's wheel.
        members: those of its members' wheels, by their folders in the project's.
        parts: for each base and layer, in ``torch_alone``: torch, and the pins that only torch needs; none in a layer.
    """

    folder: Path = Field(default=Path(), exclude=True)
    version: Literal[1, 2] = 2
    wheel: Name = Field(alias="project")
    members: dict[str, Name] = {}
    parts: dict[Name, dict[str, list[str]]] = {}

    @classmethod
    def open(cls, folder: Path) -> Wheelhouse:
        """Open a folder; raises a `MatrixError` if `fetch` hasn't written it."""
        path = folder.absolute() / "manifest.json"
        try:
            return cls.model_validate_json(path.read_bytes()).model_copy(update={"folder": path.parent})
        except OSError:
            raise MatrixError(
                f"{path.parent} has no manifest.json, which `kernel-compat-matrix fetch` writes last"
            ) from None
        except ValidationError as error:
            raise MatrixError(f"{path} isn't a manifest of this version: {error.errors()[0]['msg']}") from None

    def wheels(self, members: Iterable[str]) -> list[Path]:
        """The wheels of the tested project and of these members; raises a `MatrixError` if one of them was not fetched."""
        if others := [member for member in members if member not in self.members]:
            raise MatrixError(f"{self.folder} was fetched without the member {', '.join(others)}: fetch it again")
        return [self.folder / name for name in (self.wheel, *(self.members[member] for member in members))]

    def check(self, cells: Sequence[Cell], axes: Axes) -> None:
        """Raise a `MatrixError` if the folder was fetched for other cells, or for a different state of the tested project."""
        there = {path.stem for path in (self.folder / "pins").glob("*.txt")}
        others = [cell.name for cell in cells if not {cell.base, cell.layer} <= there]
        if others:
            raise MatrixError(f"{self.folder} was fetched for other cells, without {one_and_more(others)}")
        for wheel, project in zip(self.wheels(axes.project.members), axes.folders, strict=True):
            try:
                changed = differing(wheel, project)
            except (OSError, zipfile.BadZipFile):
                raise MatrixError(f"{self.folder} lacks {wheel.name} as it was fetched: fetch it again") from None
            if changed is not None:
                raise MatrixError(
                    f"{wheel.name} in {self.folder} has another {changed} than {project}: fetch it again, from the same state"
                )

    def take(self, parts: Mapping[str, Part], cells: Sequence[Cell]) -> dict[str, Part]:
        """The parts of the cells with pins of the files in this folder: a wheel that was added by hand replaces an sdist.

        Raises:
            MatrixError: files are missing or differ from the pinned ones. All of them are named, with the cells.
        """
        there = _by_hash(self.folder)
        found: dict[str, Part] = {}
        missing: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for cell in cells:
            for part in (parts[cell.base], parts[cell.layer]):
                for pin in part.pins:
                    if pin.sha256 not in there:
                        missing[f"{pin.name}=={pin.version}"][cell.name] = None
                pins = tuple(_best(there, pin, part.python, cell.torch) for pin in part.pins)
                found[part.name] = replace(part, pins=pins)
        if missing:
            lines = [f"{what}, for {one_and_more([*those])}" for what, those in sorted(missing.items())]
            if any(what.startswith("torch==") for what in missing):
                lines.append("It was fetched --without-torch, or has lost it: run --base-python PATH, or fetch again")
            raise MatrixError("\n  ".join([f"{self.folder} lacks", *lines]))
        return found


def fetch(
    axes: Axes,
    cells: Sequence[Cell],
    folder: Path,
    *,
    latest: bool = False,
    without_torch: bool = False,
    runner: bool = False,
) -> set[Path]:
    """Write a wheelhouse for cells, or add to one; returns their files. Those that are there are not fetched again.

    Args:
        without_torch: leave out torch and the packages that only torch needs.
        runner: add this command itself, and a requirement file ``runner-py312.txt`` for installing it.

    Raises:
        MatrixError: pins are missing or have no solution, the project can't be built, or the disk is full.
        AtlasError: a file can't be fetched, or has another hash.

    Fetched files stay after an error, for the next attempt. The manifest is written last.
    """
    parts = of_cells(axes, cells, axes.pins, latest)
    if unsolved := next((part for part in parts.values() if part.problem), None):
        raise MatrixError(f"{unsolved.name} has no solution: {unsolved.problem}")
    needless = torch_alone(axes, cells, parts)
    wanted = {name: part.without(needless.get(name, ()) if without_torch else ()) for name, part in parts.items()}
    folder = folder.absolute()
    old = Wheelhouse.open(folder).parts if (folder / "manifest.json").exists() else {}
    try:
        with TemporaryDirectory() as scratch:
            project, *members = (_build(one, Path(scratch)).name for one in axes.folders)
            runners = _runners(axes, {cell.python for cell in cells}, Path(scratch)) if runner else []
            there = _gathered(axes, [*wanted.values(), *runners], folder, Path(scratch))
        for part in parts.values():
            write(part, folder / "pins")
        for part in runners:
            write(part, folder)
        alone = {name: {"torch_alone": sorted(needless.get(name, ()))} for name in parts}
        own = dict(zip(axes.project.members, members, strict=True))
        house = Wheelhouse(project=project, members=own, parts=old | alone)
        (folder / "manifest.part").write_text(house.model_dump_json(indent=2, by_alias=True), encoding="utf-8")
        (folder / "manifest.part").replace(folder / "manifest.json")
    except OSError as error:
        raise MatrixError(f"{folder} can't be written: {error.strerror or error}") from error
    both = [(wanted[name], cell.torch) for cell in cells for name in (cell.base, cell.layer)]
    used = {_best(there, pin, part.python, torch) for part, torch in both for pin in part.pins}
    exact = {pin for part in runners for pin in part.pins}  # pip installs the pinned file alone
    for pin in sorted(used | exact, key=str):
        if (path := there[pin.sha256]).suffix != ".whl":
            advice = f"; or add a wheel of it to {folder}, which is then used instead" if pin in used else ""
            said = f"{pin.name} {pin.version} has no wheel for this platform. The machine that installs it builds one from {path.name}, which needs a compiler"
            print(said + advice, file=sys.stderr)
    pinned = {there[pin.sha256] for part in [*wanted.values(), *runners] for pin in part.pins}
    return pinned | {folder / name for name in (project, *members)}


def differing(wheel: Path, folder: Path) -> str | None:
    """A module that differs between a wheel and the project's folder; None if there is none."""
    there: defaultdict[str, list[Path]] = defaultdict(list)
    for path in sources(folder):
        there[path.name].append(path)
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            parts = PurePosixPath(entry.filename).parts
            same = [path for path in there[parts[-1]] if path.parts[-len(parts) :] == parts]
            if same and entry.CRC not in [crc32(path.read_bytes()) for path in same]:
                return entry.filename
    return None


def _by_hash(*folders: Path) -> dict[str, Path]:
    """The wheels and sdists in folders, by their hashes."""
    paths = [path for folder in folders for path in folder.glob("*") if path.suffix in (".whl", ".gz", ".zip")]
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(pool.map(sha256, paths), paths, strict=True))


def _gathered(axes: Axes, parts: Sequence[Part], folder: Path, built: Path) -> dict[str, Path]:
    """All files in the folder, by their hashes. The built ones are moved there, and missing ones of the parts are fetched."""
    there = _by_hash(folder, built)
    urls = _located(axes, parts, there)
    index = Index()
    folder.mkdir(parents=True, exist_ok=True)

    def one(digest: str) -> Path:
        name = unquote(urlsplit(urls[digest]).path.rpartition("/")[2])
        if not re.fullmatch(_NAME, name):
            raise MatrixError(f"the index names a file {name!r}, which isn't the name of a distribution")
        part = folder / f"{name}.part"
        try:
            with part.open("wb") as output:
                index.download(File(name, urls[digest], digest), output)
            return part.replace(folder / name)
        finally:
            part.unlink(missing_ok=True)

    with ThreadPoolExecutor(_THREADS) as pool:
        for digest, path in zip(urls, pool.map(one, urls), strict=True):
            print(f"{path.name} {path.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
            there[digest] = path
    for path in built.glob("*.whl"):
        shutil.move(path, folder / path.name)
    return {digest: folder / path.name for digest, path in there.items()}


def _located(axes: Axes, parts: Sequence[Part], there: Collection[str]) -> dict[str, str]:
    """The URLs of the pinned files, by hash. Files whose hash is in `there` are left out."""
    found: dict[str, str] = {}
    for part in parts:
        left = [pin for pin in part.pins if pin.sha256 not in there and pin.sha256 not in found]
        exactly = [f"{pin.name}=={pin.version}" for pin in left]
        packages = lock(exactly, part.python, axes.folder, "--no-deps", before=ANY_DAY) if left else []
        files = [file for one in packages for file in (*one.get("wheels", ()), *filter(None, [one.get("sdist")]))]
        urls = {file["hashes"].get("sha256"): file["url"] for file in files}
        for pin in left:
            if pin.sha256 not in urls:
                raise MatrixError(f"no file of {pin.name}=={pin.version} has the pinned hash any more: {pin.sha256}")
            found[pin.sha256] = urls[pin.sha256]
    return found


def _build(source: Path, folder: Path) -> Path:
    """Build a project's wheel into the folder."""
    with TemporaryDirectory(dir=folder) as scratch:
        uv("build", "--wheel", "--python", sys.executable, "--out-dir", scratch, str(source), folder=source)
        (wheel,) = Path(scratch).glob("*.whl")
        return wheel.replace(folder / wheel.name)


def _runners(axes: Axes, pythons: Iterable[str], folder: Path) -> list[Part]:
    """The pins for installing this command on each Python. From a checkout it is built into the folder."""
    requirements = []
    for name in ("kernel-compat-matrix", "kernel-compat-atlas", "kernel-compat-prove", "kernel-compat"):
        found = metadata.distribution(name)
        origin = loads(found.read_text("direct_url.json") or "{}")
        if "dir_info" in origin:
            wheel = _build(File(name, origin["url"]).local_path or Path(), folder)
            requirements.append(f"{parse_wheel_filename(wheel.name)[0]} @ {wheel.as_uri()}")
        else:
            requirements.append(f"{name}=={found.version}")
    return [
        Part(f"runner-py{python.replace('.', '')}", python, compile_pins(requirements, (), python, axes))
        for python in sorted(pythons)
    ]


def _best(there: dict[str, Path], pin: Pin, python: str, torch: str) -> Pin:
    """The pin, or of an sdist that of a wheel in its place: of its version, for the Python, and not built for a different torch.

    One with this torch in its name comes before one without a torch.
    """
    if pin.sha256 not in there or there[pin.sha256].suffix == ".whl":
        return pin
    version = tuple(map(int, python.split(".")))
    tags = {*cpython_tags(version), *compatible_tags(version, f"cp{python.replace('.', '')}")}
    best = pin
    for digest, path in there.items():
        try:
            name, found, _, theirs = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        built_for = re.search(r"torch(\d+\.\d+)", found.local or "")
        fits = built_for is None or f"{torch}.".startswith(f"{built_for[1]}.")
        fits = fits and (built_for is not None or best is pin)
        if name == pin.name and Version(found.public) == Version(pin.version) and tags & theirs and fits:
            best = Pin(pin.name, str(found), digest)
    return best
