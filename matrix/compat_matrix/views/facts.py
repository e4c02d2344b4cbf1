"""The facts of a store as models: `--json` prints them, the API returns them, and the templates read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, InstanceOf, JsonValue, PlainSerializer, TypeAdapter, computed_field

from ..cells import AXES, Cell, spelled
from ..results import CellResult, Figure, Kind, Outcome, Output
from ..store import Past, Run, State, Summary
from ..words import clean

T = TypeVar("T", bound="CellState")


def plain(value: Any, depth: int = 20) -> Any:
    """Output of a cell, without characters that JSON or UTF-8 can't represent."""
    if isinstance(value, str):
        return clean(value)
    if depth and isinstance(value, Mapping):
        return {clean(str(key)): plain(inner, depth - 1) for key, inner in value.items()}
    if depth and isinstance(value, (list, tuple)):
        return [plain(inner, depth - 1) for inner in value]
    return value if value is None or isinstance(value, (int, float)) else "..."


Object = Annotated[Mapping[str, Any], PlainSerializer(plain, return_type=dict[str, JsonValue])]
#: A cell, whose name is in the JSON.
NamedCell = Annotated[Cell, PlainSerializer(lambda cell: clean(cell.name), return_type=str)]


#: The name of an axis, in JSON as people write it.
Axis = Annotated[str, PlainSerializer(spelled, return_type=str)]
#: Values by axis, in JSON also by the names that people write.
ByAxis = Annotated[
    dict[str, str | None],
    PlainSerializer(
        lambda values: values | {"flash-attn": values.get("flash_attention")},
        return_type=dict[str, str | None],
    ),
]


class Model(BaseModel, from_attributes=True):
    """Made of an object's attributes, or of values by name."""


@dataclass(frozen=True, kw_only=True)
class WholeRun(Run):
    """A run with the number of its cells in each state."""

    cells: dict[State, int]


class Shim(Model):
    """A shim in a tested cell, with the seams that it changes."""

    name: Output
    state: Output
    reason: Output
    seams: list[Output] = Field(exclude=True)


class CellState(Model):
    """A cell in a run, with the project's own axes in `extra`; fields are null until it has a result.

    JSON has `flash_attention` as ``flash-attn``, too.
    """

    cell: NamedCell
    python: str
    transformers: str
    torch: str
    flash_attention: str
    device: str
    extra: dict[str, str]
    run: str
    state: State
    kind: Kind | None
    reason: Output
    started: datetime | None
    seconds: float | None
    attempt: int | None
    tests: dict[Outcome, int] | None

    @computed_field(alias="flash-attn")  # type: ignore[prop-decorator]
    @property
    def flash_attn(self) -> str:
        """As `flash_attention`."""
        return self.flash_attention

    @classmethod
    def of(cls: type[T], past: Past, **more: Any) -> T:
        """The state of a cell in a run; `more` are further fields, and others than those of cell and summary."""
        cell, run, summary, _ = past
        axes = {axis: getattr(cell, axis) for axis in AXES} | {"extra": dict(cell.extra)}
        values = {"cell": cell, "run": run.id, **summary._asdict(), "state": summary.state, "tests": summary.counts}
        nothing = {} if summary.verdict else dict.fromkeys(("seconds", "attempt", "tests"))
        return cls(**axes | values | nothing | more)


class MeasuredCell(CellState):
    """A cell in a run, with the figures of its tests."""

    figures: list[Figure]


class LostTests(Model):
    """The tests that ran in a cell's neighbour, the cell with the release before, and not in the cell, each with the reason."""

    cell: NamedCell
    neighbour: NamedCell
    tests: dict[Output, Output]


class ShownRun(Model):
    """A run with its parts, its cells, and the tests that ran on the release before and not on the next."""

    run: Run
    parts: list[Run]
    cells: list[MeasuredCell]
    lost: list[LostTests] = []


@dataclass(frozen=True, kw_only=True)
class TestFigure(Figure):
    """A figure and its test."""

    test: Output


@dataclass(frozen=True, kw_only=True)
class Result(CellResult):
    """The whole result of a cell, without its log."""

    cell: NamedCell
    run: str
    environment: Object
    figures: list[TestFigure]
    log: Annotated[str, Field(exclude=True)]

    @classmethod
    def of(cls, found: CellResult, run: str) -> Result:
        """The result of a cell in the run of an id."""
        figures = [TestFigure(**vars(one), test=test.nodeid) for test in found.tests for one in test.figures]
        return cls(**vars(found), run=run, figures=figures)


class ChangedState(Model):
    """The state of a cell in one of two runs."""

    state: State
    kind: Kind | None
    reason: Output


ChangedSummary = Annotated[
    InstanceOf[Summary] | None,
    PlainSerializer(lambda summary: summary and ChangedState.model_validate(summary), return_type=ChangedState | None),
]


class CellChange(Model):
    """A cell before and after; null if the run doesn't have it."""

    cell: NamedCell
    old: ChangedSummary
    new: ChangedSummary


@dataclass(frozen=True, kw_only=True)
class FigureChange(Figure):
    """A figure whose value is beyond the noise of earlier runs, with its usual value and where the next was expected."""

    cell: NamedCell
    usual: float
    low: float
    high: float


class Changes(Model):
    """The changes from one run to another. Cells that ended alike are left out.

    Attributes:
        broke: cells that didn't fail, and fail now.
        mended: cells that failed, were flaky or failed as known, and pass now.
        changed: cells that failed, and fail differently now; or that are flaky or fail as known now.
        appeared, gone: cells that ended in one of the runs only.
        tests_broke, tests_mended: for cells that failed in both runs, the tests that ran in both and failed in one.
        figures: figures beyond the noise of the runs up to the old one.
        figures_with_too_few_runs: the number of figures of which too few runs are there to know their noise.
    """

    old: Run
    new: Run
    broke: list[CellChange] = []
    mended: list[CellChange] = []
    changed: list[CellChange] = []
    appeared: list[CellChange] = []
    gone: list[CellChange] = []
    tests_broke: dict[NamedCell, list[Output]]
    tests_mended: dict[NamedCell, list[Output]]
    figures: list[FigureChange]
    figures_with_too_few_runs: int


class Page(Model):
    """`next` is the `cursor` of the next page, and null on the last page."""

    next: str | None


class Runs(Page):
    """A page of runs."""

    runs: list[Run]


class Cells(Page):
    """A page of cells."""

    cells: list[CellState]


class Atlas(Model):
    """The seams of the scanned releases, as ``kernel-compat-matrix atlas --check --json`` prints them."""

    made: datetime
    atlas: Object


class Error(Model):
    """The reason for an error."""

    detail: Any


def as_json(found: Any, indent: int | None = None) -> str:
    """A fact, or a list of facts, as JSON."""
    if isinstance(found, list):
        return f"[{','.join(as_json(one, indent) for one in found)}]"
    return TypeAdapter(type(found)).dump_json(found, indent=indent, by_alias=True).decode()
