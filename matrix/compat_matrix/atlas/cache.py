"""A cache of published files and of the seams found in them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile

from platformdirs import user_cache_path


def default_folder() -> Path:
    """The folder of the cache in the user's cache folder."""
    return user_cache_path("kernel-compat-matrix", appauthor=False) / "atlas"


class Cache:
    """A folder of files, each written atomically, so that several processes may share it. It may be deleted at any time.

    Args:
        folder: created if it doesn't exist.
        note: called once with a message if the folder can't be written.
    """

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._folder = folder
        self._note = note
        self._unwritable = False

    def load(self, path: str) -> bytes | None:
        """The content of a cached file; None if it isn't cached. The caller checks that it is undamaged."""
        try:
            return (self._folder / path).read_bytes()
        except OSError:
            return None

    def store(self, path: str, content: bytes) -> None:
        """Write a file. A folder that can't be written is noted once, and nothing is stored."""
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
