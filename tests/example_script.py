"""A script that runs in a process of multiprocessing's."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def run(path: Path, output: Path, errors: Path) -> None:
    """Run a script as Python does, with what it prints in files."""
    for descriptor, file in ((1, output), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = [str(path)]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
    sys.stdout.flush()
