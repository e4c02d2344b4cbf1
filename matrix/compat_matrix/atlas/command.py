"""``kernel-compat-matrix atlas``: show when seams appeared, changed and vanished upstream."""

from __future__ import annotations

import argparse
from pathlib import Path

from .seam_list import SEAMS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "When each seam appeared, changed its parameters and vanished, read from the published wheels. RELEASES, with commas "
        "between several: 5.3.0; 5.3, its newest patch; 4.48-5.23, the newest patch of every minor; 5.9.0-5.10.2, "
        "every release between; latest. Without any: the minors that the installed shims claim."
    )
    for distribution in SEAMS:
        parser.add_argument(f"--{distribution}", metavar="RELEASES", help=f"the releases of {distribution} to read")
    parser.add_argument(
        "--seam",
        action="append",
        default=[],
        metavar="MODULE:ATTRIBUTE",
        help="a further seam to look for (repeatable)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare with the claims of the installed shims; exit with 1 if they differ",
    )
    parser.add_argument("--cache", type=Path, metavar="DIR", help="the folder of the cache")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 0; 1 if `--check` found a disagreement.

    Raises:
        MatrixError: bad input, or a release that can't be read.
    """
    from .lookup import run  # here: its imports take longer than most other commands

    return run(arguments)
