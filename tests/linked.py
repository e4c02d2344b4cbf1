"""Copies of installed packages to be edited: hard links, where the file system has them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["linked_copy", "replace_text"]


def linked_copy(original: Path, copy: Path) -> None:
    """Copy a package's folder."""
    shutil.copytree(original, copy, copy_function=_link)


def replace_text(path: Path, text: str) -> None:
    """Write a file of a copy; the original's stays as it is."""
    path.unlink()
    path.write_text(text, encoding="utf-8")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
