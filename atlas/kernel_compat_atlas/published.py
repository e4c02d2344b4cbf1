"""Published files, of which only the requested members are fetched, and the cache of them."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import threading
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, cast

import requests
from platformdirs import user_cache_path
from remotezip import RangeNotSupported, RemoteIOError, RemoteZip  # type: ignore[import-untyped]
from urllib3.exceptions import HTTPError

from .errors import AtlasError
from .index import TIMEOUT, File, Index, reason

#: Bytes at the end of a wheel that contain its directory, for most wheels.
_TAIL = 512 * 1024
#: The largest module that is unpacked, in bytes.
_LARGEST = 64 * 2**20
#: The suffixes of modules.
_SUFFIXES = (".py", ".so", ".pyd")
#: The end of the path of a wheel's list of its files.
_RECORD = ".dist-info/RECORD"
#: So many members are fetched one by one; then the whole of a wheel that is smaller than this number of bytes, which takes less time.
_ONE_BY_ONE, _SMALL = 64, 64 << 20
#: Status codes of servers that don't support ranges, or ranges from the end.
_NO_RANGES = (400, 405, 416, 501)
#: One whole file at a time is downloaded: they are large, and the disk may be small.
_whole = threading.Lock()

_Opener = Callable[[], IO[bytes]]
_DATA = re.compile(r"[^/]+\.data/(?:pure|plat)lib/")


class Cache:
    """A folder of published files and of the seams found in them, by the hash of each file.

    Each entry is written atomically, so that several processes may share the folder. It may be deleted at any time.

    Args:
        folder: created if it doesn't exist; by default one in the user's cache folder.
        note: called with a message if a whole file is fetched, and once if the folder can't be written.
    """

    def __init__(self, folder: Path | None, note: Callable[[str], None]) -> None:
        self._folder = folder or user_cache_path("kernel-compat-matrix", appauthor=False) / "atlas"
        self._writable = True
        self.note = note

    def load(self, file: File, name: str) -> bytes:
        """The cached content `name` of a file of the index; empty if it is not cached. It may be damaged, which the caller checks."""
        try:
            return (self._folder / "files" / file.sha256 / name).read_bytes() if file.sha256 else b""
        except OSError:
            return b""

    def store(self, file: File, name: str, content: bytes) -> None:
        """Write an entry. A folder that can't be written, such as on a full disk, only makes the next run slower."""
        if not file.sha256:
            return
        target = self._folder / "files" / file.sha256 / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=target.parent) as scratch:
                Path(scratch, name).write_bytes(content)
                Path(scratch, name).replace(target)
        except OSError as error:
            if self._writable:
                self.note(f"nothing is kept in {self._folder}, and the next run fetches it again: {error}")
            self._writable = False


class Published(ExitStack):
    """A published file, opened on the first request. Not thread-safe.

    A wheel is read through HTTP ranges: its directory, then each requested member. From a server without ranges, for a
    source distribution, and for many members of a small wheel, the whole file is fetched. A small one is kept in the cache.

    Raises:
        AtlasError: by all members, if it can't be fetched or is damaged.
    """

    def __init__(self, file: File, index: Index, cache: Cache) -> None:
        super().__init__()
        self._file = file
        self._index = index
        self._cache = cache
        self._left = 0

    @property
    def members(self) -> Collection[str]:
        """The installed paths of its modules."""
        with self._errors():
            return [path for path in self._modules if not path.endswith(_RECORD)]

    def record(self) -> str:
        """The RECORD of a wheel: a line for each file, with its hash."""
        with self._errors():
            (path,) = (path for path in self._modules if path.endswith(_RECORD))
        return self.read(path).decode()

    def read(self, path: str) -> bytes:
        """The content of one of its `members`, or of its RECORD."""
        with self._errors():
            opened = self._modules[path]
            self._left -= 1
            if self._left == 0:
                self._modules = self._in(self._download())
                opened = self._modules[path]
            with opened() as module:
                content = module.read(_LARGEST + 1)
            if len(content) > _LARGEST:  # no real release has such a module
                raise ValueError(f"{path} has more than {_LARGEST} bytes")
            return content

    @cached_property
    def _modules(self) -> Mapping[str, _Opener]:
        """How to open each module, and a wheel's RECORD, by its installed path."""
        if (local := self._file.local_path) is not None:
            return self._in(self.enter_context(local.open("rb")))
        kept = self._cache.load(self._file, self._file.filename)
        if hashlib.sha256(kept).hexdigest() == self._file.sha256:
            return self._in(io.BytesIO(kept))
        if not self._file.is_wheel:
            return self._in(self._download("has no wheel"))
        try:
            address = self._index.fetchable(self._file)
            archive = self.enter_context(RemoteZip(address, _TAIL, session=self._index.session, timeout=TIMEOUT))
        except (RangeNotSupported, RemoteIOError) as error:
            response = getattr(error.__context__, "response", None)
            if isinstance(error, RemoteIOError) and getattr(response, "status_code", None) not in _NO_RANGES:
                raise
            return self._in(self._download("is on a server without ranges"))
        if sum(entry.compress_size for entry in archive.infolist()) < _SMALL:
            self._left = _ONE_BY_ONE
        return _unzipped(archive)

    def _in(self, content: IO[bytes]) -> Mapping[str, _Opener]:
        if self._file.is_wheel:
            return _unzipped(self.enter_context(zipfile.ZipFile(content)))
        archive = self.enter_context(tarfile.open(fileobj=content))  # noqa: SIM115
        there = (entry for entry in archive if entry.isfile() and entry.name.endswith(".py"))
        return {entry.name.partition("/")[2]: cast(_Opener, partial(archive.extractfile, entry)) for entry in there}

    def _download(self, why: str = "") -> IO[bytes]:
        self.enter_context(_whole)
        content = self.enter_context(TemporaryFile())  # noqa: SIM115

        def note(size: str) -> None:
            if why:
                self._cache.note(f"{self._file.filename} {why}: fetching all of it, {size}")

        self._index.download(self._file, content, note)
        if content.tell() < _SMALL:
            content.seek(0)
            self._cache.store(self._file, self._file.filename, content.read())
        content.seek(0)
        return content

    @contextmanager
    def _errors(self) -> Iterator[None]:
        name = self._file.filename
        try:
            yield
        except (requests.RequestException, RemoteIOError, HTTPError) as error:
            cause = error.__context__ if isinstance(error, RemoteIOError) else error
            why = reason(cause) if isinstance(cause, OSError) else "the connection broke"
            raise AtlasError(f"{name} can't be fetched: {why}") from error
        except OSError as error:
            raise AtlasError(f"{name} can't be read: {error}") from error
        except AtlasError:
            raise
        except Exception as error:  # zipfile, tarfile and zlib raise any error for damaged files
            raise AtlasError(f"{name} is damaged: {error}") from error


def _unzipped(archive: zipfile.ZipFile) -> Mapping[str, _Opener]:
    entries = {_DATA.sub("", entry.filename, count=1): entry for entry in archive.infolist()}
    return {
        path: partial(archive.open, entry) for path, entry in entries.items() if path.endswith((*_SUFFIXES, _RECORD))
    }
