"""Wheelhouses in parts, for machines that take files up to a certain size only."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from . import unpack
from .errors import MatrixError


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
            # Numbers of four digits, as `unpack.PART` has them.
            command = ["split", f"--bytes={size}", "--numeric-suffixes", "--suffix-length=4", "-", f"{scratch}/part-"]
            with (
                subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as splitter,
                tarfile.open(fileobj=splitter.stdin, mode="w|", format=tarfile.PAX_FORMAT) as archive,
            ):
                for path in sorted([*folder.glob("[!.]*"), *folder.glob("pins/*")]):
                    if path.is_file():
                        archive.add(path, path.relative_to(folder))
            if splitter.returncode:
                raise OSError(f"split ended with {splitter.returncode}")
            sums = [f"{unpack.sha256(path)}  {path.name}\n" for path in sorted(scratch.iterdir())]
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
