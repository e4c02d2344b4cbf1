"""The verdict on a combination of releases, or the results of the nearest tested ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from sqlalchemy import Select, func, select

from ..cells import AXES, DEVICES, FLASH_ATTENTION, VERSIONED, WORD, Cell
from ..errors import MatrixError
from ..results import ENDED, FINE
from ..store import Newest, Store
from ..store import queries as stored
from ..store.models import CELL, RESULT, RUN
from ..versions import checked, exact, parsed, related, release, same
from .common import clean
from .explain import shims

#: ``wrong``: something computes wrong numbers. ``refused``: the axes exclude it, with a reason. ``unknown``: not tested.
Verdict = Literal["passed", "flaky", "known", "wrong", "failed", "refused", "unknown"]

Match = Literal["exact", "nearest", "none"]

#: The axes, those first whose differences matter most: a CPU says less about a GPU than one release about the next. A project's
#: own axes come after the first two.
ORDER = ("device", "flash_attention", "transformers", "torch", "python")

#: The verdicts, worst first. Of several matching cells the worst verdict counts.
_WORST = ("wrong", "failed", "known", "flaky", "passed")


@dataclass(frozen=True)
class Wanted:
    """A combination in a request; None stands for every value of an axis.

    Attributes:
        python, transformers, torch: versions. A version of two components matches any of its patches; a local part, as in
            ``2.11.0+cu130``, makes no difference.
        own: values of the project's own axes: releases, which are compared as these, or words.

    Raises:
        MatrixError: an axis never has this value.
    """

    python: str | None = None
    transformers: str | None = None
    torch: str | None = None
    flash_attention: str | None = None
    device: str | None = None
    own: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, axes: Mapping[str, str | None]) -> Wanted:
        """The combination with these values; names that aren't in `AXES` are own axes."""
        own = sorted((axis, value) for axis, value in axes.items() if axis not in AXES and value is not None)
        return cls(**{axis: axes.get(axis) for axis in AXES}, own=tuple(own))

    def __post_init__(self) -> None:
        for axis, values in (("flash_attention", FLASH_ATTENTION), ("device", DEVICES)):
            value = getattr(self, axis)
            if value is not None and value not in values:
                raise MatrixError(f"{axis} is one of {', '.join(values)}, not {value!r}")
        for axis in VERSIONED:
            if (value := getattr(self, axis)) is not None:
                object.__setattr__(self, axis, checked(value))
        own = ((axis, value if re.fullmatch(WORD, value) else checked(value)) for axis, value in self.own)
        object.__setattr__(self, "own", tuple(own))

    @property
    def asked(self) -> dict[str, str]:
        """The axes with a value, and their values."""
        return {axis: value for axis in AXES if (value := getattr(self, axis)) is not None} | dict(self.own)


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


class Judged(NamedTuple):
    """The verdict on a combination.

    Attributes:
        exact: whether the evidence is of what was asked for; else it is of other patches of the same minor releases.
        verdict: the worst of the evidence; ``unknown`` without any.
        found: the evidence, deciding entries first.
        near: the nearest tested combinations, nearest first, if the evidence isn't exact.
        refusals: the excluded ones among the requested combinations.
        works: the nearest combination that passed, if this one didn't.
    """

    exact: bool
    verdict: Verdict
    reason: str
    found: list[Newest]
    near: list[Newest]
    refusals: list[Refusal]
    works: Newest | None


def judge(store: Store, wanted: Wanted, known: Sequence[Newest] | None = None) -> Judged:
    """The verdict of a store on a combination.

    If it wasn't tested, the nearest ones are those with the same device, then the same FlashAttention, then the nearest minor
    releases of transformers, torch and Python, in this order, and then the nearest patches; of two equally near releases the
    older one.

    Args:
        known: the newest result of every cell, if the caller has it.
    """
    asked = wanted.asked
    known = store.newest() if known is None else known
    alike = [one for one in known if all(related(_given(one, axis), value) for axis, value in asked.items())]
    ended = [one for one in alike if _ended(one)]
    fit = [one for one in ended if not differs(one, asked)]
    if ended and not fit:  # a result from before a newer patch came out also counts
        fit = _earlier(store, [one.cell for one in ended], asked)
    refusals = _refusals(alike)
    refused = bool(alike) and len(alike) == sum(one.cells for one in refusals)
    near = _nearness(asked)
    found = sorted(_last_of_each(fit or ended), key=lambda one: (_WORST.index(verdict_of(one)), near(one)))
    verdict: Verdict = "refused" if refused else verdict_of(found[0]) if found else "unknown"
    works = None if verdict in FINE else min(filter(_passed, known), key=near, default=None)
    reason = refusals[0].reason if refused else clean(found[0].past.summary.reason) if found else why_unknown(alike)
    neighbours = [] if fit else sorted(filter(_ended, known), key=near)
    return Judged(bool(fit) or refused, verdict, reason, found, neighbours, refusals, works)


