"""Wheelhouses: folders with everything that cells need, for installing them without network."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from importlib import metadata
from json import loads
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from .atlas.index import File, Index
from .axes import Axes
from .base_python import torch_alone
from .cells import Cell, one_and_more
from .errors import MatrixError
from .fingerprint import sources
from .pins import ANY_DAY, Part, Pin, ResolutionError, compile_pins, lock, of_cells, write
from .unpack import sha256

#: The number of files that are fetched at a time.
_THREADS = 4

#: A name of a file or a folder that can't leave the folder it is in.
Name = Annotated[str, StringConstraints(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.+!-]*\z")]
_NAME: TypeAdapter[str] = TypeAdapter(Name)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Stored(_Table):
    """A fetched file; `requirement` is for example ``"numpy==2.5.4"``."""

    requirement: str
    sha256: str
    size: int


class PartOf(_Table):
    """A base or a layer; `torch_alone` are torch and its pins that only torch needs."""

    python: str
    torch_alone: list[str] = []


class Wheelhouse(_Table):
    """A folder that `fetch` has written, as its ``manifest.json`` describes it.

    Attributes:
        wheel: the file name of the tested project's wheel.
        cells: base and layer by the name of the cell; their pins are in the folder ``pins``.
        files: the fetched files by name.
    """

    folder: Path = Field(default=Path(), exclude=True)
    version: Literal[1] = 1
    wheel: Name = Field(alias="project")
    cells: dict[Name, tuple[Name, Name]] = {}
    parts: dict[Name, PartOf] = {}
    files: dict[Name, Stored] = {}

    @classmethod
    def open(cls, folder: Path) -> Wheelhouse:
        """Open a folder.

        Raises:
            MatrixError: the folder doesn't exist, or `fetch` hasn't written it.
        """
        folder = folder.absolute()
        if not folder.is_dir():
            raise MatrixError(
                f"--offline takes a folder that `kernel-compat-matrix fetch` wrote; {folder} isn't a folder"
            )
        found = cls.read(folder)
        if found is None:
            raise MatrixError(
                f"{folder} has no manifest.json: `kernel-compat-matrix fetch` writes it last, so this folder is incomplete"
            )
        return found

    @classmethod
    def read(cls, folder: Path) -> Wheelhouse | None:
        """The folder's manifest; None if it has none."""
        path = folder / "manifest.json"
        try:
            return cls.model_validate_json(path.read_bytes()).model_copy(update={"folder": folder})
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise MatrixError(f"{path} isn't a manifest of this version: {error.errors()[0]['msg']}") from None

    @property
    def project(self) -> Path:
        """The tested project's wheel."""
        return self.folder / self.wheel

    @property
    def torch_alone(self) -> dict[str, frozenset[str]]:
        """For each base: torch, and the pins that only torch needs."""
        return {name: frozenset(part.torch_alone) for name, part in self.parts.items()}

    def check(self, cells: Sequence[Cell], project: Path) -> None:
        """Check that the folder serves these cells and this project.

        Raises:
            MatrixError: it was fetched for other cells, or for a different state of the tested project.
        """
        others = [cell.name for cell in cells if not {cell.base, cell.layer} <= self.parts.keys()]
        if others:
            raise MatrixError(f"{self.folder} was fetched for other cells, without {one_and_more(others)}")
        if not self._there(self.wheel) or sha256(self.project) != self.files[self.wheel].sha256:
            raise MatrixError(f"{self.folder} lacks {self.wheel} as it was fetched: fetch it again")
        if (changed := differing(self.project, project)) is not None:
            raise MatrixError(
                f"{self.wheel} in {self.folder} has another {changed} than {project}: fetch it again, from the same state"
            )

    def take(self, parts: Mapping[str, Part | ResolutionError], cells: Sequence[Cell]) -> dict[str, Part]:
        """The parts of the cells with pins of the files in this folder: a wheel that was added by hand replaces an sdist.

        Raises:
            MatrixError: files are missing, or differ from the fetched ones; the message names all of them and the cells.
        """
        names = {stored.sha256: name for name, stored in self.files.items()}
        added = [path for path in sorted(self.folder.glob("*.whl")) if path.name not in self.files]
        found: dict[str, Part] = {}
        missing: dict[str, dict[str, None]] = {}

        @cache
        def taken(pin: Pin, python: str, torch: str) -> Pin | None:
            there = self._there(names.get(pin.sha256, ""))
            if there and names[pin.sha256].endswith(".whl"):
                return pin
            if wheel := _replacing(added, pin, python, torch):
                return Pin(pin.name, str(parse_wheel_filename(wheel.name)[1]), sha256(wheel))
            return pin if there else None

        for cell in cells:
            for part in (one for one in (parts[cell.base], parts[cell.layer]) if isinstance(one, Part)):
                pins = {pin: taken(pin, part.python, cell.torch) for pin in part.pins}
                found[part.name] = replace(part, pins=tuple(filter(None, pins.values())))
                for pin in (pin for pin, there in pins.items() if there is None):
                    name = names.get(pin.sha256)
                    what = f"{pin.name}=={pin.version}" + (f" ({name})" if name else "")
                    missing.setdefault(what, {})[cell.name] = None
        if missing:
            lines = [f"{what}, for {one_and_more([*those])}" for what, those in sorted(missing.items())]
            if any(what.startswith("torch==") for what in missing):
                lines.append("It was fetched --without-torch, or has lost it: run --base-python PATH, or fetch again")
            raise MatrixError("\n  ".join([f"{self.folder} lacks", *lines]))
        return found

    def _there(self, name: str) -> bool:
        """Whether a file has its recorded size; its hash is checked at installation."""
        path = self.folder / name
        return name in self.files and path.is_file() and path.stat().st_size == self.files[name].size


