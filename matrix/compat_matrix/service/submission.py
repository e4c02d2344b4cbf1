"""The runs that clients submit: the requests, and the responses to them. `executing` executes them."""

import argparse
from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints

from ..cells import LONGEST, NAME

CellName = Annotated[str, StringConstraints(pattern=f"^{NAME}$", max_length=LONGEST)]


class Submission(BaseModel, extra="forbid", frozen=True, strict=True):
    """A request to create a run of cells of the served axes: of `only`, of `cells`, or of all."""

    only: Annotated[str, StringConstraints(min_length=1, max_length=2_000)] | None = None
    cells: Annotated[list[CellName], Field(max_length=20_000)] = []
    all: bool = False
    suite: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,60}$")] = "default"
    label: Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{0,100}$")] = ""

    @property
    def words(self) -> list[str]:
        """The command that would run the same cells."""
        words = ["run", *self.cells, *([f"--only={self.only}"] if self.only else []), *["--all"] * self.all]
        return words + ([f"--suite={self.suite}"] if self.suite != "default" else [])


class Submitted(BaseModel):
    """A run that waits for its execution, with the number of its cells and of its excluded cells."""

    run: str
    cells: int
    excluded: int


def for_suite(options: argparse.Namespace, suite: str) -> argparse.Namespace:
    """The options of a service for `jobs_of`."""
    return argparse.Namespace(**{**vars(options), "suite": suite, "latest": False, "pytest": []})
