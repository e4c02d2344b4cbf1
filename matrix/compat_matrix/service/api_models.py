"""The response models of the reading API, as in its OpenAPI document. They are made of the store's and the views' own values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from ..results import Better, Kind, Outcome
from ..results import Verdict as Ended
from ..store import State
from ..views.common import clean


def plain(value: Any, depth: int = 20) -> Any:
    """Output of a cell, without characters and numbers that JSON or UTF-8 can't represent."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth and isinstance(value, Mapping):
        return {clean(str(key)): plain(inner, depth - 1) for key, inner in value.items()}
    if depth and isinstance(value, (list, tuple)):
        return [plain(inner, depth - 1) for inner in value]
    return value if value is None or isinstance(value, (bool, int)) else "..."


Text = Annotated[str, BeforeValidator(lambda value: clean(str(value)))]
Number = Annotated[float | None, BeforeValidator(plain)]
Object = Annotated[dict[str, JsonValue], BeforeValidator(plain)]


class Model(BaseModel):
    """Made of an object's attributes."""

    model_config = ConfigDict(from_attributes=True)


class Error(Model):
    """The reason for an error."""

    detail: Any


class Run(Model):
    """A run."""

    id: str
    started: datetime
    finished: datetime | None
    state: Text
    label: Text
    command: Text
    host: Text
    revision: Text
    partial: bool


class WholeRun(Run):
    """A run with the number of its cells in each state."""

    cells: dict[State, int]


class Page(Model):
    """A page of a list; `next` is the `cursor` of the next page, and null on the last page."""

    next: str | None


class Runs(Page):
    """A page of runs."""

    runs: list[Run]


class CellState(Model):
    """A cell in a run, with the project's own axes in `extra`; fields are null until it has a result."""

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
    reason: Text
    started: datetime | None
    seconds: Number
    attempt: int | None
    tests: dict[Outcome, int] | None


class Cells(Page):
    """A page of cells."""

    cells: list[CellState]


class TestOutcome(Model):
    """The outcome of a test."""

    name: Text = Field(validation_alias="nodeid")
    outcome: Outcome
    seconds: Number
    message: Text


class Figure(Model):
    """A number that a test measured."""

    test: Text
    name: Text
    value: Number
    unit: Text
    better: Better | None


class Result(Model):
    """The whole result of a cell, without its log."""

    cell: Text
    run: str
    verdict: Ended
    kind: Kind | None
    reason: Text
    started: datetime
    seconds: Number
    attempt: int
    command: list[Text]
    pins: Text
    environment: Object
    tests: list[TestOutcome]
    figures: list[Figure]


class ChangedState(Model):
    """The state of a cell in one of two runs."""

    state: State
    kind: Kind | None
    reason: Text


class CellChange(Model):
    """A cell before and after; null if the run doesn't have it."""

    cell: Text
    old: ChangedState | None
    new: ChangedState | None


class FigureChange(Model):
    """A figure that changed, with its usual value and where the next value was expected."""

    cell: Text
    name: Text
    value: Number
    unit: Text
    better: Better | None
    usual: Number
    low: Number
    high: Number


class Changes(Model):
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
    tests_broke: dict[Text, list[Text]]
    tests_mended: dict[Text, list[Text]]
    figures: list[FigureChange]


class Atlas(Model):
    """The seams of the scanned releases, as ``kernel-compat-matrix atlas --check --json`` prints them."""

    made: datetime
    atlas: Object
