"""Where the dynamic loader finds a library by its file name."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

__all__ = ["is_found"]

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")


def is_found(name: str, search: Iterable[Path] = ()) -> bool:
    """Whether the loader finds a library: in the folders that the file names, in LD_LIBRARY_PATH or in the system.

    Args:
        name: the file name, e.g. ``libcudart.so.13``.
        search: the folders that the shared object which needs it names.
    """
    named = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    folders = [*search, *map(Path, named), *map(Path, _SYSTEM)]
    return any(os.path.exists(folder / name) for folder in folders) or name in _cached()


@cache
def _cached() -> frozenset[str]:
    """The names in the loader's cache, which knows the folders of /etc/ld.so.conf."""
    program = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        done = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    return frozenset(line.split(" ", 1)[0].strip() for line in done.stdout.splitlines() if "=>" in line)
