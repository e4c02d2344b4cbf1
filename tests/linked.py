"""Copies of installed packages to be edited: hard links, where the file system has them."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import cache_from_source
from pathlib import Path

__all__ = ["linked_copy", "replace_text"]


def linked_copy(original: Path, copy: Path) -> None:
    """Copy a package's folder, with its bytecode, also where that is kept elsewhere."""
    shutil.copytree(original, copy, copy_function=_link)
    if sys.pycache_prefix:
        bytecode, own = (Path(cache_from_source(str(one / "_.py"))).parent for one in (original, copy))
        if bytecode.is_dir():
            shutil.copytree(bytecode, own, copy_function=_link, dirs_exist_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a file of a copy; the original's stays as it is."""
    path.unlink()
    path.write_text(text, encoding="utf-8")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
