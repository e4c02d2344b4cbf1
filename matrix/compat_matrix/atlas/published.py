"""Published files, of which only the requested members are fetched."""

from __future__ import annotations

import hashlib
import re
import struct
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO

import requests
from pydantic import TypeAdapter
from remotezip import RangeNotSupported, RemoteIOError, RemoteZip, RemoteZipError  # type: ignore[import-untyped]
from urllib3.exceptions import HTTPError

from ..errors import MatrixError
from .cache import Cache
from .index import TIMEOUT, File, Index, reason

#: Bytes at the end of a wheel that contain its directory, for most wheels.
_TAIL = 512 * 1024
#: The largest module that is unpacked, in bytes.
_LARGEST = 64 * 2**20
#: The suffixes of modules.
_SUFFIXES = (".py", ".so", ".pyd")
#: So many members are fetched one by one; then the whole of a wheel that is smaller than this number of bytes, which takes less time.
_ONE_BY_ONE, _SMALL = 64, 64 << 20
#: Status codes of servers that don't support ranges, or ranges from the end.
_NO_RANGES = (400, 405, 416, 501)
#: One whole file at a time is downloaded: they are large, and the disk may be small.
_whole = threading.Lock()

_DATA = re.compile(r"[^/]+\.data/(?:pure|plat)lib/")
_MEMBERS = TypeAdapter(dict[str, int])
_DERIVED = TypeAdapter(dict[str, list[str] | None])


class Published:
    """A published file, opened on the first request that the cache can't answer. Not thread-safe.

    A wheel is read through HTTP ranges: its directory, then each requested member. From a server without ranges, and for a
    source distribution, the whole file is fetched into a temporary file, which is deleted on closing.
    """

    def __init__(self, file: File, index: Index, cache: Cache, note: Callable[[str], None]) -> None:
        self._file = file
        self._index = index
        self._cache = cache if file.sha256 else None
        self._note = note
        self._stack = ExitStack()
        self._fetched = 0
        self._downloaded = False
        self._derived: dict[str, dict[str, list[str] | None]] = {}
        self._changed: set[str] = set()

    def __enter__(self) -> Published:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        for what in self._changed if self._cache else ():
            assert self._cache is not None
            self._cache.store(self._key(what), _DERIVED, self._derived[what])

    @cached_property
    def members(self) -> dict[str, int]:
        """The CRC-32 of each of its modules, by their installed path.

        Raises:
            MatrixError: it can't be fetched, or is damaged.
        """
        key = f"files/{self._file.sha256}/members.json"
        members = self._cache.load(key, _MEMBERS) if self._cache else None
        if members is None:
            with self._errors():
                members = {path: crc for path, crc in self._archive.members.items() if path.endswith(_SUFFIXES)}
            if self._cache:
                self._cache.store(key, _MEMBERS, members)
        return members

    def read(self, path: str) -> bytes:
        """The content of one of its `members`.

        Raises:
            MatrixError: it can't be fetched, or is damaged.
        """
        key = f"files/{self._file.sha256}/members/{path}.z"
        content = self._cache.load_source(key, self.members[path]) if self._cache else None
        if content is None:
            content = self._fetch(path)
            if self._cache:
                self._cache.store_source(key, content)
        return content

    def derived(self, what: str, path: str, derive: Callable[[bytes], list[str] | None]) -> list[str] | None:
        """What a function finds in one of its `members`; the result is kept, and the member isn't.

        Args:
            what: names the function and its version in the cache.
            path: the member.
            derive: the function.

        Raises:
            MatrixError: it can't be fetched, or is damaged.
        """
        if what not in self._derived:
            self._derived[what] = (self._cache.load(self._key(what), _DERIVED) if self._cache else None) or {}
        known = self._derived[what]
        if path not in known:
            known[path] = derive(self._fetch(path))
            self._changed.add(what)
        return known[path]

    def _key(self, what: str) -> str:
        return f"files/{self._file.sha256}/{what}.json"

    def _fetch(self, path: str) -> bytes:
        with self._errors():
            self._fetched += 1
            archive = self._archive
            if self._fetched > _ONE_BY_ONE and isinstance(archive, _Zip) and archive.size < _SMALL and self._by_ranges:
                archive = self._archive = self._archive_in(self._download())
            return archive.read(path)

    @property
    def _by_ranges(self) -> bool:
        return self._file.local_path is None and not self._downloaded

    @cached_property
    def _archive(self) -> _Zip | _Tar:
        local = self._file.local_path
        if local is not None:
            return self._archive_in(self._stack.enter_context(local.open("rb")))
        if not self._file.is_wheel:
            return self._archive_in(self._download("has no wheel"))
        try:
            address = self._index.fetchable(self._file)
            remote = RemoteZip(address, _TAIL, session=self._index.session, timeout=TIMEOUT)
        except RangeNotSupported:
            return self._archive_in(self._download("is on a server without ranges"))
        except RemoteIOError as error:
            if _answer(error) not in _NO_RANGES:
                raise
            return self._archive_in(self._download("is on a server without ranges"))
        return _Zip(self._stack.enter_context(remote))

    def _archive_in(self, content: IO[bytes]) -> _Zip | _Tar:
        if self._file.is_wheel:
            return _Zip(self._stack.enter_context(zipfile.ZipFile(content)))
        return _Tar(self._stack.enter_context(tarfile.open(fileobj=content)))

    def _download(self, why: str = "") -> IO[bytes]:
        self._downloaded = True
        self._stack.enter_context(_whole)
        content = self._stack.enter_context(TemporaryFile())  # noqa: SIM115
        digest = hashlib.sha256()
        with self._index.session.get(self._index.fetchable(self._file), stream=True, timeout=TIMEOUT) as response:
            response.raise_for_status()
            size = response.headers.get("Content-Length")
            megabytes = f"{int(size) / 1e6:.1f} MB" if size else "of unknown size"
            if why:
                self._note(f"{self._file.filename} {why}: fetching all of it, {megabytes}")
            for chunk in response.iter_content(1 << 20):
                digest.update(chunk)
                content.write(chunk)
        if self._file.sha256 not in (None, digest.hexdigest()):
            raise MatrixError(f"{self._file.filename} is not the file of its index: it has another sha256")
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
            raise MatrixError(f"{name} can't be fetched: {why}") from error
        except OSError as error:
            raise MatrixError(f"{name} can't be read: {error}") from error
        except (
            *(zipfile.BadZipFile, tarfile.TarError, RemoteZipError, zlib.error, struct.error),
            *(EOFError, KeyError, ValueError, NotImplementedError, RuntimeError),
        ) as error:
            raise MatrixError(f"{name} is damaged: {error}") from error


