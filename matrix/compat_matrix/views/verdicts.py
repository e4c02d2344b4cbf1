"""The verdict on a combination of releases, or the results of the nearest tested ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Literal, NamedTuple

from pydantic import Field

from ..cells import AXES, VERSIONED, WORD, WORDS
from ..errors import MatrixError
from ..results import FINE, Output
from ..store import Past, Store
from ..versions import parsed, related, release, same
from .explain import shims
from .facts import CellState, Model, NamedCell, Shim

#: ``wrong``: something computes wrong numbers. ``refused``: the axes exclude it, with a reason. ``unknown``: not tested.
Verdict = Literal["passed", "flaky", "known", "wrong", "failed", "refused", "unknown"]

Match = Literal["exact", "nearest", "none"]

#: How near the evidence is: the same releases, other patches of the same minor releases, a rule of the axes, or neighbours.
Closeness = Literal["patch", "minor", "rule", "neighbour", "none"]

#: The axes, those first whose differences matter most: a CPU says less about a GPU than one release about the next. A project's
#: own axes come after the first two.
ORDER = ("device", "flash_attention", "transformers", "torch", "python")

#: The verdicts, worst first. Of several matching cells the worst verdict counts.
_WORST = ("wrong", "failed", "known", "flaky", "passed")


def wanted(axes: Mapping[str, str | None]) -> dict[str, str]:
    """A requested combination: the values of some axes, versions without their local part.

    Args:
        axes: values by axis; None stands for every value. Those of the project's own axes are releases or words.

    Raises:
        MatrixError: an axis never has this value.
    """
    found = {axis: value for axis in (*AXES, *sorted(axes.keys() - {*AXES})) if (value := axes.get(axis)) is not None}
    for axis, value in found.items():
        if axis in WORDS:
            if value not in WORDS[axis]:
                raise MatrixError(f"{axis} is one of {', '.join(WORDS[axis])}, not {value!r}")
        elif axis in AXES or not re.fullmatch(WORD, value):
            if (version := parsed(value.replace(" ", "+"))) is None:
                form = "a release such as 5.9.0, 5.9, 5.9.0rc1 or 2.11.0+cu130"
                raise MatrixError(f"{axis} is {form}, not {value[:100]!r}")
            found[axis] = version.public
    return found


class Difference(Model):
    """An axis on which a tested combination differs from the requested one."""

    axis: str
    asked: str
    tested: str


class Tested(CellState):
    """A cell with its newest result, and its exact versions; in an answer with its shims and how it differs from the request."""

    verdict: Verdict
    run_label: Output
    revision: Output
    shims: list[Shim] = Field(default_factory=list)
    differs: list[Difference] = Field(default_factory=list)

    @classmethod
    def newest(cls, past: Past) -> Tested:
        """The newest result of a cell."""
        cell, run, summary, versions = past
        verdict: Verdict = "refused" if summary.excluded else "unknown"
        reason = summary.reason
        if summary.verdict and summary.verdict != "not run":
            verdict = "wrong" if (summary.verdict, summary.kind) == ("failed", "wrong") else summary.verdict
        elif not summary.excluded:
            word = "was not run" if summary.verdict else "has no result yet"
            reason = f"{cell} {word} in {run.id}{f': {reason}' if reason else ''}"
        given = {axis: version for axis in VERSIONED if (version := versions.get(axis))}
        extra = {axis: versions.get(axis) or value for axis, value in cell.extra}
        more = {"verdict": verdict, "reason": reason, "run_label": run.label, "revision": run.revision, "extra": extra}
        return cls.of(past, **more, **given)

    @property
    def ended(self) -> bool:
        """Whether its tests ran."""
        return self.verdict in _WORST

    @property
    def shown(self) -> list[tuple[str, str]]:
        """The axes by which people know a combination, with their values."""
        return [(axis, self[axis]) for axis in ("transformers", "torch", "flash_attention", "python", *self.extra)]

    def compared(self, asked: Mapping[str, str]) -> Tested:
        """The same with its differences from a requested combination."""
        differs = [
            Difference(axis=axis, asked=asked[axis], tested=self[axis])
            for axis in in_order(asked)
            if not same(asked[axis], self[axis])
        ]
        return self.model_copy(update={"differs": differs})

    def __getitem__(self, axis: str) -> str:
        """The value of an axis: the exact version, where it has one."""
        return str(getattr(self, axis)) if axis in AXES else self.extra.get(axis, "")


class Refusal(Model):
    """Excluded combinations: the reason, the number of cells, and one of them as an example."""

    reason: str
    cells: int
    cell: NamedCell


class Answer(Model):
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
    """The verdict on a combination: the worst of the evidence, as `Answer` has it.

    Attributes:
        exact: whether the evidence is of what was asked for; else it is of other patches of the same minor releases.
        found: the evidence, deciding entries first.
        near: the nearest tested combinations, nearest first.
    """

    asked: Mapping[str, str]
    exact: bool
    verdict: Verdict
    reason: str
    found: list[Tested]
    near: list[Tested]
    refusals: list[Refusal]

    @property
    def kind(self) -> str | None:
        """How it failed, if that isn't the verdict."""
        return self.found[0].kind if self.verdict == "failed" else None

    @property
    def closeness(self) -> Closeness:
        """How near the evidence is to what was asked for."""
        if self.verdict == "refused":
            return "rule"
        if not self.found:
            return "neighbour" if self.near else "none"
        patches = [self.asked[axis] for axis in ("transformers", "torch") if axis in self.asked]
        return "patch" if self.exact and patches and all(one.count(".") >= 2 for one in patches) else "minor"

    @property
    def shown(self) -> list[Tested]:
        """The evidence on a page, or else the nearest combinations; a rule has none."""
        some = [] if self.verdict == "refused" else self.found[:5] or self.near[:3]
        return [one.compared(self.asked) for one in some]

    @property
    def works(self) -> list[Tested]:
        """The nearest combination that passed, if this one didn't."""
        passed = [] if self.verdict in FINE else [one for one in self.near if one.verdict == "passed"]
        return [one.compared(self.asked) for one in passed[:1]]


