"""The names that a project uses, in each release: what is gone, what changed, and which patches are unnecessary."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from kernel_compat.patching.shim import Shim

from ..releases import Release
from ..scan import Event, Findings, claims, history
from ..sources import Found
from ..upstream import SERVED, Replacement, distribution_of, replacements
from .uses import Scan, Use


@dataclass(eq=False)
class Name:
    """A name that a project uses.

    Attributes:
        found: what each release has of it; empty if no release was read.
        added: whether no release has it and the project assigns it: it adds it, or patches what is gone from all of them.
        replacements: what makes its patches unnecessary.
    """

    name: str
    found: Mapping[Release, Found]
    uses: list[Use] = field(default_factory=list)
    added: bool = False
    replacements: Sequence[Replacement] = ()

    @property
    def distribution(self) -> str:
        """The distribution that has it."""
        return distribution_of(self.name)

    @cached_property
    def history(self) -> list[Event]:
        """Its changes, oldest first; empty if no release has it."""
        return history(self.found)

    @property
    def lacking(self) -> list[Release]:
        """The releases that certainly lack it."""
        return [release for release, there in self.found.items() if there.kind == "missing"]

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
        return self.lacking[-1:] == [*self.found][-1:] != []

    @property
    def changed(self) -> bool:
        """Whether it has other parameters, or other defaults, in some releases."""
        forms = {event.found.signature for event in self.history if event.what != "vanished"}
        return len(forms - {None}) > 1

    @property
    def state(self) -> str:
        """In which releases it is, in words."""
        if not self.found:
            return "not looked up"
        if len(self.lacking) == len(self.found):
            several = f"any of the {len(self.found)} releases"
            return f"not in {self.lacking[0].version if len(self.found) == 1 else several}"
        words = {"vanished": "gone from", "appeared": "new in"}
        changes = [f"{words[one.what]} {one.release}" for one in self.history if one.what in words]
        return ", ".join(changes) if self.lacking else "everywhere"


def targets_of(found: Scan) -> dict[str, list[str]]:
    """The names to look up in each release, by distribution: the owners of the names that are used, and themselves."""
    targets: dict[str, dict[str, None]] = {}
    for use in found.uses:
        wanted = [*_beginnings(use.name), *_beginnings(_served(use.name))]
        targets.setdefault(distribution_of(use.name), {}).update(dict.fromkeys(wanted))
    return {distribution: list(several) for distribution, several in targets.items()}


def names_of(
    found: Scan, releases: Mapping[str, Sequence[Release]], findings: Findings, shims: Sequence[Shim]
) -> list[Name]:
    """Join the uses with what each release has."""
    names: dict[str, Name] = {}
    for use in found.uses:
        if use.name not in names:
            names[use.name] = Name(use.name, _in_releases(use.name, releases, findings))
        names[use.name].uses.append(use)
    guards = {name: [use.guard for use in one.uses if use.kind == "import"] for name, one in names.items()}
    for name in [one for one in names.values() if one.lacking and not guards[one.name]]:
        # An attribute of an imported name that is missing itself: where the import is guarded, so is the attribute.
        owners = [names[one] for one in _beginnings(name.name)[:-1] if guards.get(one)]
        for owner in [one for one in owners if {*name.lacking} <= {*one.lacking}][:1]:
            if all(guards[owner.name]):
                name.uses = [replace(use, guard=use.guard or guards[owner.name][0]) for use in name.uses]
            if all(use.kind == "access" for use in name.uses):
                owner.uses = sorted([*owner.uses, *names.pop(name.name).uses])
    for name in names.values():
        nowhere = 0 < len(name.lacking) == len(name.found)
        owner_there = all(_owner(name.name, findings[release]).kind != "missing" for release in name.lacking)
        name.added = nowhere and owner_there and any(use.adds for use in name.uses)
        homes = [one.home.replace(":", ".") for one in name.found.values() if one.home]
        applying = [shim for shim in shims if any(claims(shim, release) for release in name.found)]
        name.replacements = replacements([name.name, *homes], applying) if name.patches else []
    return [names[name] for name in sorted(names)]


def _in_releases(name: str, releases: Mapping[str, Sequence[Release]], findings: Findings) -> dict[Release, Found]:
    there = {
        release: _presence(name, findings[release], release) for release in releases.get(distribution_of(name), ())
    }
    of_class = any(_owner(name, findings[release]).kind == "class" for release in there)
    if of_class and all(one.kind == "missing" for one in there.values()):
        # A base class of another distribution may have it, or the project adds it.
        return {release: Found("unknown", text="inherited or added") for release in there}
    return there


def _presence(name: str, findings: Mapping[str, Found], release: Release) -> Found:
    """A name in a release; unknown if only running the code would show it."""
    found = findings[name]
    if found.kind == "missing" and (served := _served(name)) != name and release.version.major >= 5:
        there = _presence(served, findings, release)
        found = found if there.kind == "missing" else there
    if found.kind != "missing":
        return found
    above = next((one for one in reversed(_beginnings(name)) if findings[one].kind != "missing"), None)
    if above is None or findings[above].kind == "class" or findings[above].type == "module":
        return found
    return Found("unknown", text=f"an attribute of {above}, {findings[above]}")


def _owner(name: str, findings: Mapping[str, Found]) -> Found:
    return findings.get(name.rpartition(".")[0], Found("value", type="module"))


def _beginnings(name: str) -> list[str]:
    """The beginnings of a dotted name, and itself."""
    return [*accumulate(name.split("."), "{}.{}".format)]


def _served(name: str) -> str:
    """The new name of an old one that transformers 5 serves."""
    for old, new in SERVED.items():
        name = re.sub(f"^{old}", new, name, count=1)
    return name
