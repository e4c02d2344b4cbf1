"""``kernel-compat-matrix unpack``: put a folder of `fetch --parts` together."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..arguments import Arguments, option
from ..wheelhouse import Wheelhouse
from ..words import plural

ARGUMENTS: Arguments = {"folder": option("the folder, with all its files", type=Path, metavar="DIR")}


def run(options: argparse.Namespace) -> int:
    """Put the files together and verify them; returns the exit code."""
    wheelhouse = Wheelhouse.open(options.folder)
    wheelhouse.unpack()
    print(f"{options.folder}: {plural(len(wheelhouse.files), 'file')}, as fetched")
    return 0
