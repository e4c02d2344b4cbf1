"""Wheelhouses in parts, for machines that take files up to a certain size only."""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from . import unpack
from .errors import MatrixError

#: The smallest size of a part: below it there would be thousands.
SMALLEST = 1 << 20


class _Splitter(io.RawIOBase):
    """Writes into one file after the other, each of at most `size` bytes."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self._file: BinaryIO | None = None
        self.sums: list[str] = []

    def write(self, content: Any) -> int:
        """Write bytes, beginning further files as needed."""
        left = memoryview(content)
        while left:
            if self._file is None:
                self._file = (self._folder / unpack.PART.format(len(self.sums))).open("wb")
                self._digest, self._left = hashlib.sha256(), self._size
            now, left = left[: self._left], left[self._left :]
            self._file.write(now)
            self._digest.update(now)
            self._left -= len(now)
            if not self._left:
                self.close()
        return len(content)

    def close(self) -> None:
        """Finish the last file."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self.sums.append(self._digest.hexdigest())


def split(folder: Path, size: int) -> tuple[Path, int]:
    """Write a wheelhouse as files of at most `size` bytes into the folder ``NAME.parts`` beside it, replacing earlier ones.

    With them are their hashes and ``unpack.py``, which puts them together.

    Returns:
        The folder of the parts, and their number.

    Raises:
        MatrixError: the folder can't be written. Earlier parts stay.
    """
    folder = folder.absolute()
    parts = folder.with_name(f"{folder.name}.parts")
    try:
        with TemporaryDirectory(dir=folder.parent, prefix=f".{parts.name}") as name:
            scratch = Path(name, parts.name)
            scratch.mkdir()
            splitter = _Splitter(scratch, size)
            with tarfile.open(fileobj=splitter, mode="w|", format=tarfile.PAX_FORMAT) as archive:
                for path in sorted([*folder.glob("[!.]*"), *folder.glob("pins/*")]):
                    if path.is_file():
                        archive.add(path, path.relative_to(folder))
            splitter.close()
            sums = [f"{digest}  {unpack.PART.format(number)}\n" for number, digest in enumerate(splitter.sums)]
            (scratch / unpack.SUMS).write_text("".join(sums), encoding="utf-8")
            shutil.copyfile(unpack.__file__, scratch / "unpack.py")
            if parts.exists():
                if not (parts / unpack.SUMS).exists():
                    raise MatrixError(f"{parts} isn't a folder of parts: remove it, or fetch into another folder")
                parts.rename(Path(name, "old"))
            scratch.rename(parts)
    except OSError as error:
        raise MatrixError(f"{parts} can't be written: {error.strerror or error}") from error
    return parts, len(sums)
