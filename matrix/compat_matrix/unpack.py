"""Wheelhouses in parts, for machines that take files up to a certain size only: ``python3 unpack.py DIR`` puts them together.

`fetch --parts` copies this file beside the parts, so it needs only Python.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

#: The hashes of the parts, in order. Together the parts are an archive of tar: ``cat part-* | tar x`` reads them as well.
SUMS = "SHA256SUMS"


def split(folder: Path, size: int) -> tuple[Path, int]:
    """Write a wheelhouse as files of at most `size` bytes into the folder ``NAME.parts`` beside it, with their hashes and this file.

    Returns the folder, and the number of parts. Earlier parts are replaced, and stay if there is an error.

    Raises:
        ValueError: there is a folder of this name that has no parts.
        OSError: it can't be written.
    """
    folder = folder.absolute()
    parts = folder.with_name(f"{folder.name}.parts")
    with TemporaryDirectory(dir=folder.parent, prefix=f".{parts.name}") as name:
        scratch = Path(name, parts.name)
        scratch.mkdir()
        command = ["split", f"--bytes={size}", "--numeric-suffixes", "--suffix-length=4", "-", f"{scratch}/part-"]
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as splitter,
            tarfile.open(fileobj=splitter.stdin, mode="w|", format=tarfile.PAX_FORMAT) as archive,
        ):
            for path in sorted([*folder.glob("[!.]*"), *folder.glob("pins/*")]):
                if path.is_file():
                    archive.add(path, path.relative_to(folder))
        if splitter.returncode:
            raise OSError(f"{parts} can't be written: split ended with {splitter.returncode}")
        sums = [f"{sha256(path)}  {path.name}\n" for path in sorted(scratch.iterdir())]
        (scratch / SUMS).write_text("".join(sums), encoding="utf-8")
        shutil.copyfile(__file__, scratch / "unpack.py")
        if parts.exists():
            if not (parts / SUMS).exists():
                raise ValueError(f"{parts} isn't a folder of parts: remove it, or fetch into another folder")
            parts.rename(Path(name, "old"))
        scratch.rename(parts)
    return parts, len(sums)


def unpack(parts: Path, folder: Path) -> None:
    """Check all parts, and then extract them into a folder, which may have files already.

    Raises:
        ValueError: parts are missing or damaged, which are named; or they aren't the parts of a wheelhouse. Nothing was extracted.
        OSError: the folder can't be written.
    """
    if not (parts / SUMS).is_file():
        raise ValueError(f"{parts} isn't a folder of parts: it has no {SUMS}")
    command = ["sha256sum", "--check", "--strict", "--quiet", SUMS]
    checked = subprocess.run(command, cwd=parts, capture_output=True, text=True, check=False)
    if checked.returncode:
        raise ValueError(f"{parts} has missing or damaged parts:\n{checked.stdout}{checked.stderr}")
    paths = [parts / line.split()[1] for line in (parts / SUMS).read_text(encoding="utf-8").splitlines()]
    with subprocess.Popen(["cat", *paths], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as joined:
        try:
            with tarfile.open(fileobj=joined.stdout, mode="r|") as archive:
                archive.extractall(folder, filter="data")
        except tarfile.TarError as error:
            raise ValueError(f"{parts} can't be unpacked: {error}") from error


def sha256(path: Path) -> str:
    """The digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def main() -> int:
    """Unpack the parts beside this file, and install the runner that is among them; returns the exit code."""
    parser = argparse.ArgumentParser(description="Put the parts of a wheelhouse together, and install its runner.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of the wheelhouse")
    folder = parser.parse_args().folder.absolute()
    try:
        unpack(Path(__file__).parent, folder)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    pins = folder / f"runner-py{sys.version_info[0]}{sys.version_info[1]}.txt"
    if pins.exists():
        venv.create(folder / "runner", with_pip=True, clear=True)
        install = ["install", "--quiet", "--no-index", "--find-links", str(folder), "--require-hashes", "-r", str(pins)]
        if code := subprocess.run([folder / "runner/bin/python", "-m", "pip", *install], check=False).returncode:
            return code
        print(f"{folder / 'runner/bin/kernel-compat-matrix'} run --offline {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