def answer(store: Store, wanted: Wanted, limit: int = 5) -> Answer:
    """The answer of the API: as `judge`, but what is known of other patches is no verdict.

    Args:
        limit: the largest number of tested combinations in the answer.
    """
    found, asked = judge(store, wanted), wanted.asked
    fit = found.exact and found.verdict != "refused"
    tested = (found.found if fit else found.near)[:limit]
    verdict = found.verdict if found.exact else "unknown"
    counts: Counter[str] = Counter(map(verdict_of, found.found) if fit else ())
    if verdict == "refused":
        counts = Counter(refused=sum(one.cells for one in found.refusals))
    reason = "another patch of it was tested" if found.found and not found.exact else found.reason
    texts = _texts(store, tested)
    return Answer(
        asked={axis: asked.get(axis) for axis in ORDER} | dict(wanted.own),
        match="exact" if found.exact else "nearest" if tested else "none",
        verdict=verdict,
        reason=reason,
        counts=dict(counts),
        tested=[_tested(one, said, asked) for one, (said, _) in zip(tested, texts, strict=True)],
        refusals=found.refusals,
    )


def newest(store: Store, runs: Collection[str] | None = None) -> list[Newest]:
    """The newest result of every cell, sorted, of all whole runs or of these runs."""
    if runs is None:
        return sorted(store.newest())
    found = [Newest(cell, past, {}) for cell, past in store.current(runs).items()]
    texts = _texts(store, found)
    return [one._replace(versions=exact(one.cell, said, pins)) for one, (said, pins) in zip(found, texts, strict=True)]


def differs(found: Newest, asked: Mapping[str, str]) -> list[str]:
    """The axes on which a tested combination differs from the requested one."""
    return [axis for axis in in_order(asked) if not same(asked[axis], value(found, axis))]


def in_order(asked: Collection[str]) -> list[str]:
    """These axes in the order of `ORDER`, with own axes."""
    own = sorted(axis for axis in asked if axis not in ORDER)
    return [axis for axis in (*ORDER[:2], *own, *ORDER[2:]) if axis in asked]


def value(found: Newest, axis: str) -> str:
    """The value of an axis in a result: the exact version, where it has one."""
    return found.versions.get(axis) or _given(found, axis)


def _given(found: Newest, axis: str) -> str:
    return str(getattr(found.cell, axis)) if axis in AXES else dict(found.cell.extra).get(axis, "")


def verdict_of(found: Newest) -> Verdict:
    """The verdict of a result whose tests ran."""
    summary = found.past.summary
    if summary.verdict in ("passed", "flaky", "known"):
        return summary.verdict
    return "wrong" if summary.kind == "wrong" else "failed"


def _ended(found: Newest) -> bool:
    return found.past.summary.verdict in ENDED


def _passed(found: Newest) -> bool:
    return found.past.summary.state == "passed"


def _earlier(store: Store, cells: Sequence[Cell], asked: Mapping[str, str]) -> list[Newest]:
    """The newest result of each of these cells with exactly the requested versions, in whole runs."""
    origin = (RESULT.c.environment_id, RESULT.c.pins_id)
    best: Select[Any] = select(func.max(RESULT.c.id)).join_from(RESULT, RUN, RUN.c.id == RESULT.c.run_id)
    best = best.where(RUN.c.partial.is_(False), stored.HAS_ENDED, stored.IS_LAST)
    rows: list[Any] = []
    with store.reading() as connection:
        for names in stored.chunks(cell.name for cell in cells):
            keys = best.where(RESULT.c.cell_id.in_(select(CELL.c.id).where(CELL.c.name.in_(names))))
            newest = RESULT.c.id.in_(keys.group_by(RESULT.c.cell_id, *origin))
            rows += connection.execute(stored.summary(*origin, *stored.RUN_FIELDS, every=True).where(newest)).all()
        texts = stored.texts_of(connection, (key for row in rows for key in row[stored.SUMMARY : stored.SUMMARY + 2]))
    found = []
    for row in rows:
        cell, (environment, pins) = stored.cell_of(row), row[stored.SUMMARY : stored.SUMMARY + 2]
        versions = exact(cell, stored.environment_of(texts.get(environment)), texts.get(pins, ""))
        found.append(Newest(cell, stored.past_of(row), versions))
    return [one for one in found if not differs(one, asked)]


