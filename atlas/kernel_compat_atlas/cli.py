"""The command ``kernel-compat-atlas``: what releases have of the library's seams, or of what a project uses."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from rich.console import Console
from rich.text import Text

from kernel_compat.patching.shim import Shim, discover

from . import __version__
from .errors import AtlasError
from .index import Index
from .project.names import names_of, targets_of
from .project.report import show_project
from .project.uses import scan
from .published import Cache
from .releases import Release, covered, select
from .scan import Disagreement, Event, Findings, check, claims, heading, history, history_table, read
from .upstream import PACKAGES, REPLACEMENTS, SEAMS, distribution_of
from .words import plural

#: The histories of seams, by distribution and target.
_Histories = Mapping[str, Mapping[str, Sequence[Event]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: that of `run`, 2 after an `AtlasError`, 130 if it was interrupted."""
    parser = argparse.ArgumentParser("kernel-compat-atlas")
    parser.add_argument("--version", action="version", version=__version__)
    add_arguments(parser)
    gc.set_threshold(100_000)  # parsed modules are many objects, and few of them are in cycles
    try:
        return run(parser.parse_args(arguments))
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
    options = vars(arguments)
    for option in ("check", "seam") if arguments.project is not None else ("exclude", "all", "sarif"):
        if options[option] and arguments.project is not None:
            raise AtlasError(f"--{option} is for seams, and can't be combined with --project")
        if options[option]:
            raise AtlasError(f"--{option} needs --project")
    if arguments.sarif and arguments.json:
        raise AtlasError("--json and --sarif can't be combined")
    errors = Console(stderr=True, highlight=False)
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        errors.print(f"note: {text}", markup=False, soft_wrap=True)

    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it logs a warning at each retry
    cache, index = Cache(arguments.cache, note), Index()
    shims, broken = discover()
    for name, why in broken.items():
        text = f"the shims of the entry point {name} can't be loaded: {why}"
        if arguments.check:
            raise AtlasError(text)
        note(text)
    for shim in shims:
        try:
            for specifier in (shim.versions, *(seam.versions for seam in shim.seams)):
                SpecifierSet(specifier)
        except InvalidSpecifier as error:
            raise AtlasError(f"the shim {shim.name}: {error}") from error
    selected = {distribution: options[distribution] for distribution in SEAMS if options[distribution] is not None}

    def releases_of(distribution: str) -> list[Release]:
        available = index.files(distribution)
        if distribution in selected:
            return select(distribution, selected[distribution], available)
        return covered(distribution, (one.versions for one in shims if one.distribution == distribution), available)

    def findings_of(targets: Mapping[str, Sequence[str]]) -> Findings:
        wanted = {one: targets.get(distribution, ()) for distribution in releases for one in releases[distribution]}
        return read(wanted, index, cache, note)

    if arguments.project is not None:
        calls = [pattern for one in REPLACEMENTS if one.called for pattern in one.patterns]
        found = scan(arguments.project, PACKAGES, calls, arguments.exclude)
        targets = targets_of(found)
        releases = {one: releases_of(one) for one in selected or SEAMS if one in selected or one in targets}
        names = names_of(found, releases, findings_of(targets), shims)
        return show_project(arguments, found, names, releases, notes)
    if not shims and not selected:
        raise AtlasError("no installed shim claims releases: name the releases to read")
    releases = {one: releases_of(one) for one in selected or dict.fromkeys(shim.distribution for shim in shims)}
    seams = _seams(arguments.seam, shims, releases)
    findings = findings_of(seams)
    disagreements = check(shims, findings) if arguments.check else []
    histories = {
        distribution: {
            target: history({one: findings[one][target] for one in several}) for target in seams[distribution]
        }
        for distribution, several in releases.items()
    }
    if arguments.json:
        checked = {"check": {"disagreements": [one.as_json() for one in disagreements]}} if arguments.check else {}
        print(json.dumps({**_as_json(releases, histories, shims), "notes": notes, **checked}, indent=2))
    elif arguments.check:
        _show_check(disagreements, shims, findings)
    else:
        _show(releases, histories, shims)
    return int(any(one.certain for one in disagreements))


def _seams(given: Sequence[str], shims: Sequence[Shim], releases: Iterable[str]) -> dict[str, list[str]]:
    """The seams to look for, by distribution."""
    seams = {distribution: dict.fromkeys(SEAMS.get(distribution, ())) for distribution in releases}
    for shim in shims:
        seams.get(shim.distribution, {}).update(dict.fromkeys(seam.target for seam in shim.seams))
    for target in given:
        if target.count(":") != 1 or not all(map(str.isidentifier, re.split("[.:]", target))):
            raise AtlasError(
                f"{target!r} isn't a seam; write package.module:attribute or package.module:Class.attribute"
            )
        owner = distribution_of(target)
        if owner not in seams:
            raise AtlasError(f"{target} belongs to {owner}: name the releases of {owner} to read")
        seams[owner][target] = None
    return {distribution: list(targets) for distribution, targets in seams.items()}


def _shims_of(target: str, shims: Sequence[Shim]) -> list[str]:
    return [shim.name for shim in shims if target in {seam.target for seam in shim.seams}]


def _show(releases: Mapping[str, Sequence[Release]], histories: _Histories, shims: Sequence[Shim]) -> None:
    console = Console(highlight=False)
    for distribution, several in releases.items():
        console.print(Text(heading(distribution, several), "bold"))
        for target, events in histories[distribution].items():
            replacing = ", ".join(_shims_of(target, shims))
            console.print(Text.assemble("\n", (target, "cyan"), (f"  {replacing}", "dim")), soft_wrap=True)
            console.print(history_table(events) if events else "  nowhere")
        console.print()


def _show_check(disagreements: Sequence[Disagreement], shims: Sequence[Shim], read: Iterable[Release]) -> None:
    console = Console(highlight=False)
    for disagreement in disagreements:
        console.print(Text(str(disagreement), "red" if disagreement.certain else "yellow"), soft_wrap=True)
    releases = [*read]
    claimed = sum(len(shim.seams_for(str(one.version))) for shim in shims for one in releases if claims(shim, one))
    certain = sum(one.certain for one in disagreements)
    console.print(
        f"{plural(claimed, 'claim')} on {plural(len(releases), 'release')}: "
        f"{certain} wrong, {len(disagreements) - certain} uncertain"
    )


def _as_json(releases: Mapping[str, Sequence[Release]], histories: _Histories, shims: Sequence[Shim]) -> dict[str, Any]:
    return {
        "releases": {distribution: [one.as_json() for one in several] for distribution, several in releases.items()},
        "seams": [
            {
                "distribution": distribution,
                "target": target,
                "shims": _shims_of(target, shims),
                "history": [event.as_json() for event in events],
            }
            for distribution, seams in histories.items()
            for target, events in seams.items()
        ],
    }
