"""The judge: whether a combination of releases works, fails, can't exist or was never run, with the evidence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Literal, NamedTuple

from pydantic import Field

from ..cells import AXES, PACKAGES, WORD, WORDS, Cell, spelled
from ..errors import MatrixError
from ..results import FINE, Output, Summary
from ..store import Past, Store
from ..versions import parsed, related, release, same
from ..words import plural
from . import explain
from .common import DEVICES, KERNELS
from .facts import Axis, ByAxis, CellState, Model, NamedCell, Shim
from .rules import Kernel, Rule, Rules, deciding

#: ``wrong``: something computes wrong numbers. ``refused``: a rule of the axes excludes it. ``unknown``: never run.
Verdict = Literal["passed", "flaky", "known", "wrong", "failed", "refused", "unknown"]

Match = Literal["exact", "nearest", "none"]

#: How near the evidence is: the same releases, other patches of the same minor releases, a rule of the axes, or neighbours.
Closeness = Literal["patch", "minor", "rule", "neighbour", "none"]

#: The axes, those first whose differences matter most: a CPU says less about a GPU than one release about the next. A project's
#: own axes come after the first three.
ORDER = ("device", "flash_attention", "flash_attn_package", "transformers", "torch", "python")

#: The axis of the version of FlashAttention's package, which a request may name, and which is no axis of cells.
PACKAGE = ORDER[2]

#: A FlashAttention as people write it: by its name, its package, or the package's version.
_FLASH = re.compile(
    r"(?:flash[-_ ]?att(?:n|ention)|fa)(?:[-_ ]?([0-9]))?(?:[-_]fwd)?(?:[\s=@:v-]+(\d[\w.+ -]*))?|v?(\d[\w.+ -]*)"
)

#: The verdicts of tests that ran, worst first. Of several matching cells the worst verdict counts.
WORST = ("wrong", "failed", "known", "flaky", "passed")

#: Those that speak against a neighbour.
_BAD = WORST[:3]


def wanted(axes: Mapping[str, str | None]) -> dict[str, str]:
    """A requested combination: the values of some axes, versions without their local part.

    Args:
        axes: values by axis; None stands for every value. A FlashAttention may be a package with its version, such as
            ``flash-attn 2.8.3``. Values of the project's own axes are releases or words.

    Raises:
        MatrixError: an axis never has this value.
    """
    found = {axis: value for axis in (*AXES, *sorted(axes.keys() - {*AXES})) if (value := axes.get(axis)) is not None}
    if "flash_attention" in found:
        found |= _flash_attention(found["flash_attention"])
    for axis, value in found.items():
        if axis == "device" and value not in WORDS[axis]:
            raise MatrixError(f"{axis} is one of {', '.join(WORDS[axis])}, not {value!r}")
        if axis not in WORDS and (axis in ORDER or not re.fullmatch(WORD, value)):
            if (version := parsed(value.replace(" ", "+"))) is None:
                form = "a release such as 5.9.0, 5.9, 5.9.0rc1 or 2.11.0+cu130"
                raise MatrixError(f"{spelled(axis)} is {form}, not {value[:100]!r}")
            found[axis] = version.public
    return found


def _flash_attention(text: str) -> dict[str, str]:
    """The FlashAttention that people mean, and the version of its package if they name that."""
    text = text.strip().lower()
    match = _FLASH.fullmatch(text)
    number, *versions = match.groups("") if match else ("", "", "")
    version = next(filter(None, versions), "")
    kind = f"fa{number or (version or '2')[0]}" if match else text
    if kind not in WORDS["flash_attention"] and "." not in version:
        raise no_flash_attention(text)
    return {"flash_attention": kind, **({PACKAGE: version} if "." in version else {})}


def no_flash_attention(text: str) -> MatrixError:
    """The error for a text that names no FlashAttention."""
    words = ", ".join(WORDS["flash_attention"])
    return MatrixError(f"flash-attn is one of {words}, or a package such as flash-attn 2.8.3, not {text[:100]!r}")


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
    flash_attn_package: str
    shims: list[Shim] = Field(default_factory=list)
    failure: Failure | None = None
    differs: list[Difference] = Field(default_factory=list)

    @property
    def shown(self) -> list[tuple[str, str]]:
        """The axes by which people know a combination, with their values."""
        return [
            (axis, self[axis])
            for axis in ("transformers", "torch", "flash_attention", PACKAGE, "device", "python", *self.extra)
        ]

    @property
    def instead(self) -> str:
        """Its values on the axes on which it differs."""
        return " and ".join(f"{spelled(one.axis)} {one.tested}" for one in self.differs)

    @property
    def alike(self) -> bool:
        """Whether its cell is of the requested minor releases."""
        return _alike(_axes(self.cell, self.flash_attn_package), {one.axis: one.asked for one in self.differs})

    def __getitem__(self, axis: str) -> str:
        """The value of an axis: the exact version, where it has one."""
        return str(getattr(self, axis)) if axis in ORDER else self.extra.get(axis, "")

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
    def of(cls, past: Past, package: str = "") -> Known:
        """With the exact versions, where the result has them."""
        axes = _axes(past.cell, package)
        exact = {**axes, **{axis: version for axis, version in past.versions.items() if version}}
        return cls(past, axes, exact | ({PACKAGE: package} if package else {}), _verdict(past.summary))

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
        exact = {PACKAGE: ""} | {axis: value for axis, value in self.exact.items() if axis in ORDER}
        extra = {axis: value for axis, value in self.exact.items() if axis not in ORDER}
        return Tested.of(self.past, **more, **exact, extra=extra, differs=differs)


class OnDevice(Model):
    """The verdict on a combination on one device; ``unknown`` if it was never run there."""

    device: str
    verdict: Verdict
    reason: Output


class OnKernel(OnDevice):
    """The verdict on exactly the requested releases with a FlashAttention on a device; `mixed` and `sign` as in `Answer`."""

    flash_attention: str
    mixed: Output
    sign: Verdict = Field(exclude=True)


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
        mixed: how many of several combinations work, fail, were never run and are excluded, if they differ in that; or how the
            nearest patch of a combination did that was never run; else empty.
        closeness: how near the evidence is.
        devices: the verdict on each device that may be meant, other patches included.
        kernels: the verdict on each FlashAttention on each device that may be meant.
        counts: the number of requested combinations with each verdict. Combinations that were never run or are excluded count if
            the axes or the store have a cell for them.
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
    kernels: list[OnKernel]
    counts: dict[str, int]
    tested: list[Tested]
    works: Tested | None
    against: list[Tested]
    refusals: list[Refusal]

    @property
    def why(self) -> str:
        """The reason on a page, where other patches are evidence, too."""
        own = self.kernels[0].reason if len(self.kernels) == 1 else ""
        return (self.reason or own) if self.verdict == self.minor else self.tested[0].reason

    @property
    def sign(self) -> Verdict:
        """The verdict whose sign is beside the headline: where some work and some fail, that of known failures."""
        return _sign(self.counts, self.verdict)

    @property
    def lines(self) -> list[tuple[str, OnKernel]]:
        """Of a question about several kernels, the verdict on each. Kernels with the same verdict and reason are one line, which names them all."""
        alike: dict[tuple[str, ...], list[OnKernel]] = {}
        for one in self.kernels if len(self.kernels) > 1 and self.verdict != "refused" else ():
            alike.setdefault((one.device, one.verdict, one.mixed, one.reason), []).append(one)
        found = []
        for some in alike.values():
            names = [DEVICES[some[0].device]] if not self.asked["device"] else []
            asked = self.asked["flash_attention"]
            names += [KERNELS[one.flash_attention] for one in some if one.flash_attention != asked]
            found.append((", ".join(names), some[0]))
        return found

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
    ones are those with the same device, then the same FlashAttention, then the nearest minor releases of its package, of
    transformers, torch and Python, in this order, and then the nearest patches; of two equally near releases the older one,
    and of axes that are left out the newest release.

    Args:
        rules: without them, a combination is refused only if the store has exactly its cells as excluded.
        newest: the newest result of every cell, if the caller has it.
    """

    def __init__(self, store: Store, rules: Rules | None = None, newest: Sequence[Past] | None = None) -> None:
        found = store.newest() if newest is None else newest
        self.store, self.rules = store, rules or Rules.stored(found)
        self.known = [Known.of(one) for one in sorted(one for one in found if not one.summary.excluded)]
        self.axes = in_order({*ORDER, *self.rules.values, *(axis for one in self.known for axis in one.axes)})
        self._versions = [axis for axis in self.axes if axis != PACKAGE]
        self._numbered = [*self.rules.cells]
        self._packages: dict[tuple[str, Cell], str] = {}

    def __call__(self, asked: Mapping[str, str], limit: int = 5) -> Answer:
        """The verdict on a combination that `wanted` has read.

        Args:
            limit: the most entries of `Answer.tested`.
        """
        asked = {axis: asked[axis] for axis in in_order(asked)}
        on = {device: self.rules.on(asked, device) for device in WORDS["device"]}
        known = [*map(self.packaged, self.known)] if PACKAGE in asked else self.known

        def distance(one: Known) -> tuple[object, ...]:
            return self._distance(one, on[one.axes["device"]])

        alike = [one for one in known if _alike(one.axes, on[one.axes["device"]])]
        ended = [one for one in alike if one.ended]
        fit = self._fitting(ended, on)
        refusing = self.rules.refusing(asked)
        rules = [] if fit else deciding([*refusing.values()])
        evidence = _last_of_each(fit or ([] if rules else ended))
        evidence.sort(key=lambda one: (WORST.index(one.verdict), distance(one)))
        minor: Verdict = evidence[0].verdict if evidence else "refused" if rules else "unknown"
        near = [] if fit and minor in FINE else sorted((one for one in known if one.ended), key=distance)
        other = self._tested(min(evidence, key=distance), on) if evidence and not fit else None
        if fit:
            reason, shown = evidence[0].reason, evidence
        else:
            reason = _because(rules) or self._why_unknown(asked, alike, known, other)
            shown = [*evidence, *(one for one in near if one not in evidence)]
        ran = {one.past.cell for one in fit}
        open_cells = {cell: why for cell, why in self._cells(on).items() if cell not in ran}
        verdicts = [one.verdict for one in evidence]
        refusals = self._refusals(open_cells, rules)
        counts: dict[str, int] = Counter(verdicts if fit else ())
        counts["unknown"] = sum(not why for why in open_cells.values())
        counts["refused"] = sum(one.cells for one in refusals) or bool(rules)
        kernels = self._kernels(asked, evidence if fit else [], refusing, open_cells)
        works = next((one for one in near if one.verdict == "passed"), None) if minor not in FINE else None
        return Answer(
            asked=dict.fromkeys(ORDER) | dict(sorted(asked.items())),
            match="exact" if fit or rules else "nearest" if shown else "none",
            verdict=minor if fit or rules else "unknown",
            kind=evidence[0].past.summary.kind if minor == "failed" else None,
            reason=reason,
            minor=minor,
            mixed=_patched(verdicts, other) if other else _mixed(verdicts, counts),
            closeness=_closeness(asked, bool(fit), minor, bool(near)),
            devices=self._devices(asked, evidence, refusing),
            kernels=kernels,
            counts={name: count for name, count in counts.items() if count},
            tested=[self._tested(one, on) for one in shown[:limit]],
            works=works and self._tested(works, on),
            against=[self._tested(one, on) for one in _against(near, on)] if minor == "unknown" else [],
            refusals=refusals,
        )

    def packaged(self, one: Known) -> Known:
        """A result with the version of its FlashAttention's package, where its environment has one."""
        cell, run = one.past.cell, one.past.run.id
        names = [name for name, kind in PACKAGES.items() if kind == cell.flash_attention and one.ended]
        if names and (run, cell) not in self._packages:
            packages = self.store.environment(run, cell).get("packages")
            said = [packages.get(name) for name in names] if isinstance(packages, Mapping) else []
            fit = (version.public for one in said if isinstance(one, str) and (version := parsed(one)))
            self._packages[run, cell] = next(fit, "")
        return Known.of(one.past, self._packages[run, cell]) if names else one

    def _tested(self, one: Known, on: Mapping[str, Mapping[str, str]]) -> Tested:
        return self.packaged(one).tested(on[one.axes["device"]])

    def _fitting(self, ended: Sequence[Known], on: Mapping[str, Mapping[str, str]]) -> list[Known]:
        """The results of the requested releases; where the newest ones are of other patches, earlier ones."""
        fit = [one for one in ended if _fits(one.exact, on[one.axes["device"]])]
        if fit or not ended:
            return fit
        earlier = map(Known.of, self.store.in_each_environment(one.past.cell for one in ended))
        if PACKAGE in on["cuda"]:
            earlier = map(self.packaged, earlier)
        return [one for one in earlier if _fits(one.exact, on[one.axes["device"]])]

    def _why_unknown(
        self, asked: Mapping[str, str], alike: Sequence[Known], known: Sequence[Known], other: Tested | None
    ) -> str:
        if other:
            return f"another patch of it was tested: {other.instead}"
        if alike:
            return alike[0].reason
        values = {**self.rules.values, PACKAGE: [one.axes[PACKAGE] for one in known if PACKAGE in one.axes]}
        none = [
            f"{spelled(axis)} {value}"
            for axis, value in asked.items()
            if not any(related(one, value) for one in values.get(axis, ""))
        ]
        if none and self.rules.values:
            return f"the matrix has no {' and no '.join(none)}"
        return "no run has planned it"

    def _distance(self, one: Known, asked: Mapping[str, str]) -> tuple[object, ...]:
        """A key that sorts combinations by their distance from the requested one, whose axes are in order."""
        exact = one.exact
        apart = [_apart(value, exact.get(axis, "")) for axis, value in asked.items()]
        newest = _newest(tuple([exact.get(axis, "") for axis in self._versions]))
        return *zip(*apart, strict=True), newest, one.past.cell  # all minor releases, then all patches

    def _cells(self, on: Mapping[str, Mapping[str, str]]) -> dict[Cell, str]:
        """The cells of the request, each with the reason why it is excluded; empty for one that isn't."""
        numbers: set[int] = set()
        for device, one in on.items():
            if one.get("device", device) == device:
                axes = {axis: value for axis, value in one.items() if axis != PACKAGE}
                numbers |= self.rules.alike({**axes, "device": device})
        return {cell: self.rules.cells[cell] for cell in map(self._numbered.__getitem__, sorted(numbers))}

    def _kernels(
        self,
        asked: Mapping[str, str],
        fit: Sequence[Known],
        refusing: Mapping[Kernel, Sequence[Rule]],
        open_cells: Mapping[Cell, str],
    ) -> list[OnKernel]:
        found = []
        for kernel, rules in refusing.items():
            own = [one for one in fit if kernel == (one.axes["device"], one.axes["flash_attention"])]
            known = (
                axis in asked or value in self.rules.values.get(axis, ()) for axis, value in kernel._asdict().items()
            )
            if not own and not all(known):
                continue
            cells = [why for cell, why in open_cells.items() if kernel == (cell.device, cell.flash_attention)]
            verdict: Verdict = own[0].verdict if own else "refused" if rules else "unknown"
            because = [own[0].reason] if own else [rule.because for rule in rules]
            because += filter(None, [] if verdict == "refused" else cells)
            counts = {"unknown": cells.count(""), "refused": len(cells) - cells.count("")}
            verdicts = [one.verdict for one in own]
            mixed = "" if verdict == "refused" else _mixed(verdicts, counts)
            reason = "; ".join(dict.fromkeys(filter(None, because)))
            sign = _sign(verdicts, verdict)
            found.append(OnKernel(**kernel._asdict(), verdict=verdict, reason=reason, mixed=mixed, sign=sign))
        return found

    def _devices(
        self, asked: Mapping[str, str], evidence: Sequence[Known], refusing: Mapping[Kernel, Sequence[Rule]]
    ) -> list[OnDevice]:
        has = {*self.rules.values.get("device", ()), *(one.axes["device"] for one in evidence)}
        found = []
        for device in [asked["device"]] if "device" in asked else [one for one in WORDS["device"] if one in has]:
            own = next((one for one in evidence if one.axes["device"] == device), None)
            rules = deciding([some for kernel, some in refusing.items() if kernel.device == device])
            verdict: Verdict = own.verdict if own else "refused" if rules else "unknown"
            found.append(OnDevice(device=device, verdict=verdict, reason=own.reason if own else _because(rules)))
        return found

    def _refusals(self, open_cells: Mapping[Cell, str], rules: Sequence[Rule]) -> list[Refusal]:
        cells: dict[str, list[Cell]] = {rule.because: [] for rule in rules}
        for cell, because in open_cells.items():
            if because:
                cells.setdefault(because, []).append(cell)
        when = {rule.because: rule.when for rule in self.rules.rules}
        return [
            Refusal(reason=because, rule=when.get(because, ""), cells=len(some), cell=some[0] if some else None)
            for because, some in cells.items()
        ]


