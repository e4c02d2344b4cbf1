"""The judge: whether a combination of releases works, fails, can't exist or was never run, with the evidence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Literal, NamedTuple

from pydantic import Field

from ..cells import AXES, WORD, WORDS, Cell, spelled
from ..errors import MatrixError
from ..results import FINE, Output, Summary
from ..store import Past, Store
from ..versions import parsed, related, release, same
from . import explain
from .facts import Axis, ByAxis, CellState, Model, NamedCell, Shim
from .rules import Rule, Rules, deciding

#: ``wrong``: something computes wrong numbers. ``refused``: a rule of the axes excludes it. ``unknown``: never run.
Verdict = Literal["passed", "flaky", "known", "wrong", "failed", "refused", "unknown"]

Match = Literal["exact", "nearest", "none"]

#: How near the evidence is: the same releases, other patches of the same minor releases, a rule of the axes, or neighbours.
Closeness = Literal["patch", "minor", "rule", "neighbour", "none"]

#: The axes, those first whose differences matter most: a CPU says less about a GPU than one release about the next. A project's
#: own axes come after the first two.
ORDER = ("device", "flash_attention", "transformers", "torch", "python")

#: The verdicts of tests that ran, worst first. Of several matching cells the worst verdict counts.
WORST = ("wrong", "failed", "known", "flaky", "passed")

#: Those that speak against a neighbour.
_BAD = WORST[:3]


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
                raise MatrixError(f"{spelled(axis)} is one of {', '.join(WORDS[axis])}, not {value!r}")
        elif axis in AXES or not re.fullmatch(WORD, value):
            if (version := parsed(value.replace(" ", "+"))) is None:
                form = "a release such as 5.9.0, 5.9, 5.9.0rc1 or 2.11.0+cu130"
                raise MatrixError(f"{spelled(axis)} is {form}, not {value[:100]!r}")
            found[axis] = version.public
    return found


class Difference(Model):
    """An axis on which a tested combination differs from the requested one."""

    axis: Axis
    asked: str
    tested: str


class Failure(Model):
    """The first test that failed in a cell, the last line of its error, and its issue if the axes file has one."""

    test: Output
    error: Output
    issue: Output


class Tested(CellState):
    """A cell with a result and its exact versions; in an answer with its shims, its failure and how it differs from the request."""

    verdict: Verdict
    run_label: Output
    revision: Output
    shims: list[Shim] = Field(default_factory=list)
    failure: Failure | None = None
    differs: list[Difference] = Field(default_factory=list)

    @property
    def shown(self) -> list[tuple[str, str]]:
        """The axes by which people know a combination, with their values."""
        return [
            (axis, self[axis]) for axis in ("transformers", "torch", "flash_attention", "device", "python", *self.extra)
        ]

    @property
    def alike(self) -> bool:
        """Whether its cell is of the requested minor releases."""
        return _alike(self.cell.axes, {one.axis: one.asked for one in self.differs})

    def __getitem__(self, axis: str) -> str:
        """The value of an axis: the exact version, where it has one."""
        return str(getattr(self, axis)) if axis in AXES else self.extra.get(axis, "")

    def detailed(self, store: Store) -> Tested:
        """The same with its shims and its failure."""
        if self.verdict == "passed":
            return self.model_copy(update={"shims": explain.shims(store.environment(self.run, self.cell))})
        result = store.result(self.run, self.cell, self.attempt, log=False)
        some = [test for test in result.tests if test.bad or test.outcome in ("flaky", "known")]
        failure = None
        if first := min(some, key=lambda test: not test.bad, default=None):
            lines = explain.error_lines(first.message.splitlines())
            issue = re.match(r"https?://[^\s:]+", first.message) if first.outcome == "known" else None
            error = lines[-1].removeprefix("E ").strip() if lines else ""
            failure = Failure(test=first.nodeid, error=error, issue=issue[0] if issue else "")
        return self.model_copy(update={"shims": explain.shims(result.environment), "failure": failure})


class Known(NamedTuple):
    """The newest result of a cell, or its plan, as it is compared with a request."""

    past: Past
    axes: Mapping[str, str]
    exact: Mapping[str, str]
    verdict: Verdict

    @classmethod
    def of(cls, past: Past) -> Known:
        """With the exact versions, where the result has them."""
        axes = past.cell.axes
        exact = {**axes, **{axis: version for axis, version in past.versions.items() if version}}
        return cls(past, axes, exact, _verdict(past.summary))

    @property
    def ended(self) -> bool:
        """Whether its tests ran."""
        return self.verdict in WORST

    @property
    def reason(self) -> str:
        """The reason for its result, or why it has none."""
        cell, run, summary, _ = self.past
        if self.ended:
            return summary.reason
        word = "was not run" if summary.verdict else "has no result yet"
        return f"{cell} {word} in {run.id}{f': {summary.reason}' if summary.reason else ''}"

    def tested(self, asked: Mapping[str, str] = {}) -> Tested:
        """As evidence on a request."""
        differs = [
            Difference(axis=axis, asked=asked[axis], tested=self.exact.get(axis, ""))
            for axis in asked
            if not same(asked[axis], self.exact.get(axis, ""))
        ]
        run = self.past.run
        more = {"verdict": self.verdict, "reason": self.reason, "run_label": run.label, "revision": run.revision}
        exact = {axis: value for axis, value in self.exact.items() if axis in AXES}
        extra = {axis: value for axis, value in self.exact.items() if axis not in AXES}
        return Tested.of(self.past, **more, **exact, extra=extra, differs=differs)


class OnDevice(Model):
    """The verdict on a combination on one device; ``unknown`` if it was never run there."""

    device: str
    verdict: Verdict
    reason: Output


class Refusal(Model):
    """Excluded combinations: the reason, the rule, the number of the axes' cells, and one of them as an example.

    The rule is the condition in the axes file; it is empty if only the store says so. Releases that no axis has are no cells.
    """

    reason: str
    rule: str
    cells: int
    cell: NamedCell | None


class Answer(Model):
    """The verdict on a combination, with the evidence.

    Attributes:
        asked: the requested combination by axis; null for every value.
        match: ``exact``: the combination was run, or a rule excludes it; ``nearest``: similar ones were run; ``none``: none was.
        verdict: on exactly this combination, the worst of several cells. ``unknown`` unless `match` is ``exact``.
        kind: how it failed, if it did.
        reason: the reason for the verdict.
        minor: as `verdict`, where only other patches of the requested releases were run, on these.
        mixed: how many of several combinations work, if some do and some fail; else empty.
        closeness: how near the evidence is.
        devices: the verdict on each device that may be meant, other patches included.
        counts: the number of matching combinations with each verdict; empty unless `match` is ``exact``.
        tested: the evidence, deciding entries first; then, or else, the nearest combinations, nearest first.
        works: the nearest combination that passed, if this one doesn't.
        against: failures on the next tested releases on either side, if it was never run.
        refusals: the excluded ones among the requested combinations, the reasons for the verdict first.
    """

    asked: ByAxis
    match: Match
    verdict: Verdict
    kind: str | None
    reason: Output
    minor: Verdict
    mixed: Output
    closeness: Closeness
    devices: list[OnDevice]
    counts: dict[str, int]
    tested: list[Tested]
    works: Tested | None
    against: list[Tested]
    refusals: list[Refusal]

    @property
    def why(self) -> str:
        """The reason on a page, where other patches are evidence, too."""
        return self.reason if self.verdict == self.minor else self.tested[0].reason

    @property
    def evidence(self) -> list[Tested]:
        """The evidence on a page, or else the nearest combinations; a rule needs none."""
        if self.closeness == "rule":
            return []
        return [one for one in self.tested if one.alike][:5] or self.tested[:3]

    def detailed(self, store: Store) -> Answer:
        """The same with the shims and the failure of each of its results."""
        tested, against = ([one.detailed(store) for one in some] for some in (self.tested, self.against))
        works = self.works and self.works.detailed(store)
        return self.model_copy(update={"tested": tested, "against": against, "works": works})


class Judge:
    """Verdicts on combinations, from the results of a store and the rules of an axes file.

    A result decides before a rule, and a rule before results of other patches. If a combination was never run, the nearest
    ones are those with the same device, then the same FlashAttention, then the nearest minor releases of transformers, torch
    and Python, in this order, and then the nearest patches; of two equally near releases the older one.

    Args:
        rules: without them, a combination is refused only if the store has exactly its cells as excluded.
        newest: the newest result of every cell, if the caller has it.
    """

    def __init__(self, store: Store, rules: Rules | None = None, newest: Sequence[Past] | None = None) -> None:
        found = store.newest() if newest is None else newest
        self.store, self.rules = store, rules or Rules.stored(found)
        self.known = [Known.of(one) for one in sorted(one for one in found if not one.summary.excluded)]

    def __call__(self, asked: Mapping[str, str], limit: int = 5) -> Answer:
        """The verdict on a combination that `wanted` has read.

        Args:
            limit: the most entries of `Answer.tested`.
        """
        asked = {axis: asked[axis] for axis in in_order(asked)}
        distance = partial(_distance, asked=asked)
        alike = [one for one in self.known if _alike(one.axes, asked)]
        ended = [one for one in alike if one.ended]
        fit = self._fitting(ended, asked)
        refusing = [*self.rules.refusing(asked)]
        rules = [] if fit else deciding([some for _, some in refusing])
        evidence = _last_of_each(fit or ([] if rules else ended))
        evidence.sort(key=lambda one: (WORST.index(one.verdict), distance(one)))
        minor: Verdict = evidence[0].verdict if evidence else "refused" if rules else "unknown"
        exact = bool(fit or rules)
        near = [] if fit and minor in FINE else sorted((one for one in self.known if one.ended), key=distance)
        if fit:
            reason, shown = evidence[0].reason, evidence
        else:
            reason = _because(rules) or self._why_unknown(asked, alike)
            shown = [*evidence, *(one for one in near if one not in evidence)]
        refusals = self._refusals(asked, rules)
        counts: dict[str, int] = Counter(one.verdict for one in (evidence if fit else ()))
        if rules:
            counts["refused"] = sum(one.cells for one in refusals) or 1
        return Answer(
            asked=dict.fromkeys(ORDER) | dict(sorted(asked.items())),
            match="exact" if exact else "nearest" if shown else "none",
            verdict=minor if exact else "unknown",
            kind=evidence[0].past.summary.kind if minor == "failed" else None,
            reason=reason,
            minor=minor,
            mixed=_mixed([one.verdict for one in evidence]),
            closeness=_closeness(asked, bool(fit), minor, bool(near)),
            devices=self._devices(asked, evidence, refusing),
            counts=counts,
            tested=[one.tested(asked) for one in shown[:limit]],
            works=next((one.tested(asked) for one in near if one.verdict == "passed" and minor not in FINE), None),
            against=[one.tested(asked) for one in _against(near, asked)] if minor == "unknown" else [],
            refusals=refusals,
        )

    def _fitting(self, ended: Sequence[Known], asked: Mapping[str, str]) -> list[Known]:
        """The results of the requested releases; where the newest ones are of other patches, earlier ones."""
        fit = [one for one in ended if _fits(one.exact, asked)]
        if fit or not ended:
            return fit
        earlier = map(Known.of, self.store.in_each_environment(one.past.cell for one in ended))
        return [one for one in earlier if _fits(one.exact, asked)]

    def _why_unknown(self, asked: Mapping[str, str], alike: Sequence[Known]) -> str:
        if any(one.ended for one in alike):
            return "another patch of it was tested"
        if alike:
            return alike[0].reason
        values = self.rules.values
        none = [
            f"{spelled(axis)} {value}"
            for axis, value in asked.items()
            if not any(related(one, value) for one in values.get(axis, ""))
        ]
        if none and values:
            return f"the matrix has no {' and no '.join(none)}"
        return "no run has planned it"

    def _devices(
        self, asked: Mapping[str, str], evidence: Sequence[Known], refusing: Sequence[tuple[str, Sequence[Rule]]]
    ) -> list[OnDevice]:
        has = {*self.rules.values.get("device", ()), *(one.axes["device"] for one in evidence)}
        found = []
        for device in [asked["device"]] if "device" in asked else [one for one in WORDS["device"] if one in has]:
            own = next((one for one in evidence if one.axes["device"] == device), None)
            rules = deciding([some for on, some in refusing if on == device])
            verdict: Verdict = own.verdict if own else "refused" if rules else "unknown"
            found.append(OnDevice(device=device, verdict=verdict, reason=own.reason if own else _because(rules)))
        return found

    def _refusals(self, asked: Mapping[str, str], rules: Sequence[Rule]) -> list[Refusal]:
        cells: dict[str, list[Cell]] = {rule.because: [] for rule in rules}
        for cell, because in self.rules.excluded.items():
            if _alike(cell.axes, asked):
                cells.setdefault(because, []).append(cell)
        when = {rule.because: rule.when for rule in self.rules.rules}
        return [
            Refusal(reason=because, rule=when.get(because, ""), cells=len(some), cell=some[0] if some else None)
            for because, some in cells.items()
        ]


def in_order(asked: Collection[str]) -> list[str]:
    """These axes in the order of `ORDER`, with own axes."""
    own = sorted(axis for axis in asked if axis not in ORDER)
    return [axis for axis in (*ORDER[:2], *own, *ORDER[2:]) if axis in asked]


def _verdict(summary: Summary) -> Verdict:
    if summary.verdict is None or summary.verdict == "not run":
        return "unknown"
    return "wrong" if (summary.verdict, summary.kind) == ("failed", "wrong") else summary.verdict


def _because(rules: Iterable[Rule]) -> str:
    return "; ".join(dict.fromkeys(rule.because for rule in rules))


def _mixed(verdicts: Sequence[Verdict]) -> str:
    """How many combinations work, if some do and some fail; else empty."""
    works = sum(one in FINE for one in verdicts)
    return f"{works} of {len(verdicts)} tested combinations work" if 0 < works < len(verdicts) else ""


def _closeness(asked: Mapping[str, str], fit: bool, minor: Verdict, near: bool) -> Closeness:
    if minor == "refused":
        return "rule"
    if minor == "unknown":
        return "neighbour" if near else "none"
    patches = [asked[axis] for axis in ("transformers", "torch") if axis in asked]
    return "patch" if fit and patches and all(one.count(".") >= 2 for one in patches) else "minor"


def _against(near: Iterable[Known], asked: Mapping[str, str]) -> list[Known]:
    """The failures among the results next to a combination: those that differ on one axis, the nearest on each side."""
    sides: dict[tuple[str, bool], Known] = {}
    for one in near:
        differ = [axis for axis, value in asked.items() if not related(one.axes.get(axis, ""), value)]
        if len(differ) == 1:
            (axis,) = differ
            sides.setdefault((axis, release(one.axes.get(axis, "")) > release(asked[axis])), one)
    return [one for one in sides.values() if one.verdict in _BAD]


def _alike(axes: Mapping[str, str], asked: Mapping[str, str]) -> bool:
    return all(map(related, map(axes.get, asked, repeat("")), asked.values()))  # of thousands of cells


def _fits(exact: Mapping[str, str], asked: Mapping[str, str]) -> bool:
    return all(same(value, exact.get(axis, "")) for axis, value in asked.items())


def _last_of_each(results: Iterable[Known]) -> list[Known]:
    """The last result for each combination; cells such as 5.9 and 5.9.0 may have tested the same one."""
    newest: dict[tuple[object, ...], Known] = {}
    for one in sorted(results, key=lambda one: str(one.past.summary.started or "")):
        exact = {**one.exact, "python": release(one.exact["python"])[:2]}
        newest[tuple(sorted(exact.items()))] = one
    return [*newest.values()]


def _distance(one: Known, asked: Mapping[str, str]) -> tuple[object, ...]:
    """A key that sorts combinations by their distance from the requested one, whose axes are in order."""
    minors, patches = [], []
    for axis, value in asked.items():
        own = one.exact.get(axis, "")
        if parsed(value) is None:
            minors.append((int(own != value), 0, False))
            continue
        there, here = release(own), release(value)
        minors.append((abs(there[0] - here[0]), abs(there[1] - here[1]), there[:2] > here[:2]))
        differ = not same(value, own)
        patches.append((differ, differ and abs(there[2] - here[2]), differ and there[2] > here[2]))
    return (*minors, *patches, *(-number for number in release(one.exact["python"])), one.past.cell)