def judge(store: Store, asked: Mapping[str, str], newest: Iterable[Past] | None = None) -> Judged:
    """The verdict of a store on a combination that `wanted` has read.

    If it wasn't tested, the nearest ones are those with the same device, then the same FlashAttention, then the nearest minor
    releases of transformers, torch and Python, in this order, and then the nearest patches; of two equally near releases the
    older one.

    Args:
        newest: the newest result of every cell, if the caller has it.
    """
    known = [*(store.newest() if newest is None else newest)]
    alike = [Tested.newest(one) for one in known if _alike(one.cell.axes, asked)]
    ended = [one for one in alike if one.ended]
    fit = [one for one in ended if _fits(one, asked)]
    if ended and not fit:  # a result from before a newer patch came out also counts
        earlier = map(Tested.newest, store.in_each_environment(one.cell for one in ended))
        fit = [one for one in earlier if _fits(one, asked)]
    refusals = Counter(one.reason for one in alike if one.verdict == "refused")
    refused = bool(alike) and len(alike) == refusals.total()
    distance = partial(_distance, asked=asked)
    found = sorted(_last_of_each(fit or ended), key=lambda one: (_WORST.index(one.verdict), distance(one)))
    verdict: Verdict = "refused" if refused else found[0].verdict if found else "unknown"
    open_ones = (one.reason for one in alike if one.verdict == "unknown")
    reason = "; ".join(refusals) if refused else found[0].reason if found else next(open_ones, "it was not tested")
    near = (
        [] if fit and verdict in FINE else sorted((one for one in map(Tested.newest, known) if one.ended), key=distance)
    )
    examples = {one.reason: one.cell for one in reversed(alike) if one.verdict == "refused"}
    excluded = [Refusal(reason=why, cells=count, cell=examples[why]) for why, count in refusals.items()]
    return Judged(asked, bool(fit) or refused, verdict, reason, found, near, excluded)


def answer(store: Store, asked: Mapping[str, str], limit: int = 5) -> Answer:
    """The answer of the API: as `judge`, but what is known of other patches is no verdict."""
    found = judge(store, asked)
    fit = found.found if found.exact else []
    some = (fit or found.near)[:limit]
    counts: dict[str, int] = Counter(one.verdict for one in fit)
    if found.verdict == "refused":
        counts["refused"] = sum(one.cells for one in found.refusals)
    return Answer(
        asked=dict.fromkeys(ORDER) | dict(sorted(asked.items())),
        match="exact" if found.exact else "nearest" if some else "none",
        verdict=found.verdict if found.exact else "unknown",
        reason="another patch of it was tested" if found.found and not found.exact else found.reason,
        counts=counts,
        tested=[
            one.compared(asked).model_copy(update={"shims": shims(store.environment(one.run, one.cell))})
            for one in some
        ],
        refusals=found.refusals,
    )


def in_order(asked: Collection[str]) -> list[str]:
    """These axes in the order of `ORDER`, with own axes."""
    own = sorted(axis for axis in asked if axis not in ORDER)
    return [axis for axis in (*ORDER[:2], *own, *ORDER[2:]) if axis in asked]


def _alike(axes: Mapping[str, str], asked: Mapping[str, str]) -> bool:
    return all(related(axes.get(axis, ""), value) for axis, value in asked.items())


def _fits(one: Tested, asked: Mapping[str, str]) -> bool:
    return all(same(value, one[axis]) for axis, value in asked.items())


def _last_of_each(found: Iterable[Tested]) -> Iterable[Tested]:
    """The last result for each combination; cells such as 5.9 and 5.9.0 may have tested the same one."""
    newest: dict[tuple[object, ...], Tested] = {}
    for one in sorted(found, key=lambda one: (one.started is not None, one.started)):
        key = (release(one.python)[:2], *one.extra.items(), *(one[axis] for axis in AXES[1:]))
        newest[key] = one
    return newest.values()


def _distance(one: Tested, asked: Mapping[str, str]) -> tuple[object, ...]:
    """A key that sorts combinations by their distance from the requested one."""
    minors, patches = [], []
    for axis in in_order(asked):
        own, wanted = one[axis], asked[axis]
        if parsed(wanted) is None:
            minors.append((int(own != wanted), 0, False))
            continue
        there, here = release(own), release(wanted)
        minors.append((abs(there[0] - here[0]), abs(there[1] - here[1]), there[:2] > here[:2]))
        differ = not same(wanted, own)
        patches.append((differ, differ and abs(there[2] - here[2]), differ and there[2] > here[2]))
    return (*minors, *patches, *(-number for number in release(one.python)), one.cell)
