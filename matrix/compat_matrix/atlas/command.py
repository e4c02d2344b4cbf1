"""``kernel-compat-matrix atlas``: show when seams appeared, changed and vanished upstream."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from rich.console import Console
from rich.text import Text

from kernel_compat.patching.shim import Shim, discover

from ..errors import MatrixError
from ..words import plural
from .index import Index
from .project.names import names_of, targets_of
from .project.report import show_project
from .project.uses import scan
from .published import Cache
from .releases import Release, covered, newest, select
from .scan import Disagreement, Event, Findings, check, claims, heading, history, history_table, read
from .upstream import PACKAGES, REPLACEMENTS, SEAMS, distribution_of

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

_Releases = Mapping[str, Sequence[Release]]
#: By distribution and target.
_Histories = Mapping[str, Mapping[str, Sequence[Event]]]


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
    for option, given in {"--check": arguments.check, "--seam": arguments.seam}.items():
        if arguments.project is not None and given:
            raise MatrixError(f"{option} is for seams, and can't be combined with --project")
    for option, given in {"--exclude": arguments.exclude, "--all": arguments.all, "--sarif": arguments.sarif}.items():
        if arguments.project is None and given:
            raise MatrixError(f"{option} needs --project")
    if arguments.sarif and arguments.json:
        raise MatrixError("--json and --sarif can't be combined")
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
            raise MatrixError(text)
        note(text)
    for shim in shims:
        try:
            for specifier in (shim.versions, *(seam.versions for seam in shim.seams)):
                SpecifierSet(specifier)
        except InvalidSpecifier as error:
            raise MatrixError(f"the shim {shim.name}: {error}") from error

    def read_all(targets: Mapping[str, Sequence[str]], releases: _Releases) -> Findings:
        wanted = {one: targets.get(distribution, ()) for distribution in releases for one in releases[distribution]}
        return read(wanted, index, cache, note)

    if arguments.project is not None:
        calls = [pattern for one in REPLACEMENTS if one.called for pattern in one.patterns]
        found = scan(arguments.project, PACKAGES, calls, arguments.exclude)
        targets = targets_of(found)
        releases = _releases(arguments, shims, index, [one for one in SEAMS if one in targets])
        names = names_of(found, releases, read_all(targets, releases), shims)
        return show_project(arguments, found, names, releases, notes)
    if not shims and not any(_given(arguments).values()):
        raise MatrixError("no installed shim claims releases: name the releases to read")
    releases = _releases(arguments, shims, index, dict.fromkeys(shim.distribution for shim in shims))
    seams = _seams(arguments.seam, shims, releases)
    findings = read_all(seams, releases)
    histories = {
        distribution: {
            target: history({one: findings[one][target] for one in releases[distribution]}) for target in targets
        }
        for distribution, targets in seams.items()
    }
    disagreements = check(shims, findings) if arguments.check else []
    if arguments.json:
        data = _as_json(releases, histories, shims, notes)
        if arguments.check:
            data["check"] = {"disagreements": [_plain(one) for one in disagreements]}
        print(json.dumps(data, indent=2))
    elif arguments.check:
        _show_check(disagreements, shims, findings)
    else:
        _show(releases, histories, shims)
    return int(any(one.certain for one in disagreements))


def _given(arguments: argparse.Namespace) -> dict[str, str | None]:
    return {distribution: getattr(arguments, distribution.replace("-", "_")) for distribution in SEAMS}


def _releases(
    arguments: argparse.Namespace, shims: Sequence[Shim], index: Index, used: Iterable[str]
) -> dict[str, list[Release]]:
    """The releases given as arguments; without any, those that the shims claim of each distribution in use, or its newest one."""
    given = {distribution: text for distribution, text in _given(arguments).items() if text is not None}
    if given:
        return {
            distribution: select(distribution, text, index.files(distribution)) for distribution, text in given.items()
        }
    found = {}
    for distribution in used:
        available = index.files(distribution)
        claimed = [shim.versions for shim in shims if shim.distribution == distribution]
        found[distribution] = covered(distribution, claimed, available) or [newest(distribution, available)]
    return found


def _seams(given: Sequence[str], shims: Sequence[Shim], releases: _Releases) -> dict[str, list[str]]:
    """The seams to look for, by distribution."""
    seams = {
        distribution: [
            *SEAMS.get(distribution, ()),
            *(seam.target for shim in shims if shim.distribution == distribution for seam in shim.seams),
        ]
        for distribution in releases
    }
    for target in given:
        if not _TARGET.fullmatch(target):
            raise MatrixError(
                f"{target!r} isn't a seam; write package.module:attribute or package.module:Class.attribute"
            )
        owner = distribution_of(target)
        if owner not in seams:
            raise MatrixError(f"{target} belongs to {owner}: name the releases of {owner} to read")
        seams[owner].append(target)
    return {distribution: list(dict.fromkeys(targets)) for distribution, targets in seams.items()}


def _users(target: str, shims: Sequence[Shim]) -> list[str]:
    return [shim.name for shim in shims if any(seam.target == target for seam in shim.seams)]


def _show(releases: _Releases, histories: _Histories, shims: Sequence[Shim]) -> None:
    console = Console(highlight=False)
    for distribution, targets in histories.items():
        console.print(Text(heading(distribution, releases[distribution]), "bold"))
        for target, events in targets.items():
            users = ", ".join(_users(target, shims))
            console.print(Text.assemble("\n", (target, "cyan"), (f"  {users}", "dim")), soft_wrap=True)
            console.print(history_table(events) if events else "  nowhere")
        console.print()


def _show_check(disagreements: Sequence[Disagreement], shims: Sequence[Shim], read: Mapping[Release, object]) -> None:
    console = Console(highlight=False)
    for disagreement in disagreements:
        console.print(Text(str(disagreement), "red" if disagreement.certain else "yellow"), soft_wrap=True)
    checked = sum(len(shim.seams_for(str(one.version))) for shim in shims for one in read if claims(shim, one))
    certain = sum(one.certain for one in disagreements)
    console.print(
        f"{plural(checked, 'claim')} on {plural(len(read), 'release')}: {certain} wrong, {len(disagreements) - certain} uncertain"
    )


def _as_json(releases: _Releases, histories: _Histories, shims: Sequence[Shim], notes: Sequence[str]) -> dict[str, Any]:
    return {
        "releases": {
            distribution: [
                {
                    "version": str(one.version),
                    "file": one.file.filename,
                    "sha256": one.file.sha256,
                    "requires_python": one.file.requires_python,
                }
                for one in several
            ]
            for distribution, several in releases.items()
        },
        "seams": [
            {
                "distribution": distribution,
                "target": target,
                "shims": _users(target, shims),
                "history": [{**_plain(event), "text": str(event.found)} for event in events],
            }
            for distribution, targets in histories.items()
            for target, events in targets.items()
        ],
        "notes": list(notes),
    }


def _plain(entry: Event | Disagreement) -> dict[str, Any]:
    return {**dataclasses.asdict(entry), "release": str(entry.release.version)}
