"""Fingerprints of projects, to tell whether two checkouts are the same."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import __version__
from .axes import Axes
from .errors import MatrixError

_NO_SOURCES = ("__pycache__", "build", "dist", "node_modules")


def sources(folder: Path) -> Iterator[Path]:
    """A project's Python files, without those in the folders of environments, builds and tools."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            if not (path.name.startswith(".") or path.name in _NO_SOURCES or (path / "pyvenv.cfg").exists()):
                yield from sources(path)
        elif path.suffix == ".py":
            yield path


def fingerprint(folders: Sequence[Path], *others: Path) -> str:
    """The fingerprint of the Python files and pyproject.toml in folders, of this command's version, and of other files."""
    digest = hashlib.sha256(__version__.encode())
    folder, files = folders[0], [path for one in folders for path in sources(one)]
    for path in dict.fromkeys(
        [*files, *(one / "pyproject.toml" for one in folders), *others]
    ):  # one may contain another
        digest.update(f"\n{os.path.relpath(path, folder)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def of_axes(axes: Axes) -> str:
    """The fingerprint of a project, its axes file and the pins beside it; raises `MatrixError` if one can't be read."""
    try:
        files = fingerprint(axes.folders, axes.path, *sorted(axes.pins.glob("*.txt")))
    except OSError as error:
        raise MatrixError(f"the project of {axes.path} can't be read: {error}") from None
    # "supported" depends on the installed kernel-compat.
    return hashlib.sha256((files + axes.model_dump_json(include={"axes"})).encode()).hexdigest()
