"""The command ``kernel-compat-atlas``: what releases have of the library's seams, or of what a project uses."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .errors import AtlasError
from .index import Index
from .project.names import names_of, targets_of
from .project.report import show_project
from .project.uses import scan
from .published import Cache
from .releases import Release, covered, select
from .scan import read
from .seams import Seams, installed_shims, read_seams
from .upstream import PACKAGES, REPLACEMENTS, SEAMS
from .words import Notes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: that of `run`, 2 after an `AtlasError`, 130 if it was interrupted."""
    parser = argparse.ArgumentParser("kernel-compat-atlas")
    parser.add_argument("--version", action="version", version=__version__)
    add_arguments(parser)
    gc.set_threshold(100_000)  # parsed modules are many objects, and few of them are in cycles
    try:
        code = run(parser.parse_args(arguments))
        sys.stdout.flush()
        return code
    except AtlasError as error:
        print(f"kernel-compat-atlas: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser, or to that of ``kernel-compat-matrix atlas``."""
    parser.description = (
        "When each seam appeared, changed its parameters and vanished, read from the published wheels. RELEASES, with commas "
        "between several: 5.3.0; 5.3, its newest patch; 4.48-5.23, the newest patch of every minor; 5.9.0-5.10.2, "
        "every release between; latest. Without any: the minors that the installed shims claim."
    )
    for distribution in SEAMS:
        words = f"the releases of {distribution} to read"
        parser.add_argument(f"--{distribution}", dest=distribution, metavar="RELEASES", help=words)
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
        AtlasError: bad input, or a release that can't be read.
    """
    refuse_combinations(arguments)
    notes = Notes()
    if arguments.project is not None:
        return _project(arguments, notes)
    return show(seams_of(arguments, notes), arguments, notes)


def refuse_combinations(arguments: argparse.Namespace) -> None:
    """Raise an `AtlasError` if options are given that can't be combined."""
    options = vars(arguments)
    for option in ("check", "seam") if arguments.project is not None else ("exclude", "all", "sarif"):
        if options[option] and arguments.project is not None:
            raise AtlasError(f"--{option} is for seams, and can't be combined with --project")
        if options[option]:
            raise AtlasError(f"--{option} needs --project")
    if arguments.sarif and arguments.json:
        raise AtlasError("--json and --sarif can't be combined")


def seams_of(arguments: argparse.Namespace, notes: Notes) -> Seams:
    """The seams in the releases that the options select. Errors are those of `run`."""
    sources = _Sources(arguments, notes)
    if not sources.shims and not sources.selected:
        raise AtlasError("no installed shim claims releases: name the releases to read")
    claimed = dict.fromkeys(shim.distribution for shim in sources.shims)
    every = sources.selected or sorted(claimed, key=[*SEAMS, *claimed].index)
    releases = {one: sources.releases(one) for one in every}
    return read_seams(releases, sources.shims, sources.index, sources.cache, arguments.seam)


class _Sources:
    """What the releases that the options select are read from."""

    def __init__(self, arguments: argparse.Namespace, notes: Notes) -> None:
        self.cache, self.index = Cache(arguments.cache, notes.add), Index()
        self.shims = installed_shims(None if arguments.check else notes.add)
        given = {distribution: vars(arguments)[distribution] for distribution in SEAMS}
        self.selected: dict[str, str] = {name: text for name, text in given.items() if text is not None}

    def releases(self, distribution: str) -> list[Release]:
        """The releases of a distribution, by default those that shims claim."""
        available = self.index.files(distribution)
        if distribution in self.selected:
            return select(distribution, self.selected[distribution], available)
        claimed = (one.versions for one in self.shims if one.distribution == distribution)
        return covered(distribution, claimed, available)


def _project(arguments: argparse.Namespace, notes: Notes) -> int:
    sources = _Sources(arguments, notes)
    calls = [pattern for one in REPLACEMENTS if one.called for pattern in one.patterns]
    found = scan(arguments.project, PACKAGES, calls, arguments.exclude)
    targets, selected = targets_of(found), sources.selected
    releases = {one: sources.releases(one) for one in selected or SEAMS if one in selected or one in targets}
    names = names_of(found, releases, read(releases, targets, sources.index, sources.cache), sources.shims)
    return show_project(arguments, found, names, releases, notes)


def show(seams: Seams, arguments: argparse.Namespace, notes: Notes) -> int:
    """Print seams in the form that the options name; returns the exit code."""
    if arguments.json:
        print(json.dumps(seams.as_json(notes, arguments.check), indent=2))
    elif arguments.check:
        seams.show_check()
    else:
        seams.show()
    return int(arguments.check and any(one.certain for one in seams.disagreements))