def fetch(
    axes: Axes,
    cells: Sequence[Cell],
    folder: Path,
    *,
    pin_folder: Path,
    latest: bool = False,
    without_torch: bool = False,
    runner: bool = False,
    note: Callable[[str], None],
) -> Wheelhouse:
    """Write a wheelhouse for cells, or add to one. Files that it has with the right hash are not fetched again.

    Args:
        latest: resolve the newest releases instead of using the pins.
        without_torch: leave out torch and the packages that only torch needs.
        runner: add this command itself, and a requirement file ``runner-py312.txt`` for installing it.
        note: called with a line about every file.

    Raises:
        MatrixError: pins are missing or have no solution, a file can't be fetched or has another hash, the project can't be
            built, or the disk is full. Fetched files stay, for the next attempt; everything else in the folder is as it was.
    """
    parts: dict[str, Part] = {}
    for name, found in of_cells(axes, cells, pin_folder, latest).items():
        if isinstance(found, ResolutionError):
            raise MatrixError(f"{name} has no solution: {found}")
        parts[name] = found
    needless = torch_alone(axes, cells, parts)
    wanted = {
        (part.python, pin)
        for part in parts.values()
        for pin in part.pins
        if not (without_torch and pin.name in needless.get(part.name, ()))
    }
    folder = folder.absolute()
    with _writing(folder) as scratch:
        built: dict[str, Pin] = {}
        for python in sorted({cell.python for cell in cells}) if runner else ():
            pins, ours = _runner(axes, python, scratch)
            wanted |= {(python, pin) for pin in pins}
            built |= ours
            every = sorted([*pins, *ours.values()], key=lambda pin: pin.name)
            write(Part(f"runner-py{python.replace('.', '')}", python, tuple(every)), scratch)
        project, pin = _build(axes.folder, scratch)
        built[project] = pin
        files = {**_fetched(axes, wanted, folder, note), **built}
        for part in parts.values():
            write(part, scratch / "pins")
        old = Wheelhouse.read(folder) or Wheelhouse(project=project)
        new_parts = {
            name: PartOf(python=part.python, torch_alone=sorted(needless.get(name, ()))) for name, part in parts.items()
        }
        stored = {
            name: Stored(
                requirement=f"{pin.name}=={pin.version}",
                sha256=pin.sha256,
                size=((scratch if name in built else folder) / name).stat().st_size,
            )
            for name, pin in files.items()
        }
        update = {
            "folder": folder,
            "wheel": project,
            "cells": old.cells | {cell.name: (cell.base, cell.layer) for cell in cells},
            "parts": old.parts | new_parts,
            "files": old.files | stored,
        }
        house = old.model_copy(update=update)
        (scratch / "manifest.json").write_text(house.model_dump_json(indent=2, by_alias=True), encoding="utf-8")
    for name, pin in sorted(files.items()):
        if not name.endswith(".whl"):
            note(
                f"{pin.name} {pin.version} has no wheel for this platform. The machine that installs it builds one from {name}, "
                f"which needs a compiler; or add a wheel of it to {folder}, which is then used instead"
            )
    return house


def differing(wheel: Path, folder: Path) -> str | None:
    """A module that differs between a wheel and the project's folder; None if there is none."""
    there: dict[str, list[Path]] = {}
    for path in sources(folder):
        there.setdefault(path.name, []).append(path)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            member = PurePosixPath(name)
            same = [path for path in there.get(member.name, ()) if path.parts[-len(member.parts) :] == member.parts]
            size = archive.getinfo(name).file_size
            alike = [path for path in same if path.stat().st_size == size]  # and so it isn't larger than a module
            if same and (not alike or archive.read(name) not in [path.read_bytes() for path in alike]):
                return name
    return None