def in_order(asked: Collection[str]) -> list[str]:
    """These axes in the order of `ORDER`, with own axes."""
    own = sorted(axis for axis in asked if axis not in ORDER)
    return [axis for axis in (*ORDER[:3], *own, *ORDER[3:]) if axis in asked]


def _axes(cell: Cell, package: str) -> Mapping[str, str]:
    """The values of a cell's axes, with the minor release of its FlashAttention's package."""
    return {**cell.axes, PACKAGE: ".".join(package.split(".")[:2])} if package else cell.axes


def _verdict(summary: Summary) -> Verdict:
    if summary.verdict is None or summary.verdict == "not run":
        return "unknown"
    return "wrong" if (summary.verdict, summary.kind) == ("failed", "wrong") else summary.verdict


def _because(rules: Iterable[Rule]) -> str:
    return "; ".join(dict.fromkeys(rule.because for rule in rules))


def _sign(verdicts: Collection[str], verdict: Verdict) -> Verdict:
    """The verdict, or ``known`` where some work and some fail."""
    return "known" if len({one in FINE for one in WORST if one in verdicts}) > 1 else verdict


def _does(verdicts: Collection[Verdict], end: str) -> str:
    """The verb of combinations that all work or all fail."""
    if {*verdicts} == {"wrong"}:
        return f"compute{end} something else"
    return f"work{end}" if {*verdicts} <= {*FINE} else f"fail{end}"


