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
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from kernel_compat.patching.shim import Shim, discover

from ..errors import MatrixError
from .cache import Cache, default_folder
from .index import Index
from .releases import Release, covered, select
from .scan import Disagreement, Event, check, claims, history, read, unclaimed
from .seam_list import SEAMS

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
    index = Index(cache, note)
    releases = _releases(arguments, shims, index)
    seams = _seams(arguments.seam, shims, releases)
    wanted = {release: seams[distribution] for distribution in releases for release in releases[distribution]}
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("Reading", total=len(wanted))
        findings = read(wanted, index, cache, note, lambda: progress.advance(task))
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
        _show_check(disagreements, edges, shims, wanted)
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


def _releases(arguments: argparse.Namespace, shims: Sequence[Shim], index: Index) -> dict[str, list[Release]]:
    texts = {distribution: getattr(arguments, distribution.replace("-", "_")) for distribution in SEAMS}
    asked = {distribution: text for distribution, text in texts.items() if text is not None}
    if asked:
        return {
            distribution: select(distribution, text, index.files(distribution)) for distribution, text in asked.items()
        }
    if not shims:
        raise MatrixError("no installed shim claims releases: name the releases to read")
    claimed: dict[str, list[str]] = {}
    for shim in shims:
        claimed.setdefault(shim.distribution, []).append(shim.versions)
    return {
        distribution: covered(distribution, specifiers, index.files(distribution))
        for distribution, specifiers in claimed.items()
    }


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
        owner = _owner(target)
        if owner not in seams:
            raise MatrixError(f"{target} belongs to {owner}: name the releases of {owner} to read")
        seams[owner].append(target)
    return {distribution: list(dict.fromkeys(targets)) for distribution, targets in seams.items()}


def _owner(target: str) -> str:
    """The distribution that installs a module, by its name."""
    if target.startswith(("flash_attn.cute.", "flash_attn.cute:")):
        return "flash-attn-4"
    return canonicalize_name(re.split("[.:]", target)[0])


def _show(releases: _Releases, histories: _Histories, shims: Sequence[Shim]) -> None:
    console = Console(highlight=False)
    for distribution, targets in histories.items():
        console.print(Text(_heading(distribution, releases[distribution]), "bold"))
        for target, events in targets.items():
            users = [shim.name for shim in shims if any(seam.target == target for seam in shim.seams)]
            console.print(Text.assemble("\n", (target, "cyan"), (f"  {', '.join(users)}", "dim")), soft_wrap=True)
            table = Table.grid(padding=(0, 2))
            table.add_column(no_wrap=True)
            table.add_column(overflow="fold")
            if not events:
                table.add_row("  nowhere", "")
            for event in events:
                table.add_row(f"  {_when(event)}", _what(event))
            console.print(table)
        console.print()


def _heading(distribution: str, releases: Sequence[Release]) -> str:
    if not releases:
        return f"{distribution}: no shim claims a release"
    first, last = releases[0].version, releases[-1].version
    pythons: dict[str, str] = {}
    for release in releases:
        python = release.file.requires_python or "any"
        if python != next(reversed(pythons.values()), None):
            pythons[str(release.version)] = python
    python = ", ".join(f"{python} (since {version})" for version, python in pythons.items())
    many = f"{len(releases)} releases, {first} to {last}" if len(releases) > 1 else f"{first}"
    return f"{distribution}: {many}; Python {python}"


def _when(event: Event) -> str:
    if event.what == "vanished":
        return f"gone from {event.release.version}"
    return f"since {event.release.version}{' or before' if event.what == 'there' else ''}"


def _what(event: Event) -> Text:
    if event.what == "vanished":
        return Text("")
    text = Text(str(event.found))
    for name in event.new:
        text.highlight_regex(rf"(?<=[(* ]){re.escape(name)}(?=[,)=])", "bold green")
    if event.gone:
        text.append(f"  without {', '.join(event.gone)}", "red")
    if event.found.home:
        text.append(f"  from {event.found.home}", "dim")
    return text


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
        f"{checked} claims on {len(read)} releases: {certain} wrong, {len(disagreements) - certain} uncertain"
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
