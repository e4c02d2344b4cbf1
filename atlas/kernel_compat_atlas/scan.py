"""Scanning many releases: the history of each seam, and the differences between the shims' claims and the sources."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from kernel_compat.patching.seam import Read, Seam
from kernel_compat.patching.shim import Shim
from kernel_compat.versions import within

from .index import THREADS, Index
from .published import Cache, Published
from .releases import Release
from .sources import FINGERPRINT, Found, Sources

_FINDINGS = TypeAdapter(dict[str, Found])
#: Types that certainly have no signature.
_NOT_CALLABLE = frozenset(
    ["NoneType", "bool", "bytes", "dict", "float", "int", "list", "module", "property", "set", "str", "tuple"]
)

#: By release and target.
Findings = Mapping[Release, Mapping[str, Found]]


@dataclass(frozen=True)
class Event:
    """A change of a seam in a release.

    Attributes:
        what: ``there`` if the first release that was read has it already; ``appeared``, ``changed`` or ``vanished``.
        new: the names of new parameters.
        gone: the names of removed parameters.
    """

    release: str
    what: str
    found: Found
    new: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()

    @property
    def when(self) -> str:
        """Its release in words."""
        if self.what == "vanished":
            return f"gone from {self.release}"
        return f"since {self.release}{' or before' if self.what == 'there' else ''}"

    def as_json(self) -> dict[str, Any]:
        """Its fields, and what was found as text."""
        return {**asdict(self), "text": str(self.found)}


@dataclass(frozen=True)
class Disagreement:
    """A release that a shim claims, in which a seam of the shim differs from its claim.

    Attributes:
        certain: False if the source alone doesn't show it: it depends on a condition, or on something outside of the wheel.
    """

    shim: str
    target: str
    release: Release
    expected: str
    found: str
    certain: bool

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return {**asdict(self), "release": str(self.release.version)}

    def __str__(self) -> str:
        verb = "found" if self.certain else "uncertain from the source:"
        return f"{self.shim}: {self.target} in {self.release}: expected {self.expected}, {verb} {self.found}"


def read(
    releases: Mapping[str, Sequence[Release]],
    targets: Mapping[str, Sequence[str]],
    index: Index,
    cache: Cache,
) -> dict[Release, dict[str, Found]]:
    """Read the seams of each release; releases and seams are given by distribution.

    Raises:
        AtlasError: a release can't be read.
    """
    wanted = {one: targets.get(distribution, ()) for distribution, several in releases.items() for one in several}

    def one(release: Release, targets: Sequence[str]) -> dict[str, Found]:
        entry = f"found-{FINGERPRINT}.json"
        try:
            known = _FINDINGS.validate_json(cache.load(release.file, entry) or b"{}")
        except ValidationError:
            known = {}
        missing = [target for target in targets if target not in known]
        if missing:
            with Published(release.file, index, cache) as published:
                sources = Sources(published)
                known.update((target, sources.find(target)) for target in missing)
            cache.store(release.file, entry, _FINDINGS.dump_json(known))
        return {target: known[target] for target in targets}

    console = Console(stderr=True)
    with ThreadPoolExecutor(THREADS) as pool:
        found = zip(wanted, pool.map(one, wanted, wanted.values()), strict=True)
        hidden = not console.is_terminal
        return dict(track(found, "Reading", len(wanted), console=console, transient=True, disable=hidden))


def history(found_in: Mapping[Release, Found]) -> list[Event]:
    """The changes of a seam over releases, oldest first; empty if no release has it."""
    events: list[Event] = []
    before = Found("missing")
    for number, (release, found) in enumerate(found_in.items()):
        was, is_ = before.kind != "missing", found.kind != "missing"
        if (was or is_) and found != before:
            what = ("changed" if was else "appeared") if is_ else "vanished"
            new, gone = _only_in(found, before), _only_in(before, found)
            events.append(Event(str(release.version), what if number else "there", found, new, gone))
        before = found
    return events


def _only_in(one: Found, other: Found) -> tuple[str, ...]:
    """The parameters that the other doesn't have; empty if one of the signatures isn't known."""
    names, others = one.parsed, other.parsed
    return tuple(name for name in names.parameters if name not in others.parameters) if names and others else ()


def heading(distribution: str, releases: Sequence[Release]) -> str:
    """The releases that were read, and the Python that each requires."""
    first, last = releases[0].version, releases[-1].version
    same = groupby(releases, lambda release: release.file.requires_python or "any")
    pythons = ", ".join(f"{python} (since {next(several).version})" for python, several in same)
    many = f"{len(releases)} releases, {first} to {last}" if len(releases) > 1 else f"{first}"
    return f"{distribution}: {many}; Python {pythons}"


def history_table(events: Sequence[Event]) -> Table:
    """A line for each change, with the changed parameters marked."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for event in events:
        text = Text("" if event.what == "vanished" else str(event.found))
        for name in event.new:
            text.highlight_regex(rf"(?<=[(* ]){re.escape(name)}(?=[,)=])", "bold green")
        text.append(f"  without {', '.join(event.gone)}" if event.gone else "", "red")
        text.append(f"  from {event.found.home}" if event.found.home else "", "dim")
        table.add_row(f"  {event.when}", text)
    return table


def check(shims: Iterable[Shim], findings: Findings) -> list[Disagreement]:
    """The wrong claims of the shims, by the rules with which `install()` verifies seams."""
    found = []
    for shim in shims:
        for release in [release for release in findings if claims(shim, release)]:
            for seam in shim.seams_for(str(release.version)):
                there = findings[release][seam.target]
                forms = (there, *there.others)
                doubts = [doubt for one in forms if (doubt := _doubt(seam, one)) is not None]
                if doubts:
                    certain = len(doubts) == len(forms) and all(sure for _, sure in doubts)
                    what = " or ".join(dict.fromkeys(text for text, _ in doubts))
                    expected = seam.expected.removeprefix("a callable with parameters ")
                    found.append(Disagreement(shim.name, seam.target, release, expected, what, certain))
    return found


def claims(shim: Shim, release: Release) -> bool:
    """Whether a shim is for this release."""
    return release.distribution == shim.distribution and within(release.version, shim.versions)


def _doubt(seam: Seam, found: Found) -> tuple[str, bool] | None:
    """Why a seam isn't as expected, and whether that is certain; None if it is."""
    if seam.inherited and found.inherited:  # the shim gives the class one of its own
        return None
    if found.on_instances and not seam.replaced:
        return None
    inherited = found.inherited and seam.replaced  # a shim replaces the class's own attribute
    if found.kind in ("missing", "unknown") or inherited:
        return str(found), found.kind != "unknown" or inherited
    if seam.any_form or (isinstance(seam, Read) and not seam.roles):
        return None
    if found.kind == "value" or found.signature is None:
        return str(found), found.type in _NOT_CALLABLE

    def stand_in() -> None: ...

    vars(stand_in)["__signature__"] = found.parsed
    problem = seam.form_problem(stand_in)
    return (problem, True) if problem else None
