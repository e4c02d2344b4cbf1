"""The runs that clients submit: the requests, and the responses to them. `executing` executes them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from sqlalchemy import update

from .. import jobs, runner
from ..axes import Axes
from ..cells import LONGEST, NAME, Cell
from ..errors import MatrixError
from ..fingerprint import of_axes
from ..store import Store, inserts, submissions
from ..store.models import RUN

CellName = Annotated[str, StringConstraints(pattern=f"^{NAME}$", max_length=LONGEST)]


class Submission(BaseModel):
    """A request to create a run of cells of the served axes: of `only`, of `cells`, or of all."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

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


class Queue:
    """The runs of a store that wait for this service or another one on the same database. Thread-safe.

    Args:
        axes: the axes whose cells can be run; None if the service runs none.
        options: those of `serve`; None if pins aren't checked.
    """

    def __init__(self, store: Store, axes: Axes | None, options: argparse.Namespace | None = None) -> None:
        self.store, self.axes, self._options = store, axes, options

    @property
    def suites(self) -> list[str]:
        """The suites that can be run."""
        return sorted({tests.suite for tests in self.axes.tests}) if self.axes else []

    def submit(self, wanted: Submission) -> Submitted:
        """Create a run of cells of the axes.

        Raises:
            MatrixError: it selects no cells or unknown ones, a cell has no tests or no pins, or nothing is run here.
        """
        axes = self._axes()
        if not (wanted.cells or wanted.only or wanted.all):
            raise MatrixError(
                f'no cells are selected: "all": true selects every one that {axes.path.name} has ({len(axes.cells):,})'
            )
        if wanted.all and (wanted.cells or wanted.only):
            raise MatrixError('"all" can\'t be combined with a selection of cells')
        cells = axes.select(wanted.only, wanted.cells)
        excluded = {} if wanted.cells else axes.excluded(wanted.only)
        self._check(axes, cells, wanted.suite)
        options = argparse.Namespace(words=wanted.words, suite=wanted.suite, pytest=[])
        submission = {"suite": wanted.suite, "fingerprint": of_axes(axes)}
        more = {"excluded": excluded, "label": wanted.label, "submission": submission}
        name = jobs.new_run(options, self.store, axes, cells, **more)
        return Submitted(run=name, cells=len(cells), excluded=len(excluded))

    def retry(self, run: str) -> Submitted:
        """Run the failed and the unfinished cells of a run that has ended.

        Raises:
            StateError: it hasn't ended, all its cells passed, or it tested something else than this service would.
            MatrixError: it doesn't exist, or a cell can't be run here.
        """
        axes, found = self._axes(), self.store.run(run)
        if found.revision != (here := jobs.revision(axes.folder)):
            raise submissions.StateError(f"the run {run} tested {found.revision or 'no commit'}, and here is {here}")
        if other := next((one for one in ("--pytest", "--latest") if one in found.command), None):
            raise submissions.StateError(f"the run {run} was made with {other}: resume it with the command line")
        again = runner.failed(self.store, run)
        cells, _ = runner.left(self.store, run, axes, again)
        if not cells:
            raise submissions.StateError(f"the run {run} has no cell that failed or is unfinished")
        self._check(axes, cells, found.suite)
        tested = of_axes(axes)
        with self.store.writing() as connection:
            key = inserts.key(connection, run)
            begin = update(RUN).where(RUN.c.id == key, RUN.c.state != "running").values(state="running", finished=None)
            taken = connection.execute(begin).rowcount
            if taken:
                inserts.submit(connection, key, found.suite, tested, again)
        if not taken:
            raise submissions.StateError(f"the run {run} hasn't ended: cancel it first")
        return Submitted(run=run, cells=len(cells), excluded=0)

    def _axes(self) -> Axes:
        if self.axes is None:
            raise MatrixError("this service runs no cells: it was started with --no-run or without an axes file")
        return self.axes

    def _check(self, axes: Axes, cells: Sequence[Cell], suite: str) -> None:
        """Check that each cell has its tests and its pins."""
        if without := next((cell for cell in cells if axes.tests_of(cell, suite) is None), None):
            raise MatrixError(f"{axes.path.name} has no tests for {without} in the suite {suite!r}")
        if self._options is not None:
            jobs.jobs_of(for_suite(self._options, suite), axes, cells, {})


def for_suite(options: argparse.Namespace, suite: str) -> argparse.Namespace:
    """The options of a service for `jobs_of`."""
    return argparse.Namespace(**{**vars(options), "suite": suite, "latest": False, "pytest": []})