def _check_size(what: str, size: int, most: int = _LARGEST) -> None:
    """Check before it is unpacked that it isn't far larger than that of any real release."""
    if size > most:
        raise ValueError(f"{what} has {size} bytes")


class _Zip:
    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._entries = {_DATA.sub("", entry.filename, count=1): entry for entry in archive.infolist()}

    @property
    def size(self) -> int:
        """The compressed size of all members."""
        return sum(entry.compress_size for entry in self._entries.values())

    @property
    def members(self) -> dict[str, int]:
        return {path: entry.CRC for path, entry in self._entries.items()}

    def read(self, path: str) -> bytes:
        _check_size(path, self._entries[path].file_size)
        return self._archive.read(self._entries[path])


class _Tar:
    """A source distribution that has its packages at its root."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self._contents: dict[str, bytes] = {}
        total = 0
        for entry in archive:
            path = entry.name.partition("/")[2]
            file = archive.extractfile(entry) if entry.isfile() and path.endswith(".py") else None
            if file is not None:
                total += entry.size
                _check_size(path, entry.size)
                _check_size("its source", total, 16 * _LARGEST)
                self._contents[path] = file.read()

    @property
    def members(self) -> dict[str, int]:
        return {path: zlib.crc32(content) for path, content in self._contents.items()}

    def read(self, path: str) -> bytes:
        return self._contents[path]


def _answer(error: RemoteIOError) -> int | None:
    cause = error.__context__
    response = cause.response if isinstance(cause, requests.RequestException) else None
    return None if response is None else response.status_code
