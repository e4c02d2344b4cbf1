"""What `atlas --project` prints: text, JSON or SARIF."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kernel_compat.patching.shim import Shim

from ..releases import Release
from ..scan import Findings
from ..tables import heading, what, when
from ..upstream import REPLACEMENTS, SEAMS, Replacement
from .names import PACKAGES, Name, names_of, targets_of
from .sarif import Finding, as_sarif
from .source_tree import Scan, scan
from .walker import Use

__all__ = ["Scanned", "scan_project", "show_project"]

_GUARDS = {"try": "in a try", "check": "behind a check", "typing": "for type checkers"}


@dataclass(frozen=True)
class Scanned:
    """A scan, and what is to be looked up for it in each release, by distribution."""

    scan: Scan
    targets: Mapping[str, Sequence[str]]

    @property
    def distributions(self) -> list[str]:
        """The distributions that the project uses."""
        return [distribution for distribution in SEAMS if self.targets.get(distribution)]


def scan_project(arguments: argparse.Namespace) -> Scanned:
    """Scan the project of the arguments.

    Raises:
        MatrixError: it isn't a folder with Python files.
    """
    calls = [pattern for one in REPLACEMENTS if one.called for pattern in one.patterns]
    found = scan(arguments.project, PACKAGES, calls, arguments.exclude)
    return Scanned(found, targets_of(found))


def show_project(
    arguments: argparse.Namespace,
    scanned: Scanned,
    releases: Mapping[str, Sequence[Release]],
    findings: Findings,
    shims: Sequence[Shim],
    notes: Sequence[str],
) -> int:
    """Print what was found; returns the exit code: 1 if a release lacks a name that is used without a guard."""
    names = names_of(scanned.scan, releases, findings, shims)
    if arguments.sarif:
        findings_ = [one for name in names for one in _findings(name)]
        print(json.dumps(as_sarif(findings_, scanned.scan.unread), indent=2))
    elif arguments.json:
        print(json.dumps(_as_json(arguments.project, scanned.scan, names, releases, notes), indent=2))
    else:
        _show(arguments, scanned, names, releases)
    return int(any(name.broken for name in names))


def _show(
    arguments: argparse.Namespace,
    scanned: Scanned,
    names: Sequence[Name],
    releases: Mapping[str, Sequence[Release]],
) -> None:
    console = Console(highlight=False)
    for distribution in releases:
        console.print(Text(heading(distribution, releases[distribution]), "bold"))
    broken = [name for name in names if name.broken]
    added = [name for name in names if name.added]
    guarded = [name for name in names if name.lacking and not name.broken and not name.added]
    changed = [name for name in names if name.changed and any(use.kind == "patch" for use in name.uses)]
    _section(console, "Used without a guard, and gone", [name for name in broken if name.gone])
    _section(console, "Used without a guard, and newer than some of these releases", [n for n in broken if not n.gone])
    _section(console, "Used behind a guard only, and missing in some of these releases", guarded)
    _section(console, "Assigned, and in none of these releases: the project adds it, or it was gone before", added)
    _section(console, "Patched, and with other parameters in some releases", changed, signatures=True, patches=True)
    unnecessary = [name for name in names if name.replacements]
    if unnecessary:
        console.print(Text("\nPatches that kernel-compat makes unnecessary", "bold"))
    by_replacement: dict[Replacement, list[Name]] = {}
    for name in unnecessary:
        for one in name.replacements:
            by_replacement.setdefault(one, []).append(name)
    for one, several in by_replacement.items():
        console.print(Text.assemble("\n", (one.call, "green"), f"  {one.gives}"), soft_wrap=True)
        for name in several:
            console.print(Text(f"  {name.name}", "cyan"), soft_wrap=True)
            _places(console, name.patches)
    if arguments.all:
        rest = [name for name in names if not name.lacking and name.releases]
        _section(console, "In every release", rest, signatures=True)
    for path, why in scanned.scan.unread.items():
        console.print(Text(f"not read: {path}: {why}", "yellow"), soft_wrap=True)
    console.print()
    console.print(_summary(scanned.scan, names, broken, guarded, unnecessary), soft_wrap=True)


def _section(
    console: Console, title: str, names: Sequence[Name], signatures: bool = False, patches: bool = False
) -> None:
    if names:
        console.print(Text(f"\n{title}", "bold"))
    for name in names:
        console.print(Text.assemble("\n", (name.name, "cyan"), f"  {name.state}"), soft_wrap=True)
        if signatures:
            table = Table.grid(padding=(0, 2))
            table.add_column(no_wrap=True)
            table.add_column(overflow="fold")
            for event in name.history:
                table.add_row(f"  {when(event)}", what(event))
            console.print(table)
        _places(console, name.patches if patches else name.uses)


def _places(console: Console, uses: Iterable[Use]) -> None:
    for use in uses:
        details = [use.how, *([_GUARDS[use.guard]] if use.guard else []), *(["in a function"] if use.deferred else [])]
        console.print(Text(f"    {use.path}:{use.line}  {', '.join(details)}", "dim"), soft_wrap=True)


def _summary(
    found: Scan, names: Sequence[Name], broken: Sequence[Name], guarded: Sequence[Name], unnecessary: Sequence[Name]
) -> str:
    patches = sum(len(name.patches) for name in names)
    replaced = sum(len(name.patches) for name in unnecessary)
    gone = [name for name in broken if name.gone]
    imported = sum(any(use.kind == "import" for use in name.broken) for name in gone)
    unlooked = sum(not name.releases for name in names if name.name.partition(".")[0] in PACKAGES)
    more = f", {unlooked} not looked up" if unlooked else ""
    files = "1 file" if found.files == 1 else f"{found.files} files"
    return (
        f"{files}, {len(names)} names: without a guard {len(gone)} gone ({imported} of them imported) and "
        f"{len(broken) - len(gone)} newer than a release, {len(guarded)} missing behind a guard{more}; {patches} patches, "
        f"{replaced} of them unnecessary"
    )


def _as_json(
    project: Path,
    found: Scan,
    names: Sequence[Name],
    releases: Mapping[str, Sequence[Release]],
    notes: Sequence[str],
) -> dict[str, Any]:
    return {
        "project": str(project),
        "files": found.files,
        "unread": found.unread,
        "releases": {distribution: [str(one.version) for one in several] for distribution, several in releases.items()},
        "names": [
            {
                "name": name.name,
                "distribution": name.distribution,
                "state": name.state,
                "lacking": [str(release.version) for release in name.lacking],
                "added": name.added,
                "changed": name.changed,
                "history": [
                    {
                        "release": str(event.release.version),
                        "what": event.what,
                        "text": str(event.found),
                        "new": event.new,
                        "gone": event.gone,
                    }
                    for event in name.history
                ],
                "replacements": [{"call": one.call, "gives": one.gives} for one in name.replacements],
                "uses": [{k: v for k, v in dataclasses.asdict(use).items() if k != "name"} for use in name.uses],
            }
            for name in names
        ],
        "notes": list(notes),
    }


def _findings(name: Name) -> Iterator[Finding]:
    """The findings about a name, one for each place."""
    for use in name.uses if name.lacking and not name.added else ():
        if use.kind != "call":
            where = f"{name.distribution}: {name.name} is missing: {name.state}"
            suffix = f" (used {_GUARDS[use.guard]})" if use.guard else ""
            yield Finding("missing-name", "note" if use.guard else "error", f"{where}{suffix}", use)
    for use in name.uses if name.changed else ():
        if use.kind == "patch":
            forms = "; ".join(f"{when(event)} {event.found}" for event in name.history if event.what != "vanished")
            yield Finding(
                "changed-signature", "warning", f"{name.name} is patched, and has other parameters: {forms}", use
            )
    for use in name.patches if name.replacements else ():
        calls = "; ".join(f"{one.call} {one.gives}" for one in name.replacements)
        yield Finding(
            "unnecessary-patch", "note", f"kernel-compat makes this patch of {name.name} unnecessary: {calls}", use
        )
