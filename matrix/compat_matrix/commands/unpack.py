"""``kernel-compat-matrix unpack``: put the parts that ``fetch --parts`` wrote together."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..arguments import Arguments, option
from ..errors import MatrixError
from ..unpack import unpack

ARGUMENTS: Arguments = {
    "parts": option("the folder of the parts", type=Path, metavar="PARTS"),
    "folder": option("the folder of the wheelhouse", type=Path, metavar="DIR"),
}


def run(options: argparse.Namespace) -> int:
    """Check and extract the parts; returns the exit code."""
    try:
        unpack(options.parts, options.folder)
    except (ValueError, OSError) as error:
        raise MatrixError(str(error)) from error
    return 0