def _mixed(verdicts: Sequence[Verdict], counts: Mapping[str, int]) -> str:
    """How many combinations work, fail, were never run and are excluded, if they differ in that; else empty."""
    tested, works = len(verdicts), sum(one in FINE for one in verdicts)
    some = 0 < works < tested
    parts = [f"{works} of {tested} tested combinations work"] if some else []
    if tested and not some:
        parts = [f"{plural(tested, 'tested combination')} {_does(verdicts, '' if tested > 1 else 's')}"]
    for verdict, words in {
        "unknown": ("was never run", "were never run"),
        "refused": ("is excluded", "are excluded"),
    }.items():
        if number := counts[verdict]:
            parts.append(f"{number if parts else plural(number, 'combination')} {words[number > 1]}")
    return ", ".join(parts) if some or len(parts) > 1 else ""


def _patched(verdicts: Sequence[Verdict], nearest: Tested) -> str:
    """How other patches did of a combination that was never run."""
    works = sum(one in FINE for one in verdicts)
    if 0 < works < len(verdicts):
        return f"It was never run; with other patches {works} of {len(verdicts)} tested combinations work"
    return f"It was never run; it {_does(verdicts, 's')} with {nearest.instead}"


def _closeness(asked: Mapping[str, str], fit: bool, minor: Verdict, near: bool) -> Closeness:
    if minor == "refused":
        return "rule"
    if minor == "unknown":
        return "neighbour" if near else "none"
    named = [version.release for axis, value in asked.items() if axis != "python" and (version := parsed(value))]
    return "patch" if fit and named and all(len(one) > 2 for one in named) else "minor"


