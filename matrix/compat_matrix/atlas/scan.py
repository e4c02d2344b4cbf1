"""Scanning many releases: the history of each seam, and the differences between the shims' claims and the sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Literal, NamedTuple

from packaging.specifiers import SpecifierSet
from pydantic import TypeAdapter, ValidationError

from kernel_compat.patching.seam import Seam, parameter_problem
from kernel_compat.patching.shim import Shim

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
        what: ``there`` if the first release that was read has it already.
        new: the names of new parameters.
        gone: the names of removed parameters.
    """

    release: Release
    what: Literal["there", "appeared", "changed", "vanished"]
    found: Found
    new: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


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

    def __str__(self) -> str:
        verb = "found" if self.certain else "uncertain from the source:"
        return f"{self.shim}: {self.target} in {self.release}: expected {self.expected}, {verb} {self.found}"


def read(
    wanted: Mapping[Release, Sequence[str]],
    index: Index,
    cache: Cache,
    note: Callable[[str], None],
    advance: Callable[[], object],
) -> dict[Release, dict[str, Found]]:
    """Read the given seams of each release.

    Raises:
        MatrixError: a release can't be read.
    """

    def one(release: Release, targets: Sequence[str]) -> dict[str, Found]:
        key = f"files/{release.file.sha256}/found-{FINGERPRINT}.json"
        try:
            known = _FINDINGS.validate_json((release.file.sha256 and cache.load(key)) or b"{}")
        except ValidationError:
            known = {}
        missing = [target for target in targets if target not in known]
        if missing:
            with Published(release.file, index, cache, note) as published:
                sources = Sources(published)
                known.update((target, sources.find(target)) for target in missing)
            if release.file.sha256:
                cache.store(key, _FINDINGS.dump_json(known))
        return {target: known[target] for target in targets}

    pool = ThreadPoolExecutor(THREADS)
    try:
        futures = {pool.submit(one, release, targets): release for release, targets in wanted.items()}
        results = {}
        for future in as_completed(futures):
            results[futures[future]] = future.result()
            advance()
    finally:
        pool.shutdown(cancel_futures=True)
    return {release: results[release] for release in wanted}


def history(found_in: Mapping[Release, Found]) -> list[Event]:
    """The changes of a seam over releases, oldest first; empty if no release has it."""
    events: list[Event] = []
    before = Found("missing")
    for number, (release, found) in enumerate(found_in.items()):
        was, is_ = before.kind != "missing", found.kind != "missing"
        if (was or is_) and found != before:
            what: Literal["there", "appeared", "changed", "vanished"]
            what = ("changed" if was else "appeared") if is_ else "vanished"
            names, old = _names(found), _names(before)
            known = found.signature is not None and before.signature is not None
            new = tuple(name for name in names if name not in old) if known else ()
            gone = tuple(name for name in old if name not in names) if known else ()
            events.append(Event(release, what if number else "there", found, new, gone))
        before = found
    return events


def check(shims: Iterable[Shim], findings: Findings) -> list[Disagreement]:
    """The wrong claims of the shims, by the rules with which `install()` verifies seams."""
    found = []
    for shim in shims:
        for release in [release for release in findings if claims(shim, release)]:
            for seam in shim.seams_for(str(release.version)):
                there = findings[release][seam.target]
                doubts = [_doubt(seam, one) for one in (there, *there.others)]
                if any(doubts):
                    certain = all(doubt is not None and doubt.certain for doubt in doubts)
                    what = " or ".join(dict.fromkeys(doubt.found for doubt in doubts if doubt is not None))
                    found.append(Disagreement(shim.name, seam.target, release, _expected(seam), what, certain))
    return found


def claims(shim: Shim, release: Release) -> bool:
    """Whether a shim is for this release."""
    claimed = SpecifierSet(shim.versions).contains(release.version, prereleases=True)
    return release.distribution == shim.distribution and claimed


def _names(found: Found) -> list[str]:
    return [*signature.parameters] if (signature := found.parsed) is not None else []


def _expected(seam: Seam) -> str:
    return "an attribute" if seam.any_form else f"({', '.join([*seam.parameters, '...'])})"


class _Doubt(NamedTuple):
    found: str
    certain: bool


def _doubt(seam: Seam, found: Found) -> _Doubt | None:
    """The reason why a seam isn't as expected; None if it is."""
    if seam.inherited and found.inherited:  # the shim gives the class one of its own
        return None
    if found.kind == "missing" or found.inherited:  # a shim replaces the class's own attribute
        return _Doubt(str(found), True)
    if found.kind == "unknown":
        return _Doubt(str(found), False)
    if seam.any_form:
        return None
    if found.kind == "value" or found.signature is None:
        return _Doubt(str(found), found.type in _NOT_CALLABLE)

    def stand_in() -> None: ...

    vars(stand_in)["__signature__"] = found.parsed
    problem = parameter_problem(stand_in, seam.parameters)
    return _Doubt(problem, True) if problem else None
