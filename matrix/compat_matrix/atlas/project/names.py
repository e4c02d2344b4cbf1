"""The names that a project uses, in each release: what is gone, what changed, and which patches are unnecessary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kernel_compat.patching.shim import Shim

from ..releases import Release
from ..scan import Event, Findings, claims, history
from ..sources import Found
from ..upstream import Replacement, distribution_of, replacements
from .source_tree import Scan
from .walker import Use

__all__ = ["PACKAGES", "Name", "names_of", "targets_of"]

#: The top-level packages of the distributions that the atlas reads.
PACKAGES = ("transformers", "torch", "flash_attn")
#: Old names that transformers 5 serves though no source defines them, with their new ones: `_LazyModule.__getattr__` and the end of
#: ``transformers/__init__.py`` of 5.0.0, 5.5.4 and 5.23.0.
_SERVED = tuple(
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


def targets_of(found: Scan) -> dict[str, list[str]]:
    """The names to look up in each release, by distribution: the owners of the names that are used, and themselves."""
    targets: dict[str, dict[str, None]] = {}
    for use in found.uses:
        if use.name.partition(".")[0] in PACKAGES:
            for name in (use.name, _served(use.name)):
                for owner in _with_owners(name) if name else ():
                    targets.setdefault(distribution_of(use.name), {})[owner] = None
    return {distribution: list(several) for distribution, several in targets.items()}


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
    for old, new in _SERVED:
        if old.match(new_name):
            new_name = old.sub(new, new_name, count=1)
    return None if new_name == name else new_name


def _range(releases: Sequence[Release]) -> str:
    versions = [str(release.version) for release in releases]
    return versions[0] if len(versions) == 1 else f"any of the {len(versions)} releases"
