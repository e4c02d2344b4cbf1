"""Wheelhouses: folders with everything that cells need, for installing them without network."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Annotated, BinaryIO, Literal
from urllib.parse import unquote, urlsplit

import requests
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version
from pydantic import BaseModel, ConfigDict, StringConstraints, TypeAdapter, ValidationError

from .atlas.index import TIMEOUT, File, Index, reason
from .axes import Axes
from .base_python import torch_alone
from .cells import Cell, one_and_more
from .errors import MatrixError
from .fingerprint import sources
from .locking import ANY_DAY, ResolutionError, lock
from .pins import Part, Pin, compile_pins, of_cells, write
from .work import Job

#: The number of files that are fetched at a time.
_THREADS = 4


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


#: A name of a file or a folder that can't leave the folder it is in.
_Name = Annotated[str, StringConstraints(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.+!-]*\z")]
_NAME: TypeAdapter[str] = TypeAdapter(_Name)


class Stored(_Table):
    """A fetched file; `requirement` is for example ``"numpy==2.5.4"``."""

    requirement: str
    sha256: str
    size: int


class PartOf(_Table):
    """A base or a layer; `torch_alone` are torch and its pins that only torch needs."""

    python: str
    torch_alone: list[str] = []


class Manifest(_Table):
    """The manifest of a wheelhouse.

    Attributes:
        project: the file name of the tested project's wheel.
        cells: base and layer by the name of the cell; their pins are in the folder ``pins``.
        files: the fetched files by name.
    """

    version: Literal[1] = 1
    project: _Name
    cells: dict[_Name, tuple[_Name, _Name]]
    parts: dict[_Name, PartOf]
    files: dict[_Name, Stored]


@dataclass(frozen=True)
class Wheelhouse:
    """A folder that `fetch` has written."""

    folder: Path
    manifest: Manifest

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
        manifest = _manifest(folder)
        if manifest is None:
            raise MatrixError(
                f"{folder} has no manifest.json: `kernel-compat-matrix fetch` writes it last, so this folder is incomplete"
            )
        return cls(folder, manifest)

    @property
    def pins(self) -> Path:
        """The folder of the pins."""
        return self.folder / "pins"

    @property
    def project(self) -> Path:
        """The tested project's wheel."""
        return self.folder / self.manifest.project

    @property
    def torch_alone(self) -> dict[str, frozenset[str]]:
        """For each base: torch, and the pins that only torch needs."""
        return {name: frozenset(part.torch_alone) for name, part in self.manifest.parts.items()}

    def check(self, cells: Sequence[Cell], project: Path) -> None:
        """Check that the folder serves these cells and this project.

        Raises:
            MatrixError: it was fetched for other cells, or for a different state of the tested project.
        """
        others = [cell.name for cell in cells if not {cell.base, cell.layer} <= self.manifest.parts.keys()]
        if others:
            raise MatrixError(f"{self.folder} was fetched for other cells, without {one_and_more(others)}")
        self._intact(self.manifest.project)
        if (changed := differing(self.project, project)) is not None:
            raise MatrixError(
                f"{self.project.name} in {self.folder} has another {changed} than {project}: fetch it again, from the same state"
            )

    def take(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs with pins of the files in this folder: a wheel that was added by hand replaces an sdist.

        Raises:
            MatrixError: files are missing, or differ from the fetched ones; the message names all of them and the cells.
        """
        files = {stored.sha256: name for name, stored in self.manifest.files.items()}
        added = [path for path in sorted(self.folder.glob("*.whl")) if path.name not in self.manifest.files]
        missing: dict[str, list[str]] = {}

        @cache
        def taken(pin: Pin, python: str, torch: str) -> Pin | None:
            """The pin of a file that is there."""
            name = files.get(pin.sha256, "")
            there = bool(name) and self._there(name)
            if there and name.endswith(".whl"):
                return pin
            if (wheel := _added(added, pin, python, torch)) is not None:
                return Pin(pin.name, str(parse_wheel_filename(wheel.name)[1]), _sha256(wheel))
            return pin if there else None

        def part_of(job: Job, part: Part) -> Part:
            pins = []
            for pin in part.pins:
                found = taken(pin, part.python, job.cell.torch)
                if found is None:
                    name = files.get(pin.sha256)
                    what = f"{pin.name}=={pin.version}" + (f" ({name})" if name else "")
                    missing.setdefault(what, []).append(job.cell.name)
                pins.append(found or pin)
            return replace(part, pins=tuple(pins))

        taken_jobs = [
            job
            if isinstance(job.parts, str)
            else replace(job, parts=(part_of(job, job.parts[0]), part_of(job, job.parts[1])))
            for job in jobs
        ]
        if missing:
            lines = [
                f"{what}, for {one_and_more(list(dict.fromkeys(cells)))}" for what, cells in sorted(missing.items())
            ]
            hint = ""
            if any(what.startswith("torch==") for what in missing):
                hint = "\nIt was fetched --without-torch, or has lost it: run --base-python PATH, or fetch again"
            raise MatrixError(f"{self.folder} lacks\n  " + "\n  ".join(lines) + hint)
        return taken_jobs

    def _there(self, name: str) -> bool:
        """Whether a file has its recorded size; its hash is checked at installation."""
        path = self.folder / name
        return path.is_file() and path.stat().st_size == self.manifest.files[name].size

    def _intact(self, name: str) -> None:
        if not self._there(name) or _sha256(self.folder / name) != self.manifest.files[name].sha256:
            raise MatrixError(f"{self.folder} lacks {name} as it was fetched: fetch it again")


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
    wanted: dict[str, dict[str, Pin]] = {}
    for part in parts.values():
        for pin in part.pins:
            if not (without_torch and pin.name in needless.get(part.name, ())):
                wanted.setdefault(part.python, {})[pin.sha256] = pin
    folder = folder.absolute()
    with _writing(folder) as scratch:
        built: dict[str, Pin] = {}
        if runner:
            for python in sorted({cell.python for cell in cells}):
                name, pins, ours = _runner(axes, python, scratch)
                wanted.setdefault(python, {}).update((pin.sha256, pin) for pin in pins)
                built |= ours
                write(Part(name, python, tuple(sorted([*pins, *ours.values()], key=lambda pin: pin.name))), scratch)
        project, pin = _build(axes.folder, scratch)
        built[project] = pin
        files = {**_fetched(axes, wanted, folder, note), **built}
        for part in parts.values():
            write(part, scratch / "pins")
        old = _manifest(folder) or Manifest(project=project, cells={}, parts={}, files={})
        manifest = Manifest(
            project=project,
            cells={**old.cells, **{cell.name: (cell.base, cell.layer) for cell in cells}},
            parts={
                **old.parts,
                **{
                    name: PartOf(python=part.python, torch_alone=sorted(needless.get(name, ())))
                    for name, part in parts.items()
                },
            },
            files={
                **old.files,
                **{
                    name: Stored(
                        requirement=f"{pin.name}=={pin.version}",
                        sha256=pin.sha256,
                        size=((scratch if name in built else folder) / name).stat().st_size,
                    )
                    for name, pin in files.items()
                },
            },
        )
        (scratch / "manifest.json").write_text(manifest.model_dump_json(indent=2), encoding="utf-8")
    for name, pin in sorted(files.items()):
        if not name.endswith(".whl"):
            note(
                f"{pin.name} {pin.version} has no wheel for this platform. The machine that installs it builds one from {name}, "
                f"which needs a compiler; or add a wheel of it to {folder}, which is then used instead"
            )
    return Wheelhouse(folder, manifest)


def differing(wheel: Path, folder: Path) -> str | None:
    """A module that differs between a wheel and the project's folder; None if there is none."""
    there: dict[str, list[Path]] = {}
    for path in sources(folder):
        there.setdefault(path.name, []).append(path)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            member = PurePosixPath(name)
            same = [path for path in there.get(member.name, ()) if path.parts[-len(member.parts) :] == member.parts]
            if same and member.suffix == ".py":
                size = archive.getinfo(name).file_size
                alike = [path for path in same if path.stat().st_size == size]  # and so it isn't larger than a module
                if not alike or archive.read(name) not in [path.read_bytes() for path in alike]:
                    return name
    return None


def _manifest(folder: Path) -> Manifest | None:
    path = folder / "manifest.json"
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise MatrixError(f"{path} isn't a manifest of this version: {error.errors()[0]['msg']}") from None


def _fetched(
    axes: Axes, wanted: Mapping[str, Mapping[str, Pin]], folder: Path, note: Callable[[str], None]
) -> dict[str, Pin]:
    """The files of the pins by name; missing ones are fetched.

    Args:
        wanted: for each Python, the pins by hash.
    """
    pins = {sha256: pin for group in wanted.values() for sha256, pin in group.items()}
    with ThreadPoolExecutor(_THREADS) as pool:
        paths = [path for path in sorted(folder.iterdir()) if path.name.endswith((".whl", ".tar.gz", ".zip"))]
        found = {
            path.name: pins[sha256]
            for path, sha256 in zip(paths, pool.map(_sha256, paths), strict=True)
            if sha256 in pins
        }
        here = {pin.sha256 for pin in found.values()}
        urls: dict[str, str] = {}
        for python, group in wanted.items():
            urls |= _located(axes, python, [pin for sha256, pin in group.items() if sha256 not in here | urls.keys()])
        index = Index()

        def one(sha256: str) -> str:
            name = unquote(urlsplit(urls[sha256]).path.rpartition("/")[2])
            try:
                _NAME.validate_python(name)
            except ValidationError:
                raise MatrixError(f"the index names a file {name!r}, which isn't the name of a distribution") from None
            _download(index, File(name, urls[sha256], sha256, None, False), folder / name)
            note(f"{name} {(folder / name).stat().st_size / 1e6:.1f} MB")
            return name

        tasks = {sha256: pool.submit(one, sha256) for sha256 in urls}
        try:
            found |= {task.result(): pins[sha256] for sha256, task in tasks.items()}
        finally:
            for task in tasks.values():
                task.cancel()
    return found


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


def _download(index: Index, file: File, target: Path) -> None:
    """Fetch a file and compare its hash with the pin.

    Raises:
        MatrixError: it can't be fetched, or its hash differs from the pin; no part of it stays.
    """
    digest = hashlib.sha256()
    scratch = target.with_name(f"{target.name}.part")

    def take(chunks: Iterable[bytes], output: BinaryIO) -> None:
        for chunk in chunks:
            digest.update(chunk)
            output.write(chunk)

    try:
        with scratch.open("wb") as output:
            if file.local_path is not None:
                with file.local_path.open("rb") as source:
                    take(iter(lambda: source.read(1 << 20), b""), output)
            else:
                with index.session.get(index.fetchable(file), stream=True, timeout=TIMEOUT) as response:
                    response.raise_for_status()
                    take(response.iter_content(1 << 20), output)
        if digest.hexdigest() != file.sha256:
            raise MatrixError(f"{file.filename} has another hash than its pin: {digest.hexdigest()}")
        scratch.replace(target)
    except requests.RequestException as error:
        raise MatrixError(f"{file.filename} can't be fetched: {reason(error)}") from error
    finally:
        scratch.unlink(missing_ok=True)


def _build(source: Path, folder: Path) -> tuple[str, Pin]:
    """Build a project's wheel into the folder."""
    with TemporaryDirectory(dir=folder) as scratch:
        done = subprocess.run(
            [sys.executable, "-m", "uv", "build", "--wheel", "--quiet", "--out-dir", scratch, str(source)],
            capture_output=True,
            text=True,
            cwd=source,
            check=False,
        )
        if done.returncode:
            raise MatrixError(f"{source} can't be built: {done.stderr.strip()}")
        wheel = next(Path(scratch).glob("*.whl"))
        name, version, *_ = parse_wheel_filename(wheel.name)
        target = wheel.replace(folder / wheel.name)
    return target.name, Pin(name, str(version), _sha256(target))


def _runner(axes: Axes, python: str, folder: Path) -> tuple[str, list[Pin], dict[str, Pin]]:
    """The name of the requirement file for installing this command, its pins, and the pins of the packages built for it."""
    from importlib.metadata import distribution
    from json import loads

    from packaging.requirements import Requirement

    ours = ("kernel-compat-matrix", "kernel-compat")
    requirements: list[str] = []
    built: dict[str, Pin] = {}
    for name in ours:
        found = distribution(name)
        origin = loads(found.read_text("direct_url.json") or "{}")
        if "dir_info" not in origin:
            requirements.append(f"{name}=={found.version}")
            continue
        file, pin = _build(File(name, origin["url"], None, None, False).local_path or Path(), folder)
        built[file] = pin
        for text in found.requires or ():
            requirement = Requirement(text)
            if canonicalize_name(requirement.name) not in ours and "extra" not in str(requirement.marker or ""):
                requirements.append(text)
    pins = compile_pins(requirements, (), python, axes)
    return f"runner-py{python.replace('.', '')}", [pin for pin in pins if pin.name not in ours], built


def _added(wheels: Sequence[Path], pin: Pin, python: str, torch: str) -> Path | None:
    """The wheel that replaces a pin: of its version, for the Python, and not built for a different torch."""
    tags = _tags(python)
    for path in wheels:
        try:
            name, version, _, theirs = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        built_for = re.search(r"torch(\d+\.\d+)", version.local or "")
        if (
            name == pin.name
            and Version(version.public) == Version(pin.version)
            and tags & theirs
            and (built_for is None or f"{torch}.".startswith(f"{built_for[1]}."))
        ):
            return path
    return None


def _tags(python: str) -> frozenset[Tag]:
    """The wheel tags of this machine for any version of Python."""
    major, minor = map(int, python.split("."))
    return frozenset([*cpython_tags((major, minor)), *compatible_tags((major, minor), f"cp{major}{minor}")])


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


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
