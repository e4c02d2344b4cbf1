"""Compare the time of a cell of the matrix with the same tests in a plain nox session with a virtualenv of its own.

Run by hand: python benchmarks/matrix_cells.py [CELL ...]. It needs the package index, 10 GB of disk in the temporary folder for
one virtualenv at a time and the matrix' environments, and half an hour. All downloads are in pip's and uv's caches before the
timing starts. Plain sessions use nox's defaults (virtualenv, pip), run `pytest` on the cell's tests, and run one after the other.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from compat_matrix.axes import OWN, load
from compat_matrix.cells import Cell

SAMPLE = [f"py312-tf{tf}-torch{torch}" for tf in ("4.57", "5.4", "5.23") for torch in ("2.11", "2.15")]

SESSION = """
import nox

@nox.session(python={python!r})
def cell(session):
    session.install({transformers!r}, {torch!r}, *{packages!r}, "-e", {project!r})
    session.chdir({project!r})
    session.run(*{command!r}, env={environment!r})
"""


def run(command: Sequence[str], folder: Path, **environment: str) -> float:
    """The seconds that a command takes; prints its output to standard error if it fails."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env={**inherited, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cells", nargs="*", default=SAMPLE)
    axes = load(OWN)
    cells = axes.select(None, parser.parse_args().cells)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        plain: dict[Cell, float] = {}
        for cell in cells:
            tests = axes.tests_of(cell, "default")
            assert tests is not None
            packages = [one for entry in axes.packages if entry.holds(cell) for one in entry.requires]
            session = SESSION.format(
                python=cell.python,
                transformers=f"transformers=={cell.transformers}.*",
                torch=f"torch=={cell.torch}.*",
                packages=packages,
                project=str(axes.folder),
                command=[*tests.command, "-p", "no:cacheprovider"],
                environment={"OMP_NUM_THREADS": "1", **tests.environment},
            )
            (folder / "noxfile.py").write_text(session, encoding="utf-8")
            wanted = [f"transformers=={cell.transformers}.*", f"torch=={cell.torch}.*", *packages]
            run([sys.executable, "-m", "pip", "download", "--quiet", "--dest", "wheels", *wanted], folder)
            shutil.rmtree(folder / "wheels")
            plain[cell] = run([sys.executable, "-m", "nox", "--default-venv-backend", "virtualenv"], folder)
            shutil.rmtree(folder / ".nox")
            print(f"{cell}: {plain[cell]:.0f} s as a plain nox session", flush=True)
        names = [cell.name for cell in cells]
        matrix = [
            sys.executable,
            "-m",
            "compat_matrix",
            "run",
            "--axes",
            str(axes.path),
            "--store",
            "matrix.sqlite",
            *names,
        ]
        kept = {"KERNEL_COMPAT_MATRIX_CACHE": str(folder / "cache")}
        cold, warm = run(matrix, folder, **kept), run(matrix, folder, **kept)
    total = sum(plain.values())
    each = len(cells)
    print(f"{each} cells: {total:.0f} s as plain nox sessions one after the other, {total / each:.0f} s each")
    for name, seconds in (("without environments", cold), ("with them", warm)):
        print(
            f"kernel-compat-matrix run, {name}: {seconds:.0f} s, {seconds / each:.1f} s a cell, {total / seconds:.1f} times faster"
        )


if __name__ == "__main__":
    main()
