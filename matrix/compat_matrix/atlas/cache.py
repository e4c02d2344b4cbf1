"""A cache of members of published files and of the seams found in them; never of whole files."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TypeVar

from platformdirs import user_cache_path
from pydantic import TypeAdapter, ValidationError

_T = TypeVar("_T")


def default_folder() -> Path:
    """The folder of the cache in the user's cache folder."""
    return user_cache_path("kernel-compat-matrix", appauthor=False) / "atlas"


class Cache:
    """A folder of small files, each written atomically, so that several processes may share it.

    Unreadable entries count as absent and are fetched again. The folder may be deleted at any time.

    Args:
        folder: created if it doesn't exist.
        note: called once with a message if the folder can't be written.
    """

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._folder = folder
        self._note = note
        self._unwritable = False

    def load(self, path: str, of: TypeAdapter[_T]) -> _T | None:
        """A stored value; None if there is none or it can't be read as this type."""
        try:
            return of.validate_json((self._folder / path).read_bytes())
        except (OSError, ValidationError):
            return None

    def store(self, path: str, of: TypeAdapter[_T], value: _T) -> None:
        """Store a value as JSON. A folder that can't be written is noted once, and nothing is stored."""
        self._write(path, of.dump_json(value))

    def load_source(self, path: str, crc: int) -> bytes | None:
        """Stored bytes, if they have this CRC-32."""
        try:
            content = zlib.decompress((self._folder / path).read_bytes())
        except (OSError, zlib.error):
            return None
        return content if zlib.crc32(content) == crc else None

    def store_source(self, path: str, content: bytes) -> None:
        """Store bytes, compressed."""
        self._write(path, zlib.compress(content))

    def _write(self, path: str, content: bytes) -> None:
        target = self._folder / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=target.parent, delete=False) as file:
                try:
                    file.write(content)
                    file.close()
                    os.replace(file.name, target)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:  # a full disk, or a read-only folder: only slower
            if not self._unwritable:
                self._unwritable = True
                self._note(f"nothing is kept in {self._folder}, and the next run fetches it again: {error}")
