"""What `--project` prints: text, JSON or SARIF 2.1.0, which code review reads."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from .. import __version__
from ..releases import Release
from ..scan import heading, history_table
from ..upstream import PACKAGES
from ..words import plural
from .names import Name
from .uses import Scan, Use

_GUARDS = {"try": "in a try", "check": "behind a check", "typing": "for type checkers"}
#: The rules of SARIF results and what they find.
_RULES = {
    "missing-name": "A release lacks a name that is used.",
    "changed-signature": "A function that is patched has other parameters in some releases.",
    "unnecessary-patch": "kernel-compat makes a patch unnecessary.",
}
#: Code review tells a new result from a known one by this name, which it had first.
_TOOL = "kernel-compat-matrix"
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def show_project(
    arguments: argparse.Namespace,
    found: Scan,
    names: Sequence[Name],
    releases: Mapping[str, Sequence[Release]],
    notes: Sequence[str],
) -> int:
    """Print what was found; returns the exit code: 1 if a release lacks a name that is used without a guard."""
    if arguments.sarif:
        print(json.dumps(_as_sarif(found, names), indent=2))
    elif arguments.json:
        versions = {distribution: [str(one.version) for one in several] for distribution, several in releases.items()}
        data = {"project": str(arguments.project), "files": found.files, "unread": found.unread, "releases": versions}
        print(json.dumps({**data, "names": [_as_json(name) for name in names], "notes": list(notes)}, indent=2))
    else:
        _show(arguments, found, names, releases)
    return int(any(name.broken for name in names))


def _show(
    arguments: argparse.Namespace, found: Scan, names: Sequence[Name], releases: Mapping[str, Sequence[Release]]
) -> None:
    console = Console(highlight=False)

    def show(text: Text) -> None:
        console.print(text, soft_wrap=True)

    def places(uses: Sequence[Use]) -> None:
        for use in uses:
            details = (use.how, _GUARDS.get(use.guard), "in a function" if use.deferred else None)
            show(Text(f"    {use.path}:{use.line}  {', '.join(filter(None, details))}", "dim"))

    def section(title: str, names: Sequence[Name], *, patched: bool = False) -> None:
        if names:
            show(Text(f"\n{title}", "bold"))
        for name in names:
            show(Text.assemble("\n", (name.name, "cyan"), f"  {name.state}"))
            if patched:
                console.print(history_table(name.history))
            places(name.patches if patched else name.uses)

    for distribution, several in releases.items():
        show(Text(heading(distribution, several), "bold"))
    gone = [name for name in names if name.broken and name.gone]
    newer = [name for name in names if name.broken and not name.gone]
    guarded = [name for name in names if name.lacking and not name.broken and not name.added]
    changed = [name for name in names if name.changed and any(use.kind == "patch" for use in name.uses)]
    section("Used without a guard, and gone", gone)
    section("Used without a guard, and newer than some of these releases", newer)
    section("Used behind a guard only, and missing in some of these releases", guarded)
    added = [name for name in names if name.added]
    section("Assigned, and in none of these releases: the project adds it, or it was gone before", added)
    section("Patched, and with other parameters in some releases", changed, patched=True)
    unnecessary = [name for name in names if name.replacements]
    if unnecessary:
        show(Text("\nPatches that kernel-compat makes unnecessary", "bold"))
    for one in dict.fromkeys(one for name in unnecessary for one in name.replacements):
        show(Text.assemble("\n", (one.call, "green"), f"  {one.gives}"))
        for name in unnecessary:
            if one in name.replacements:
                show(Text(f"  {name.name}", "cyan"))
                places(name.patches)
    if arguments.all:
        section("In every release", [name for name in names if not name.lacking and name.found])
    for path, why in found.unread.items():
        show(Text(f"not read: {path}: {why}", "yellow"))
    imported = sum(any(use.kind == "import" for use in name.broken) for name in gone)
    unlooked = sum(not name.found and name.name.partition(".")[0] in PACKAGES for name in names)
    show(
        Text(
            f"\n{plural(found.files, 'file')}, {len(names)} names: without a guard {len(gone)} gone ({imported} of them imported) "
            f"and {len(newer)} newer than a release, {len(guarded)} missing behind a guard"
            f"{f', {unlooked} not looked up' if unlooked else ''}; {sum(len(name.patches) for name in names)} patches, "
            f"{sum(len(name.patches) for name in unnecessary)} of them unnecessary"
        )
    )


def _as_json(name: Name) -> dict[str, Any]:
    return {
        "name": name.name,
        "distribution": name.distribution,
        "state": name.state,
        "lacking": [str(release.version) for release in name.lacking],
        "added": name.added,
        "changed": name.changed,
        "history": [{key: value for key, value in event.as_json().items() if key != "found"} for event in name.history],
        "replacements": [{"call": one.call, "gives": one.gives} for one in name.replacements],
        "uses": [{key: value for key, value in dataclasses.asdict(use).items() if key != "name"} for use in name.uses],
    }


def _as_sarif(found: Scan, names: Sequence[Name]) -> dict[str, Any]:
    rules = [{"id": rule, "shortDescription": {"text": text}} for rule, text in _RULES.items()]
    unread = [
        {"level": "warning", "message": {"text": f"{path}: {why}"}, "locations": [_location(path)]}
        for path, why in found.unread.items()
    ]
    run = {
        "tool": {"driver": {"name": _TOOL, "version": __version__, "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": unread}],
        "results": [result for name in names for use in name.uses for result in _results(name, use)],
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _results(name: Name, use: Use) -> Iterator[dict[str, Any]]:
    """What is found out about a name at one of its places."""

    def result(rule: str, level: str, message: str) -> dict[str, Any]:
        # The same where lines above the place are added or removed.
        fingerprint = hashlib.sha256(f"{rule} {use.path} {use.kind} {use.name}".encode()).hexdigest()[:32]
        return {
            "ruleId": rule,
            "ruleIndex": [*_RULES].index(rule),
            "level": level,
            "message": {"text": message},
            "locations": [_location(use.path, startLine=use.line, startColumn=use.column)],
            "partialFingerprints": {"nameInFile/v1": fingerprint},
        }

    if name.lacking and not name.added and use.kind != "call":
        guarded = f" (used {_GUARDS[use.guard]})" if use.guard else ""
        text = f"{name.distribution}: {name.name} is missing: {name.state}{guarded}"
        yield result("missing-name", "note" if use.guard else "error", text)
    if name.changed and use.kind == "patch":
        forms = "; ".join(f"{event.when} {event.found}" for event in name.history if event.what != "vanished")
        text = f"{name.name} is patched, and has other parameters: {forms}"
        yield result("changed-signature", "warning", text)
    if name.replacements and use.kind in ("patch", "call"):
        calls = "; ".join(f"{one.call} {one.gives}" for one in name.replacements)
        text = f"kernel-compat makes this patch of {name.name} unnecessary: {calls}"
        yield result("unnecessary-patch", "note", text)


def _location(path: str, **region: int) -> dict[str, Any]:
    where = {"artifactLocation": {"uri": quote(path), "uriBaseId": "%SRCROOT%"}}
    return {"physicalLocation": {**where, "region": region} if region else where}