def _fetched(
    axes: Axes, wanted: Iterable[tuple[str, Pin]], folder: Path, note: Callable[[str], None]
) -> dict[str, Pin]:
    """The files of the pins of each Python, by name; missing ones are fetched."""
    pins = {pin.sha256: pin for _, pin in wanted}
    paths = [path for path in folder.iterdir() if path.name.endswith((".whl", ".tar.gz", ".zip"))]
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = dict(zip(paths, pool.map(sha256, paths), strict=True))
        found = {path.name: pins[digest] for path, digest in digests.items() if digest in pins}
        missing = pins.keys() - digests.values()
        urls: dict[str, str] = {}
        for python in sorted({python for python, _ in wanted}):
            here = {pin for version, pin in wanted if version == python and pin.sha256 in missing - urls.keys()}
            urls |= _located(axes, python, here)
        index = Index()

        def one(digest: str) -> str:
            name = unquote(urlsplit(urls[digest]).path.rpartition("/")[2])
            try:
                _NAME.validate_python(name)
            except ValidationError:
                raise MatrixError(f"the index names a file {name!r}, which isn't the name of a distribution") from None
            part = folder / f"{name}.part"
            try:
                with part.open("wb") as output:
                    index.download(File(name, urls[digest], digest), output)
                part.replace(folder / name)
            finally:
                part.unlink(missing_ok=True)
            note(f"{name} {(folder / name).stat().st_size / 1e6:.1f} MB")
            return name

        tasks = {digest: pool.submit(one, digest) for digest in urls}
        try:
            return found | {task.result(): pins[digest] for digest, task in tasks.items()}
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _located(axes: Axes, python: str, pins: Iterable[Pin]) -> dict[str, str]:
    """The locations of the pins' files by hash. Releases of one distribution are looked up one after the other."""
    found: dict[str, str] = {}
    left = sorted(pins, key=lambda pin: (pin.name, Version(pin.version)))
    while left:
        asked = {pin.name: pin for pin in left}
        exactly = [f"{pin.name}=={pin.version}" for pin in asked.values()]
        for package in lock(exactly, python, axes.folder, "--no-deps", before=ANY_DAY):
            pin = asked[canonicalize_name(package["name"])]
            files = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else [])]
            url = next((file["url"] for file in files if file["hashes"].get("sha256") == pin.sha256), None)
            if url is None:
                raise MatrixError(f"no file of {pin.name}=={pin.version} has the pinned hash any more: {pin.sha256}")
            found[pin.sha256] = url
        left = [pin for pin in left if pin not in asked.values()]
    return found


def _build(source: Path, folder: Path) -> tuple[str, Pin]:
    """Build a project's wheel into the folder."""
    with TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "uv", "build", "--wheel", "--quiet", "--out-dir", scratch, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=source, check=False)
        if done.returncode:
            raise MatrixError(f"{source} can't be built: {done.stderr.strip()}")
        wheel = next(Path(scratch).glob("*.whl"))
        name, version, *_ = parse_wheel_filename(wheel.name)
        target = wheel.replace(folder / wheel.name)
    return target.name, Pin(name, str(version), sha256(target))


def _runner(axes: Axes, python: str, folder: Path) -> tuple[list[Pin], dict[str, Pin]]:
    """The pins for installing this command, and those of the packages that were built for it."""
    ours = ("kernel-compat-matrix", "kernel-compat")
    requirements: list[str] = []
    built: dict[str, Pin] = {}
    for name in ours:
        found = metadata.distribution(name)
        origin = loads(found.read_text("direct_url.json") or "{}")
        if "dir_info" not in origin:
            requirements.append(f"{name}=={found.version}")
            continue
        file, pin = _build(File(name, origin["url"]).local_path or Path(), folder)
        built[file] = pin
        needed = [one for one in map(Requirement, found.requires or ()) if canonicalize_name(one.name) not in ours]
        requirements += [str(one) for one in needed if "extra" not in str(one.marker or "")]
    return [pin for pin in compile_pins(requirements, (), python, axes) if pin.name not in ours], built


def _replacing(wheels: Sequence[Path], pin: Pin, python: str, torch: str) -> Path | None:
    """The wheel that replaces a pin: of its version, for the Python, and not built for a different torch."""
    version = tuple(map(int, python.split(".")))
    tags = {*cpython_tags(version), *compatible_tags(version, f"cp{python.replace('.', '')}")}
    for path in wheels:
        try:
            name, found, _, theirs = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        built_for = re.search(r"torch(\d+\.\d+)", found.local or "")
        fits = built_for is None or f"{torch}.".startswith(f"{built_for[1]}.")
        if name == pin.name and Version(found.public) == Version(pin.version) and tags & theirs and fits:
            return path
    return None


@contextmanager
def _writing(folder: Path) -> Iterator[Path]:
    """A folder whose files are moved into `folder` at the end, the manifest last; none of them if there was an error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with TemporaryDirectory(dir=folder, prefix=".") as name:
                scratch = Path(name)
                yield scratch
                written = [path.relative_to(scratch) for path in scratch.rglob("*") if path.is_file()]
                for path in sorted(written, key=lambda path: path.name == "manifest.json"):
                    (folder / path).parent.mkdir(exist_ok=True)
                    (scratch / path).replace(folder / path)
        finally:
            with suppress(OSError):
                folder.rmdir()  # if it is empty
    except OSError as error:
        raise MatrixError(f"{folder} can't be written: {error.strerror or error}") from error
