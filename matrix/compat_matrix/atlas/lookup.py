"""The implementation of `atlas`: from its arguments to its output."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from kernel_compat.patching.shim import Shim, discover

from ..errors import MatrixError
from ..words import plural
from .cache import Cache, default_folder
from .index import Index
from .project.report import scan_project, show_project
from .releases import Release, covered, newest, select
from .scan import Disagreement, Event, Findings, check, claims, history, read, unclaimed
from .tables import heading, what, when
from .upstream import SEAMS, distribution_of

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

_Releases = Mapping[str, Sequence[Release]]
#: By distribution and target.
_Histories = Mapping[str, Mapping[str, Sequence[Event]]]


def run(arguments: argparse.Namespace) -> int:
    """Read the releases and print the seams; with ``--check``, also compare them with the shims. Returns the exit code."""
    errors = Console(stderr=True, highlight=False)
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        errors.print(f"note: {text}", markup=False, soft_wrap=True)

    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it logs a warning at each retry
    shims = _shims(arguments.check, note)
    cache = Cache(arguments.cache or default_folder(), note)
    index = Index()

    def read_all(targets: Mapping[str, Sequence[str]], releases: _Releases) -> Findings:
        wanted = {one: targets.get(distribution, ()) for distribution in releases for one in releases[distribution]}
        with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
            task = progress.add_task("Reading", total=len(wanted))
            return read(wanted, index, cache, note, lambda: progress.advance(task))

    if arguments.project is not None:
        scanned = scan_project(arguments)
        releases = _releases(arguments, shims, index, scanned.distributions)
        return show_project(arguments, scanned, releases, read_all(scanned.targets, releases), shims, notes)
    releases = _releases(arguments, shims, index)
    seams = _seams(arguments.seam, shims, releases)
    findings = read_all(seams, releases)
    histories = {
        distribution: {target: history(target, releases[distribution], findings) for target in targets}
        for distribution, targets in seams.items()
    }
    disagreements = check(shims, findings) if arguments.check else []
    edges = list(unclaimed(shims, findings)) if arguments.check else []
    if arguments.json:
        data = _as_json(releases, histories, shims, notes)
        if arguments.check:
            data["check"] = {"disagreements": [_plain(one) for one in disagreements], "information": edges}
        print(json.dumps(data, indent=2))
    elif arguments.check:
        _show_check(disagreements, edges, shims, findings)
    else:
        _show(releases, histories, shims)
    return int(any(one.certain for one in disagreements))


def _shims(all_needed: bool, note: Callable[[str], None]) -> list[Shim]:
    shims, broken = discover()
    for shim in shims:
        try:
            for specifier in (shim.versions, *(seam.versions for seam in shim.seams)):
                SpecifierSet(specifier)
        except InvalidSpecifier as error:
            raise MatrixError(f"the shim {shim.name}: {error}") from error
    for name, why in broken.items():
        text = f"the shims of the entry point {name} can't be loaded: {why}"
        if all_needed:
            raise MatrixError(text)
        note(text)
    return shims


def _releases(
    arguments: argparse.Namespace, shims: Sequence[Shim], index: Index, used: Sequence[str] | None = None
) -> dict[str, list[Release]]:
    """The releases to read, by distribution: those of the arguments, else those that the shims claim.

    Args:
        used: the distributions that a project uses; the others aren't read, and of one that no shim is for the newest is.
    """
    texts = {distribution: getattr(arguments, distribution.replace("-", "_")) for distribution in SEAMS}
    asked = {distribution: text for distribution, text in texts.items() if text is not None}
    if asked:
        return {
            distribution: select(distribution, text, index.files(distribution)) for distribution, text in asked.items()
        }
    if used is not None:
        return {distribution: _claimed_or_newest(shims, distribution, index) for distribution in used}
    if not shims:
        raise MatrixError("no installed shim claims releases: name the releases to read")
    claimed: dict[str, list[str]] = {}
    for shim in shims:
        claimed.setdefault(shim.distribution, []).append(shim.versions)
    return {
        distribution: covered(distribution, specifiers, index.files(distribution))
        for distribution, specifiers in claimed.items()
    }


def _claimed_or_newest(shims: Sequence[Shim], distribution: str, index: Index) -> list[Release]:
    available = index.files(distribution)
    claimed = covered(distribution, [shim.versions for shim in shims if shim.distribution == distribution], available)
    return claimed or [newest(distribution, available)]


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


def _show(releases: _Releases, histories: _Histories, shims: Sequence[Shim]) -> None:
    console = Console(highlight=False)
    for distribution, targets in histories.items():
        console.print(Text(heading(distribution, releases[distribution]), "bold"))
        for target, events in targets.items():
            users = [shim.name for shim in shims if any(seam.target == target for seam in shim.seams)]
            console.print(Text.assemble("\n", (target, "cyan"), (f"  {', '.join(users)}", "dim")), soft_wrap=True)
            table = Table.grid(padding=(0, 2))
            table.add_column(no_wrap=True)
            table.add_column(overflow="fold")
            if not events:
                table.add_row("  nowhere", "")
            for event in events:
                table.add_row(f"  {when(event)}", what(event))
            console.print(table)
        console.print()


def _show_check(
    disagreements: Sequence[Disagreement], edges: Sequence[str], shims: Sequence[Shim], read: Mapping[Release, object]
) -> None:
    console = Console(highlight=False)
    for disagreement in disagreements:
        console.print(Text(str(disagreement), "red" if disagreement.certain else "yellow"), soft_wrap=True)
    for edge in edges:
        console.print(Text(f"information: {edge}", "dim"), soft_wrap=True)
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
                "shims": [shim.name for shim in shims if any(seam.target == target for seam in shim.seams)],
                "history": [_plain(event) for event in events],
            }
            for distribution, targets in histories.items()
            for target, events in targets.items()
        ],
        "notes": list(notes),
    }


def _plain(entry: Event | Disagreement) -> dict[str, Any]:
    text = {"text": str(entry.found)} if isinstance(entry, Event) else {}
    return {**dataclasses.asdict(entry), **text, "release": str(entry.release.version)}