def _texts(store: Store, of: Iterable[Newest]) -> list[tuple[Mapping[str, Any], str]]:
    """The environments that these results report, and their pins."""
    query = select(RESULT.c.environment_id, RESULT.c.pins_id)
    with store.reading() as connection:
        keys = [
            connection.execute(stored.of_cell(query, one.past.run.id, one.cell, one.past.summary.attempt)).first()
            or (None, None)
            for one in of
        ]
        texts = stored.texts_of(connection, (key for pair in keys for key in pair))
    return [(stored.environment_of(texts.get(environment)), texts.get(pins, "")) for environment, pins in keys]


def _tested(found: Newest, environment: Mapping[str, Any], asked: Mapping[str, str]) -> Tested:
    run, summary = found.past.run, found.past.summary
    return Tested(
        cell=found.cell.name,
        verdict=verdict_of(found),
        kind=summary.kind,
        reason=clean(summary.reason),
        **{axis: value(found, axis) for axis in AXES},
        extra=dict(found.cell.extra),
        run=run.id,
        run_label=clean(run.label),
        revision=clean(run.revision),
        attempt=summary.attempt,
        started=summary.started,
        tests=dict(summary.counts.items()),
        shims=[*_shims(environment)],
        differs=[Difference(axis=axis, asked=asked[axis], tested=value(found, axis)) for axis in differs(found, asked)],
    )


def _last_of_each(found: Iterable[Newest]) -> list[Newest]:
    """The last result for each combination; cells such as 5.9 and 5.9.0 may have tested the same one."""
    newest: dict[tuple[object, ...], Newest] = {}
    for one in sorted(found, key=lambda one: one.past.run.started):
        rest = tuple(value(one, axis) for axis in AXES if axis != "python")
        newest[(release(value(one, "python"))[:2], rest, one.cell.extra)] = one
    return [*newest.values()]


def _shims(environment: Mapping[str, Any]) -> Iterator[Shim]:
    found = environment.get("shims")
    if isinstance(found, Mapping):
        whole = {clean(str(name)): {**shim, "seams": []} for name, shim in found.items() if isinstance(shim, Mapping)}
        for name, state, reason, _ in shims(whole):
            yield Shim(name=name, state=clean(state), reason=clean(reason))


def _refusals(newest: Iterable[Newest]) -> list[Refusal]:
    """The excluded ones among these cells. A rule against a minor release excludes all its patches."""
    found: dict[str, list[str]] = {}
    for one in newest:
        if one.past.summary.state == "excluded":
            found.setdefault(clean(one.past.summary.reason), []).append(one.cell.name)
    return [Refusal(reason=reason, cells=len(names), cell=names[0]) for reason, names in found.items()]


def why_unknown(newest: Sequence[Newest]) -> str:
    """The reason why these cells have no result."""
    for one in newest:
        if one.past.summary.state in ("not run", "unfinished"):
            because = f": {clean(one.past.summary.reason)}" if one.past.summary.reason else ""
            word = "was not run" if one.past.summary.state == "not run" else "has no result yet"
            return f"{one.cell} {word} in {one.past.run.id}{because}"
    return "it was not tested"


def _nearness(asked: Mapping[str, str]) -> Callable[[Newest], tuple[object, ...]]:
    """A key that sorts combinations by their distance from the requested one."""
    axes = in_order(asked)
    versioned = [axis for axis in axes if parsed(asked[axis])]

    @cache
    def minor(axis: str, own: str) -> object:
        if axis not in versioned:
            return own != asked[axis], 0, False
        there, wanted = release(own)[:2], release(asked[axis])[:2]
        return abs(there[0] - wanted[0]), abs(there[1] - wanted[1]), there > wanted

    @cache
    def patch(axis: str, own: str) -> object:
        if axis not in versioned or same(asked[axis], own):
            return 0, 0, False
        there, wanted = release(own)[2], release(asked[axis])[2]
        return 1, abs(there - wanted), there > wanted

    @cache
    def newest_first(python: str) -> object:
        return tuple(-number for number in release(python))

    def near(found: Newest) -> tuple[object, ...]:
        values = [(axis, value(found, axis)) for axis in axes]
        minors, patches = [minor(*one) for one in values], [patch(*one) for one in values]
        return (*minors, *patches, newest_first(value(found, "python")), found.cell)

    return near
