"""The request for a run, and the response to it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from ..cells import LONGEST, NAME

CellName = Annotated[str, StringConstraints(pattern=f"^{NAME}$", max_length=LONGEST)]


class Submission(BaseModel):
    """A request to create a run of cells of the served axes.

    Attributes:
        only: an expression, such as ``device==cpu and torch==2.15``.
        cells: the names of the cells.
        all: every cell; needed if neither `only` nor `cells` selects any.
        suite: the name of the tests in the axes file.
        label: a name for the run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    only: Annotated[str, StringConstraints(min_length=1, max_length=2_000)] | None = None
    cells: Annotated[list[CellName], Field(max_length=20_000)] = []
    all: bool = False
    suite: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,60}$")] = "default"
    label: Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{0,100}$")] = ""


class Submitted(BaseModel):
    """A run that waits for its execution, with the number of its cells and of its excluded cells."""

    run: str
    cells: int
    excluded: int


class Merged(BaseModel):
    """The runs of a store that were copied; none if all of them were there already."""

    merged: list[str]
