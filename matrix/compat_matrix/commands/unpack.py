"""``kernel-compat-matrix unpack``: put the parts that ``fetch --parts`` wrote together."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import MatrixError
from ..unpack import unpack


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("parts", type=Path, metavar="PARTS", help="the folder of the parts")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of the wheelhouse")


def run(options: argparse.Namespace) -> int:
    """Check and extract the parts; returns the exit code."""
    try:
        unpack(options.parts, options.folder)
    except (ValueError, OSError) as error:
        raise MatrixError(str(error)) from error
    return 0