def _against(near: Iterable[Known], on: Mapping[str, Mapping[str, str]]) -> list[Known]:
    """The failures among the results next to a combination: those that differ on one axis, the nearest on each side."""
    sides: dict[tuple[str, bool], Known] = {}
    for one in near:
        asked = on[one.axes["device"]]
        differ = [axis for axis, value in asked.items() if not related(one.axes.get(axis, ""), value)]
        if len(differ) == 1:
            (axis,) = differ
            sides.setdefault((axis, release(one.axes.get(axis, "")) > release(asked[axis])), one)
    return [one for one in sides.values() if one.verdict in _BAD]


def _alike(axes: Mapping[str, str], asked: Mapping[str, str]) -> bool:
    return all(map(related, map(axes.get, asked, repeat("")), asked.values()))  # of hundreds of results


def _fits(exact: Mapping[str, str], asked: Mapping[str, str]) -> bool:
    return all(same(value, exact.get(axis, "")) for axis, value in asked.items())


def _last_of_each(results: Iterable[Known]) -> list[Known]:
    """The last result for each combination; cells such as 5.9 and 5.9.0 may have tested the same one."""
    newest: dict[tuple[object, ...], Known] = {}
    for one in sorted(results, key=lambda one: str(one.past.summary.started or "")):
        exact = {**one.exact, "python": release(one.exact["python"])[:2]}
        newest[tuple(sorted(exact.items()))] = one
    return [*newest.values()]


@lru_cache(10_000)
def _apart(asked: str, own: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How far a value is from the requested one: in its minor release, and in its patch; words have no patch."""
    if parsed(asked) is None:
        return (int(own != asked),), ()
    there, here = release(own), release(asked)
    side = (there[0] > here[0]) - (there[0] < here[0])
    minor = (abs(there[0] - here[0]), side, *_step(side, there[1], here[1]))
    side = (there[:2] > here[:2]) - (there[:2] < here[:2])
    return minor, (0, 0) if same(asked, own) else (1, *_step(side, there[2], here[2]))


@lru_cache(10_000)
def _newest(versions: tuple[str, ...]) -> tuple[int, ...]:
    """A key that sorts releases, newest first."""
    return tuple(-number for version in versions for number in release(version))


def _step(side: int, there: int, here: int) -> tuple[int, bool]:
    """How far a part of a release is. Of an older series the last release is the nearest, of a newer one the first."""
    return (side * there, False) if side else (abs(there - here), there > here)
