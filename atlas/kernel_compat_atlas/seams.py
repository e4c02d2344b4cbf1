"""The library's seams in releases: their histories, and the claims of shims that are wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from rich.console import Console
from rich.text import Text

from kernel_compat.patching.seam import Read
from kernel_compat.patching.shim import Shim, discover

from .errors import AtlasError
from .index import Index
from .published import Cache
from .releases import Release
from .scan import Disagreement, Event, Findings, check, claims, heading, history, history_table, read
from .upstream import SEAMS, distribution_of
from .words import plural


@dataclass(frozen=True)
class NameRead:
    """A name that the library reads of a distribution without replacing it.

    Attributes:
        shim: the shim that verifies it.
        name: the parameter of the target that is read; empty if the target itself is.
        releases: those of the releases that were read that have it, oldest first.
    """

    distribution: str
    shim: str
    target: str
    name: str
    releases: Sequence[Release]

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return {**vars(self), "releases": [str(one.version) for one in self.releases]}


@dataclass(frozen=True)
class Seams:
    """The seams of some releases.

    Attributes:
        releases: by distribution, oldest first.
        targets: the seams that were looked for, by distribution.
        findings: what each release has of them.
    """

    releases: Mapping[str, Sequence[Release]]
    targets: Mapping[str, Sequence[str]]
    findings: Findings
    shims: Sequence[Shim]

    @cached_property
    def disagreements(self) -> list[Disagreement]:
        """The wrong claims of the shims."""
        return check(self.shims, self.findings)

    def history(self, distribution: str, target: str) -> list[Event]:
        """The changes of a seam, oldest first; empty if no release has it."""
        return history({one: self.findings[one][target] for one in self.releases[distribution]})

    def shims_of(self, target: str) -> list[str]:
        """The names of the shims that replace a seam."""
        return [shim.name for shim in self.shims if target in {seam.target for seam in shim.seams}]

    def reads(self) -> Iterator[NameRead]:
        """The names that the library reads, by shim, seam and role."""
        for shim in self.shims:
            claimed = [one for one in self.releases.get(shim.distribution, ()) if claims(shim, one)]
            for seam in shim.seams:
                if not isinstance(seam, Read):
                    continue
                found = {one: self.findings[one][seam.target] for one in claimed if seam.applies_to(str(one.version))}
                there = {one: what for one, what in found.items() if what.kind != "missing" or what.on_instances}
                read = partial(NameRead, shim.distribution, shim.name, seam.target)
                if not seam.roles:
                    yield read("", [*there])
                for name in chain(*seam.roles):
                    named = [one for one, what in there.items() if what.parsed and name in what.parsed.parameters]
                    if named:
                        yield read(name, named)

    def as_json(self, notes: Sequence[str], checked: bool) -> dict[str, Any]:
        """Everything that was found, with the wrong claims if they were checked."""
        wrong = {"check": {"disagreements": [one.as_json() for one in self.disagreements]}} if checked else {}
        return {
            "releases": {name: [one.as_json() for one in several] for name, several in self.releases.items()},
            "seams": [
                {
                    "distribution": distribution,
                    "target": target,
                    "shims": self.shims_of(target),
                    "history": [event.as_json() for event in self.history(distribution, target)],
                }
                for distribution, targets in self.targets.items()
                for target in targets
            ],
            "reads": [one.as_json() for one in self.reads()],
            "notes": [*notes],
            **wrong,
        }

    def show(self) -> None:
        """Print the history of each seam."""
        console = Console(highlight=False)
        for distribution, several in self.releases.items():
            console.print(Text(heading(distribution, several), "bold"))
            for target in self.targets[distribution]:
                replacing, events = ", ".join(self.shims_of(target)), self.history(distribution, target)
                console.print(Text.assemble("\n", (target, "cyan"), (f"  {replacing}", "dim")), soft_wrap=True)
                console.print(history_table(events) if events else "  nowhere")
            console.print()

    def show_check(self) -> None:
        """Print the wrong claims."""
        console = Console(highlight=False)
        for one in self.disagreements:
            console.print(Text(str(one), "red" if one.certain else "yellow"), soft_wrap=True)
        claimed = sum(
            len(shim.seams_for(str(one.version))) for shim in self.shims for one in self.findings if claims(shim, one)
        )
        certain = sum(one.certain for one in self.disagreements)
        console.print(
            f"{plural(claimed, 'claim')} on {plural(len(self.findings), 'release')}: "
            f"{certain} wrong, {len(self.disagreements) - certain} uncertain"
        )


def installed_shims(note: Callable[[str], None] | None = None) -> list[Shim]:
    """The installed shims.

    Args:
        note: called with a message about those that can't be loaded; without it they are an error.

    Raises:
        AtlasError: a shim can't be loaded, or names releases in no form that a specifier has.
    """
    shims, broken = discover()
    for name, why in broken.items():
        text = f"the shims of the entry point {name} can't be loaded: {why}"
        if note is None:
            raise AtlasError(text)
        note(text)
    for shim in shims:
        try:
            for specifier in (shim.versions, *(seam.versions for seam in shim.seams)):
                SpecifierSet(specifier)
        except InvalidSpecifier as error:
            raise AtlasError(f"the shim {shim.name}: {error}") from error
    return shims


def read_seams(
    releases: Mapping[str, Sequence[Release]],
    shims: Sequence[Shim],
    index: Index,
    cache: Cache,
    more: Iterable[str] = (),
) -> Seams:
    """Read the seams of the shims, and those that the library relies on without replacing them.

    Args:
        releases: the releases to read, by distribution.
        more: further seams to look for.

    Raises:
        AtlasError: one of these is no seam, or of a distribution that isn't read; or a release can't be read.
    """
    targets = {distribution: dict.fromkeys(SEAMS.get(distribution, ())) for distribution in releases}
    for shim in shims:
        targets.get(shim.distribution, {}).update(dict.fromkeys(seam.target for seam in shim.seams))
    for target in more:
        if target.count(":") != 1 or not all(map(str.isidentifier, re.split("[.:]", target))):
            raise AtlasError(
                f"{target!r} isn't a seam; write package.module:attribute or package.module:Class.attribute"
            )
        owner = distribution_of(target)
        if owner not in targets:
            raise AtlasError(f"{target} belongs to {owner}: name the releases of {owner} to read")
        targets[owner][target] = None
    listed = {distribution: [*several] for distribution, several in targets.items()}
    return Seams(releases, listed, read(releases, listed, index, cache), shims)
