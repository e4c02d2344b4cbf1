"""The verdict on a combination of releases, or the results of the nearest tested ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal
from weakref import WeakKeyDictionary

from packaging.version import Version
from pydantic import BaseModel

from ..cells import AXES, DEVICES, FLASH_ATTENTION, VERSIONED, Cell
from ..errors import MatrixError
from ..results import ENDED
from ..store import Past, Store, Summary
from ..views.common import clean
from ..views.explain import shims
from . import queries

#: ``wrong``: something computes wrong numbers. ``refused``: the axes exclude it, with a reason. ``unknown``: not tested.
Verdict = Literal["passed", "flaky", "known", "wrong", "failed", "refused", "unknown"]

Match = Literal["exact", "nearest", "none"]

#: The axes, those first whose differences matter most: a CPU says less about a GPU than one release about the next.
ORDER = ("device", "flash_attention", "transformers", "torch", "python")

#: The verdicts, worst first. Of several matching cells the worst verdict counts.
_WORST = ("wrong", "failed", "known", "flaky", "passed")

#: The tested combinations of results, by store; at most `_MOST` each.
_MOST = 20_000
_kept: WeakKeyDictionary[Store, dict[tuple[str, str, int], Tested]] = WeakKeyDictionary()

_VERSION = r"[0-9]{1,6}(\.[0-9]{1,6}){0,3}((a|b|rc)[0-9]{1,6})?(\.post[0-9]{1,6})?(\.dev[0-9]{1,8})?"
#: The form of versions in requests. A plus sign that isn't escaped in a URL arrives as a space.
VERSION = rf"^{_VERSION}([+ ][A-Za-z0-9]{{1,40}}([._-][A-Za-z0-9]{{1,40}}){{0,5}})?$"


@dataclass(frozen=True)
class Wanted:
    """A combination in a request; None stands for every value of an axis.

    Attributes:
        python, transformers, torch: versions. A version of two components matches any of its patches; a local part, as in
            ``2.11.0+cu130``, makes no difference.

    Raises:
        MatrixError: an axis never has this value.
    """

    python: str | None = None
    transformers: str | None = None
    torch: str | None = None
    flash_attention: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        for axis, values in (("flash_attention", FLASH_ATTENTION), ("device", DEVICES)):
            value = getattr(self, axis)
            if value is not None and value not in values:
                raise MatrixError(f"{axis} is one of {', '.join(values)}, not {value!r}")
        for axis in VERSIONED:
            if (value := getattr(self, axis)) is not None:
                object.__setattr__(self, axis, checked(value))

    @property
    def asked(self) -> dict[str, str]:
        """The axes with a value, and their values."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}


def checked(text: str) -> str:
    """A version without its local part.

    Raises:
        MatrixError: it isn't a version.
    """
    if not re.fullmatch(VERSION, text):
        raise MatrixError(f"a release such as 5.9.0, 5.9, 5.9.0rc1 or 2.11.0+cu130, not {text[:100]!r}")
    return Version(text.replace(" ", "+")).public


class Shim(BaseModel):
    """A shim in a tested cell."""

    name: str
    state: str
    reason: str


class Difference(BaseModel):
    """An axis on which a tested combination differs from the requested one."""

    axis: str
    asked: str
    tested: str


class Tested(BaseModel):
    """A tested combination, with its evidence.

    Attributes:
        python, transformers, torch: exact versions as reported by the cell, or from its pins, or from the axes file.
        extra: the project's own axes.
        run, cell, attempt: identify the result.
        differs: the axes on which it differs from the request.
    """

    cell: str
    verdict: Verdict
    kind: str | None
    reason: str
    python: str
    transformers: str
    torch: str
    flash_attention: str
    device: str
    extra: dict[str, str]
    run: str
    run_label: str
    revision: str
    attempt: int
    started: datetime | None
    tests: dict[str, int]
    shims: list[Shim]
    differs: list[Difference]


class Refusal(BaseModel):
    """Excluded combinations: the reason, the number of cells, and one of them as an example."""

    reason: str
    cells: int
    cell: str


class Answer(BaseModel):
    """The verdict on a combination, with the evidence.

    Attributes:
        asked: the requested combination by axis; null for every value.
        match: ``exact``: the combination was tested, or is refused; ``nearest``: similar ones were tested; ``none``: none was.
        verdict: on exactly this combination, the worst of several cells. ``unknown`` unless `match` is ``exact``.
        reason: the reason for the verdict.
        counts: the number of matching combinations with each verdict; empty unless `match` is ``exact``.
        tested: the evidence, deciding entries first; or the nearest combinations, nearest first.
        refusals: the excluded ones among the requested combinations.
    """

    asked: dict[str, str | None]
    match: Match
    verdict: Verdict
    reason: str
    counts: dict[str, int]
    tested: list[Tested]
    refusals: list[Refusal]


