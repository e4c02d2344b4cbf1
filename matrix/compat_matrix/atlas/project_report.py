"""The names that a project uses, in each release: what is gone, what changed, and which patches are unnecessary."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kernel_compat.patching.shim import Shim

from .project import Scan, Use, scan
from .releases import Release
from .replacements import CALLED, Replacement, replacements
from .sarif import Finding, as_sarif
from .scan import Event, Findings, claims, history
from .seam_list import SEAMS, distribution_of
from .sources import Found
from .tables import heading, what, when

#: The top-level packages of the distributions that the atlas reads.
PACKAGES = ("transformers", "torch", "flash_attn")
#: Old names that transformers 5 serves though no source defines them, with their new ones: `_LazyModule.__getattr__` and the end of
#: ``transformers/__init__.py`` of 5.0.0, 5.5.4 and 5.23.0.
SERVED = tuple(
    (re.compile(old), new)
    for old, new in (
        (r"(transformers\.(?:.+\.)?\w+Tokenizer)Fast\b", r"\1"),
        (r"(transformers\.(?:.+\.)?\w+ImageProcessor)Fast\b", r"\1"),
        (r"(transformers\.models\.\w+\.image_processing_\w+)_fast\b", r"\1"),
        (r"transformers\.tokenization_utils_fast\b", "transformers.tokenization_utils_tokenizers"),
        (r"transformers\.tokenization_utils\b", "transformers.tokenization_utils_sentencepiece"),
        (r"transformers\.image_processing_utils_fast\b", "transformers.image_processing_backends"),
    )
)

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


@dataclass(frozen=True)
class Name:
    """A name that a project uses, in the releases that were read.

    Attributes:
        history: its changes, oldest first; empty if no release has it.
        lacking: the releases that certainly lack it.
        added: whether no release has it and the project assigns it: it adds it, or patches what is gone from all of them.
        replacements: what makes its patches unnecessary.
    """

    name: str
    distribution: str
    uses: tuple[Use, ...]
    history: tuple[Event, ...]
    lacking: tuple[Release, ...]
    added: bool
    releases: tuple[Release, ...]
    replacements: tuple[Replacement, ...]

    @property
    def patches(self) -> list[Use]:
        """The places that patch it, or call a function that is a patch."""
        return [use for use in self.uses if use.kind in ("patch", "call")]

    @property
    def broken(self) -> list[Use]:
        """The places that fail, or patch nothing, in a release that lacks it: those without a guard."""
        unguarded = [use for use in self.uses if not use.guard and use.kind != "call"]
        return unguarded if self.lacking and not self.added else []

    @property
    def gone(self) -> bool:
        """Whether the newest release lacks it."""
        return bool(self.lacking) and self.lacking[-1] == self.releases[-1]

    @property
    def nowhere(self) -> bool:
        """Whether all releases lack it."""
        return bool(self.releases) and len(self.lacking) == len(self.releases)

    @property
    def changed(self) -> bool:
        """Whether it has other parameters, or other defaults, in some releases."""
        forms = [event.found.parameters for event in self.history if event.what != "vanished"]
        return len({form for form in forms if form is not None}) > 1

    @property
    def state(self) -> str:
        """In which releases it is, in words."""
        if not self.releases:
            return "not looked up"
        if not self.lacking:
            return "everywhere"
        if self.nowhere:
            return f"not in {_range(self.releases)}"
        words = []
        for event in self.history:
            if event.what == "vanished":
                words.append(f"gone from {event.release.version}")
            elif event.what == "appeared":
                words.append(f"new in {event.release.version}")
        return ", ".join(words)


def scan_project(arguments: argparse.Namespace) -> Scanned:
    """Scan the project of the arguments.

    Raises:
        MatrixError: it isn't a folder with Python files.
    """
    calls = [pattern for one in CALLED for pattern in one.patterns]
    found = scan(arguments.project, PACKAGES, calls, arguments.exclude)
    targets: dict[str, dict[str, None]] = {}
    for use in found.uses:
        if use.name.partition(".")[0] in PACKAGES:
            for name in (use.name, _served(use.name)):
                for owner in _with_owners(name) if name else ():
                    targets.setdefault(distribution_of(use.name), {})[owner] = None
    return Scanned(found, {distribution: list(several) for distribution, several in targets.items()})


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


def names_of(
    found: Scan, releases: Mapping[str, Sequence[Release]], findings: Findings, shims: Sequence[Shim]
) -> list[Name]:
    """Join the uses with what each release has."""
    by_name: dict[str, list[Use]] = {}
    for use in found.uses:
        by_name.setdefault(use.name, []).append(use)
    present = {name: _in_releases(name, releases, findings) for name in by_name}
    lacking = {name: tuple(one for one, there in present[name].items() if there.kind == "missing") for name in by_name}
    guards = {name: [use.guard for use in uses if use.kind == "import"] for name, uses in by_name.items()}
    for name in [name for name in by_name if lacking[name] and not guards[name]]:
        # An attribute of an imported name that is missing itself: where the import is guarded, so is the attribute.
        owners = [one for one in _with_owners(name)[:-1] if guards.get(one) and {*lacking[name]} <= {*lacking[one]}]
        if not owners:
            continue
        if all(guards[owners[0]]):
            by_name[name] = [replace(use, guard=use.guard or guards[owners[0]][0]) for use in by_name[name]]
        if all(use.kind == "access" for use in by_name[name]):
            by_name[owners[0]] += by_name.pop(name)
    names = []
    for name, uses in sorted(by_name.items()):
        there = present[name]
        events = history(name, list(there), {release: {name: one} for release, one in there.items()}) if there else []
        owner_there = all(findings[release][name.rpartition(".")[0]].kind != "missing" for release in lacking[name])
        added = len(lacking[name]) == len(there) and owner_there and any(use.adds for use in uses)
        homes = [one.home.replace(":", ".") for one in there.values() if one.home]
        applying = [shim for shim in shims if any(claims(shim, release) for release in there)]
        patched = any(use.kind in ("patch", "call") for use in uses)
        offered = replacements(dict.fromkeys([name, *homes]), applying) if patched else []
        names.append(
            Name(
                name,
                distribution_of(name),
                tuple(sorted(uses)),
                tuple(events),
                lacking[name],
                added and bool(there),
                tuple(there),
                tuple(offered),
            )
        )
    return names


def _in_releases(name: str, releases: Mapping[str, Sequence[Release]], findings: Findings) -> dict[Release, Found]:
    known = releases.get(distribution_of(name), ()) if name.partition(".")[0] in PACKAGES else ()
    there = {release: _presence(name, release, findings) for release in known}
    if all(one.kind == "missing" for one in there.values()) and _owner_is_class(name, known, findings):
        # A base class of another distribution may have it, or the project adds it.
        return {release: Found("unknown", text="inherited or added") for release in known}
    return there


def _presence(name: str, release: Release, findings: Findings) -> Found:
    """A name in a release; unknown if only running the code would show it."""
    found = findings[release][name]
    if found.kind != "missing":
        return found
    served = _served(name) if release.version.major >= 5 else None
    if served and (there := _presence(served, release, findings)).kind != "missing":
        return there
    for owner in reversed(_with_owners(name)[:-1]):
        above = findings[release][owner]
        if above.kind == "missing":
            continue
        if above.kind == "class" or above.type == "module":
            return found
        return Found("unknown", text=f"an attribute of {owner}, {above}")
    return found


def _owner_is_class(name: str, releases: Iterable[Release], findings: Findings) -> bool:
    owner = name.rpartition(".")[0]
    return bool(owner) and any(findings[release][owner].kind == "class" for release in releases)


def _with_owners(name: str) -> list[str]:
    """The beginnings of a dotted name, and itself."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _served(name: str) -> str | None:
    new_name = name
    for old, new in SERVED:
        if old.match(new_name):
            new_name = old.sub(new, new_name, count=1)
    return None if new_name == name else new_name


def _range(releases: Sequence[Release]) -> str:
    versions = [str(release.version) for release in releases]
    return versions[0] if len(versions) == 1 else f"any of the {len(versions)} releases"


# Text ------------------------------------------------------------------------------------------------------------------


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


# JSON and SARIF --------------------------------------------------------------------------------------------------------


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
