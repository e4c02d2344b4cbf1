"""The response models of the reading API, as in its OpenAPI document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import BaseModel, JsonValue

from ..cells import AXES, Cell
from ..results import Better, CellResult, Kind, Outcome
from ..results import Verdict as Ended
from ..store import Run as StoredRun
from ..store import State, Summary
from ..views.common import clean
from ..views.diff import Change, Diff


class Error(BaseModel):
    """The reason for an error."""

    detail: str


class Page(BaseModel):
    """A page of a list.

    Attributes:
        next: the `cursor` of the next page; null on the last page.
    """

    next: str | None


class Run(BaseModel):
    """A run."""

    id: str
    started: datetime
    finished: datetime | None
    state: str
    label: str
    command: str
    host: str
    revision: str
    partial: bool

    @classmethod
    def of(cls, run: StoredRun) -> Run:
        """The model of a stored run."""
        texts = {name: clean(getattr(run, name)) for name in ("state", "label", "command", "host", "revision")}
        return cls(id=run.id, started=run.started, finished=run.finished, partial=run.partial, **texts)


class WholeRun(Run):
    """A run with its cells.

    Attributes:
        cells: the number of its cells in each state.
    """

    cells: dict[State, int]


class Runs(Page):
    """A page of runs."""

    runs: list[Run]


class CellState(BaseModel):
    """A cell in a run; fields are null until it has a result.

    Attributes:
        extra: the project's own axes.
        tests: the number of tests with each outcome.
    """

    cell: str
    python: str
    transformers: str
    torch: str
    flash_attention: str
    device: str
    extra: dict[str, str]
    run: str
    state: State
    kind: Kind | None
    reason: str
    started: datetime | None
    seconds: float | None
    attempt: int | None
    tests: dict[Outcome, int] | None

    @classmethod
    def of(cls, cell: Cell, run: str, summary: Summary) -> CellState:
        """The model of a cell in a run."""
        there = summary.verdict is not None
        return cls(
            cell=cell.name,
            **{axis: getattr(cell, axis) for axis in AXES},
            extra=dict(cell.extra),
            run=run,
            state=summary.state,
            kind=summary.kind,
            reason=clean(summary.reason),
            started=summary.started,
            seconds=finite(summary.seconds) if there else None,
            attempt=summary.attempt if there else None,
            tests=dict(summary.counts.items()) if there else None,
        )


class Cells(Page):
    """A page of cells."""

    cells: list[CellState]


class TestOutcome(BaseModel):
    """The outcome of a test."""

    name: str
    outcome: Outcome
    seconds: float | None
    message: str


class Figure(BaseModel):
    """A number that a test measured."""

    test: str
    name: str
    value: float | None
    unit: str
    better: Better | None


class Result(BaseModel):
    """The whole result of a cell, without its log."""

    cell: str
    run: str
    verdict: Ended
    kind: Kind | None
    reason: str
    started: datetime
    seconds: float | None
    attempt: int
    command: list[str]
    pins: str
    environment: dict[str, JsonValue]
    tests: list[TestOutcome]
    figures: list[Figure]

    @classmethod
    def of(cls, run: str, found: CellResult) -> Result:
        """The model of a result."""
        return cls(
            cell=found.cell.name,
            run=run,
            verdict=found.verdict,
            kind=found.kind,
            reason=clean(found.reason),
            started=found.started,
            seconds=finite(found.seconds),
            attempt=found.attempt,
            command=[clean(word) for word in found.command],
            pins=clean(found.pins),
            environment={clean(str(name)): plain(value) for name, value in found.environment.items()},
            tests=[
                TestOutcome(
                    name=clean(test.nodeid),
                    outcome=test.outcome,
                    seconds=finite(test.seconds),
                    message=clean(test.message),
                )
                for test in found.tests
            ],
            figures=[
                Figure(
                    test=clean(test.nodeid),
                    name=clean(figure.name),
                    value=finite(figure.value),
                    unit=clean(figure.unit),
                    better=figure.better,
                )
                for test in found.tests
                for figure in test.figures
            ],
        )


class ChangedState(BaseModel):
    """The state of a cell in one of two runs."""

    state: State
    kind: Kind | None
    reason: str


class CellChange(BaseModel):
    """A cell before and after; null if the run doesn't have it."""

    cell: str
    old: ChangedState | None
    new: ChangedState | None


class FigureChange(BaseModel):
    """A figure that changed, with its usual value and where the next value was expected."""

    cell: str
    name: str
    value: float
    unit: str
    better: Better | None
    usual: float | None
    low: float | None
    high: float | None


class Changes(BaseModel):
    """The changes from one run to another.

    Attributes:
        broke, mended, changed, gone, appeared: cells that failed after passing, passed after failing, failed in a different
            way, and ended only in the old or only in the new run.
        tests_broke, tests_mended: by cell, for the cells that failed both times.
        figures: figures beyond the noise of the runs up to the old one.
    """

    old: Run
    new: Run
    broke: list[CellChange]
    mended: list[CellChange]
    changed: list[CellChange]
    gone: list[CellChange]
    appeared: list[CellChange]
    tests_broke: dict[str, list[str]]
    tests_mended: dict[str, list[str]]
    figures: list[FigureChange]

    @classmethod
    def of(cls, old: StoredRun, new: StoredRun, found: Diff) -> Changes:
        """The model of a comparison of two runs."""
        return cls(
            old=Run.of(old),
            new=Run.of(new),
            broke=_changes(found.broke),
            mended=_changes(found.mended),
            changed=_changes(found.changed),
            gone=_changes(found.gone),
            appeared=_changes(found.new),
            tests_broke=_tests(found.tests_broke),
            tests_mended=_tests(found.tests_mended),
            figures=[
                FigureChange(
                    cell=cell.name,
                    name=clean(figure.name),
                    value=figure.value,
                    unit=clean(figure.unit),
                    better=figure.better,
                    usual=finite(noise.usual),
                    low=finite(noise.low),
                    high=finite(noise.high),
                )
                for cell, figure, noise in found.figures
            ],
        )


class Atlas(BaseModel):
    """The seams of the scanned releases, as ``kernel-compat-matrix atlas --check --json`` prints them."""

    made: datetime
    atlas: dict[str, JsonValue]


def _changes(found: Sequence[Change]) -> list[CellChange]:
    return [CellChange(cell=one.cell.name, old=_state(one.old), new=_state(one.new)) for one in found]


def _tests(found: Mapping[Cell, Sequence[str]]) -> dict[str, list[str]]:
    return {cell.name: [clean(test) for test in tests] for cell, tests in found.items()}


def _state(summary: Summary | None) -> ChangedState | None:
    return summary and ChangedState(state=summary.state, kind=summary.kind, reason=clean(summary.reason))


def plain(value: Any, depth: int = 20) -> JsonValue:
    """Output of a cell, without characters that JSON or UTF-8 can't represent."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, float):
        return finite(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if depth and isinstance(value, Mapping):
        return {clean(str(key)): plain(inner, depth - 1) for key, inner in value.items()}
    if depth and isinstance(value, (list, tuple)):
        return [plain(inner, depth - 1) for inner in value]
    return "..."


def finite(value: float) -> float | None:
    """The number; None if JSON can't represent it."""
    return value if math.isfinite(value) else None