def answer(store: Store, wanted: Wanted, limit: int = 5, every: Mapping[Cell, Past] | None = None) -> Answer:
    """The answer of a store for a combination.

    If it wasn't tested, the nearest ones are those with the same device, then the same FlashAttention, then the nearest minor
    releases of transformers, torch and Python, in this order, and then the nearest patches; of two equally near releases the
    older one.

    Args:
        limit: the largest number of tested combinations in the answer.
        every: the newest result of every cell, if the caller has it.
    """
    asked = wanted.asked
    known = queries.newest(store, queries.cells(store)) if every is None else every
    alike = [cell for cell in known if all(_related(getattr(cell, axis), value) for axis, value in asked.items())]
    newest = {cell: known[cell] for cell in alike}
    refusals = _refusals(newest)
    exact = [one for one in _tested(store, newest.items(), asked) if not one.differs]
    if newest and not exact:  # a result from before a newer patch came out also counts
        exact = [one for one in _tested(store, queries.earlier(store, alike), asked) if not one.differs]
    exact = _last_of_each(exact)

    def answered(
        match: Match, verdict: Verdict, reason: str, tested: Sequence[Tested], counts: Mapping[str, int]
    ) -> Answer:
        return Answer(
            asked={axis: asked.get(axis) for axis in ORDER},
            match=match,
            verdict=verdict,
            reason=reason,
            counts=dict(counts),
            tested=list(tested[:limit]),
            refusals=refusals,
        )

    if exact:
        counts: dict[str, int] = Counter(one.verdict for one in exact)
        exact.sort(key=lambda one: (_WORST.index(one.verdict), *_distance(one, asked)))
        return answered("exact", exact[0].verdict, exact[0].reason, exact, counts)
    near = _nearest(store, known, asked, limit)
    if newest and all(past.summary.state == "excluded" for past in newest.values()):
        return answered("exact", "refused", refusals[0].reason, near, {"refused": len(newest)})
    return answered("nearest" if near else "none", "unknown", _why_unknown(newest), near, {})


def _nearest(store: Store, known: Mapping[Cell, Past], asked: Mapping[str, str], limit: int) -> list[Tested]:
    ranked = sorted(((_minor_distance(cell, asked), cell) for cell in known), key=lambda one: one[0])
    found: list[Tested] = []
    batch: list[Cell] = []
    for _, group in groupby(ranked, key=lambda one: one[0]):
        batch += [cell for _, cell in group]
        if len(batch) < 2 * limit:
            continue
        found += _tested(store, [(cell, known[cell]) for cell in batch], asked)
        batch = []
        if len(found) >= limit:
            break
    if batch:
        found += _tested(store, [(cell, known[cell]) for cell in batch], asked)
    return sorted(found, key=lambda one: _distance(one, asked))[:limit]


def _tested(store: Store, results: Iterable[tuple[Cell, Past]], asked: Mapping[str, str]) -> list[Tested]:
    """The combinations that passed or failed, oldest first."""
    found = []
    for known in _told(store, [one for one in results if one[1].summary.verdict in ENDED]):
        one = known.model_copy()
        one.differs = [
            Difference(axis=axis, asked=asked[axis], tested=getattr(one, axis))
            for axis in ORDER
            if axis in asked and not _same(asked[axis], getattr(one, axis))
        ]
        found.append(one)
    return found


def _told(store: Store, ended: Iterable[tuple[Cell, Past]]) -> list[Tested]:
    """The combinations that results tested, oldest run first. Memoised, as a result never changes and reading it is slow."""
    kept = _kept.setdefault(store, {})
    order = sorted(ended, key=lambda one: one[1].run.started)
    keys = [(cell.name, past.run.id, past.summary.attempt) for cell, past in order]
    lacking = [one for one, key in zip(order, keys, strict=True) if key not in kept]
    said = queries.evidence(store, lacking)
    new = {key: kept[key] for key in keys if key in kept}
    for cell, past in lacking:
        own = said.get((cell, past.run.id), queries.Evidence({}, ""))
        new[cell.name, past.run.id, past.summary.attempt] = _one(cell, past, own)
    if len(kept) > _MOST:
        kept.clear()
    kept.update(new)
    return [new[key] for key in keys]


def _one(cell: Cell, past: Past, said: queries.Evidence) -> Tested:
    run, summary = past.run, past.summary
    return Tested(
        cell=cell.name,
        verdict=_verdict(summary),
        kind=summary.kind,
        reason=clean(summary.reason),
        **_versions(cell, said.environment, said.pins),
        flash_attention=cell.flash_attention,
        device=cell.device,
        extra=dict(cell.extra),
        run=run.id,
        run_label=clean(run.label),
        revision=clean(run.revision),
        attempt=summary.attempt,
        started=summary.started,
        tests=dict(summary.counts.items()),
        shims=[*_shims(said.environment)],
        differs=[],
    )


def _last_of_each(found: Iterable[Tested]) -> list[Tested]:
    """The last result for each combination; cells such as 5.9 and 5.9.0 may have tested the same one."""
    newest: dict[tuple[object, ...], Tested] = {}
    for one in found:
        key = (_release(one.python)[:2], *(getattr(one, axis) for axis in AXES[1:]), *one.extra.items())
        newest[key] = one
    return [*newest.values()]


