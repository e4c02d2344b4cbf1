"""``kernel-compat-matrix atlas``: show when seams appeared, changed and vanished upstream."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import MatrixError
from .upstream import SEAMS


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
    project = parser.add_argument_group("of a project")
    project.add_argument(
        "--project",
        type=Path,
        metavar="DIR",
        help="show instead what a source tree imports from these distributions and patches in them, where that is gone or "
        "changed, and which patches kernel-compat makes unnecessary; exit with 1 if an unguarded name is missing in a release",
    )
    project.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="files and folders to leave out, relative to DIR, such as 'tests' or '*/vendored/*' (repeatable)",
    )
    project.add_argument("--all", action="store_true", help="show also the names that every release has")
    project.add_argument("--sarif", action="store_true", help="print SARIF 2.1.0, for code review")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="the folder of the cache")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 0; 1 if `--check` found a disagreement, or a project uses a name that a release lacks.

    Raises:
        MatrixError: bad input, or a release that can't be read.
    """
    from .lookup import run  # here: its imports take longer than most other commands

    for option, given in {"--check": arguments.check, "--seam": arguments.seam}.items():
        if arguments.project is not None and given:
            raise MatrixError(f"{option} is for seams, and can't be combined with --project")
    for option, given in {"--exclude": arguments.exclude, "--all": arguments.all, "--sarif": arguments.sarif}.items():
        if arguments.project is None and given:
            raise MatrixError(f"{option} needs --project")
    if arguments.sarif and arguments.json:
        raise MatrixError("--json and --sarif can't be combined")
    return run(arguments)