def _verdict(summary: Summary) -> Verdict:
    if summary.verdict in ("passed", "flaky", "known"):
        return summary.verdict
    return "wrong" if summary.kind == "wrong" else "failed"


def _versions(cell: Cell, environment: Mapping[str, Any], pins: str) -> dict[str, str]:
    """The exact versions in a cell."""
    packages = environment.get("packages")
    packages = packages if isinstance(packages, Mapping) else {}
    pinned = dict(re.findall(r"^(transformers|torch)==([^\s;]+)", pins, re.MULTILINE))
    versions = {}
    for axis in VERSIONED:
        own = getattr(cell, axis)
        said = [environment.get("python")] if axis == "python" else [packages.get(axis), pinned.get(axis)]
        # A cell may report anything: a version of a different minor release isn't this cell's.
        fit = (one for one in said if isinstance(one, str) and _parsed(one) and _related(own, one))
        versions[axis] = next(fit, own)
    return versions


def _shims(environment: Mapping[str, Any]) -> Iterator[Shim]:
    found = environment.get("shims")
    if isinstance(found, Mapping):
        whole = {clean(str(name)): {**shim, "seams": []} for name, shim in found.items() if isinstance(shim, Mapping)}
        for name, state, reason, _ in shims(whole):
            yield Shim(name=name, state=clean(state), reason=clean(reason))


def _refusals(newest: Mapping[Cell, Past]) -> list[Refusal]:
    """The excluded ones among these cells. A rule against a minor release excludes all its patches."""
    found: dict[str, list[str]] = {}
    for cell, past in newest.items():
        if past.summary.state == "excluded":
            found.setdefault(clean(past.summary.reason), []).append(cell.name)
    return [Refusal(reason=reason, cells=len(names), cell=names[0]) for reason, names in found.items()]


def _why_unknown(newest: Mapping[Cell, Past]) -> str:
    for cell, past in newest.items():
        if past.summary.state in ("not run", "unfinished"):
            because = f": {clean(past.summary.reason)}" if past.summary.reason else ""
            word = "was not run" if past.summary.state == "not run" else "has no result yet"
            return f"{cell} {word} in {past.run.id}{because}"
    return "another patch of it was tested" if newest else "it was not tested"


# Versions. The requested version may have fewer components than the tested one.


@lru_cache(10_000)
def _parsed(text: str) -> Version | None:
    return Version(text) if re.fullmatch(VERSION, text) else None


def _related(value: str, asked: str) -> bool:
    """Whether a cell's value may match a requested version: 5.9 matches 5.9.1 and 5; 5.9.0 matches 5.9."""
    there, wanted = _parsed(value), _parsed(asked)
    if there is None or wanted is None:
        return value == asked
    if min(len(there.release), len(wanted.release)) > 2:
        return Version(there.public) == Version(wanted.public)
    return all(a == b for a, b in zip(there.release[:2], wanted.release[:2], strict=False))


def _same(asked: str, tested: str) -> bool:
    """Whether a tested version matches the request in its components and in being a pre-release."""
    if asked == tested:
        return True
    wanted, there = _parsed(asked), _parsed(tested)
    if wanted is None or there is None:
        return False
    if len(wanted.release) > 2 or wanted.is_prerelease or wanted.is_postrelease:
        # 5.9.0 means 5.9.0.0; 5.9 means any patch.
        return len(there.release) > 2 and Version(there.public) == Version(wanted.public)
    return there.release[: len(wanted.release)] == wanted.release and not there.is_prerelease


def _release(version: str) -> tuple[int, int, int]:
    parsed = _parsed(version)
    return (parsed.major, parsed.minor, parsed.micro) if parsed else (0, 0, 0)


def _minor_distance(found: Cell | Tested, asked: Mapping[str, str]) -> tuple[object, ...]:
    distance: list[object] = []
    for axis in ORDER:
        if axis not in asked:
            continue
        value = getattr(found, axis)
        if axis in VERSIONED:
            there, wanted = _release(value)[:2], _release(asked[axis])[:2]
            distance.append((abs(there[0] - wanted[0]), abs(there[1] - wanted[1]), there > wanted))
        else:
            distance.append(value != asked[axis])
    return tuple(distance)


def _distance(found: Tested, asked: Mapping[str, str]) -> tuple[object, ...]:
    patches: list[object] = []
    for axis in ORDER:
        if axis in asked and axis in VERSIONED and not _same(asked[axis], getattr(found, axis)):
            there, wanted = _release(getattr(found, axis))[2], _release(asked[axis])[2]
            patches.append((1, abs(there - wanted), there > wanted))
        else:
            patches.append((0, 0, False))
    newest_first = tuple(-number for number in _release(found.python))
    return (*_minor_distance(found, asked), *patches, newest_first, found.cell)
