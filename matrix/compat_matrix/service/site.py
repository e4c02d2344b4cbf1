"""What pages and the API share: the version of what they show, its runs and cells by name, and the runs that are submitted."""

import argparse
import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy import bindparam, func, select, update
from starlette.exceptions import HTTPException

from .. import jobs, runner
from ..axes import Axes
from ..cells import Cell, parse_own, values_of
from ..errors import MatrixError
from ..fingerprint import of_axes
from ..pages import ask
from ..pages.render import NAME
from ..store import Past, Run, Store, inserts, submissions
from ..store import queries as stored
from ..store.models import CELL, DOCUMENT, PLANNED, RESULT, RUN, SUBMISSION
from ..unpack import sha256
from ..views import explain
from ..views.common import one_line
from ..views.rules import Rules
from ..views.verdicts import Answer, Judge
from .submission import Submission, Submitted, for_suite

#: The number of recent results that are counted, to notice one that was committed after a later one.
_RECENT = 1000


class Site:
    """The store and the axes of a service. Thread-safe. What isn't there is a 404.

    Args:
        axes: their cells are shown also before they have run; None to show only the store.
        options: those of `serve`; None if pins aren't checked when a run is submitted.
        runs: whether runs can be submitted.
    """

    def __init__(
        self, store: Store, axes: Axes | None, options: argparse.Namespace | None = None, *, runs: bool = True
    ) -> None:
        self.store, self.served_project = store, axes.project_name if axes else ""
        self.project = self.served_project or NAME
        self.served: Mapping[Cell, str] = axes.all_cells if axes else {}
        self._rules = Rules.of(axes) if axes else None
        self._axes, self._options = axes if runs else None, options
        # The same in all processes of a service that have read the same axes.
        name = (options and options.part_of) or secrets.token_hex(4)
        self._name = f"{name}{sha256(axes.path) if axes else ''}"

    # What is shown.

    def tag(self, user: str = "", *, logs: bool = False) -> str:
        """A version of everything that is shown: differs after every change. Another service has another one.

        Args:
            user: the name of the token of the person who is signed in.
            logs: the ends of the logs of running cells are shown, too.
        """
        with self.store.reading() as connection:
            version, rows = connection.execute(_VERSION).one(), connection.execute(_RUNNING).all()
        running = [(*row[:-1], row.running if logs else [*json.loads(row.running)]) for row in rows]
        shown = (self._name, user, *version, *running)
        return hashlib.sha256(repr(shown).encode()).hexdigest()[:24]

    def run(self, name: str) -> Run:
        """The run with this id, or else the one that `Store.resolve` finds."""
        found = self.store.runs(1, name=name)
        return found[0] if found else self.store.run(self.store.resolve(name))

    def cell(self, name: str) -> Cell:
        """The cell of this name in the store or in the axes."""
        for row in self.store.rows(_CELL, cell=name):
            return stored.cell_of(row)
        if found := next((one for one in self.served if one.name == name), None):
            return found
        raise HTTPException(404, f"There is no cell {one_line(name, 200)!r}: no run has planned it.")

    def result(self, name: str, run: str = "", attempt: int | None = None) -> tuple[Cell, Past]:
        """A cell and its result, as `explain.past_of` finds it."""
        cell = self.cell(name)
        past = explain.past_of(self.store, cell, self.run(run).id if run else "", attempt)
        if past is None:
            raise HTTPException(404, f"There is no such result of {cell}.")
        return cell, past

    def answer(self, asked: Mapping[str, str], limit: int = 5, newest: Sequence[Past] | None = None) -> Answer:
        """The verdict on a combination, with the whole evidence; `newest` as `Judge` takes it."""
        return Judge(self.store, self._rules, newest)(asked, limit).detailed(self.store)

    def own_axes(self) -> dict[str, str]:
        """The project's own axes, each with one of its values."""
        rows = self.store.rows(_OWN)
        planned = {axis: value for row in rows for axis, value in parse_own(row.extra)}
        return planned | ask.own_axes(self.served)

    # What is run.

    @cached_property
    def axes(self) -> Mapping[str, Sequence[str]]:
        """The axes of the cells that can be run, each with its values."""
        return values_of(self.served)

    @property
    def jobs(self) -> int | None:
        """The number of cells that run at a time; None if a cluster decides."""
        options = self._options
        return None if options is None or options.ray is not None else options.jobs or os.cpu_count()

    @property
    def suites(self) -> list[str]:
        """The suites that can be run; none if nothing can."""
        return sorted({tests.suite for tests in self._axes.tests}) if self._axes else []

    def selected(self, wanted: Submission) -> tuple[list[Cell], dict[Cell, str]]:
        """The cells that a run would have, and the excluded ones with the reasons.

        Raises:
            MatrixError: it selects no cells or unknown ones, a cell has no tests or no pins, or nothing is run here.
        """
        axes = self._runnable()
        if wanted.all == bool(wanted.cells or wanted.only):
            every = f'"all": true selects every one that {axes.path.name} has ({len(axes.cells):,})'
            raise MatrixError(f'"only" and "cells" select cells, or else {every}')
        cells = axes.select(wanted.only, wanted.cells)
        self._check(axes, cells, wanted.suite)
        return cells, {} if wanted.cells else axes.excluded(wanted.only)

    def submit(self, wanted: Submission, once: str = "") -> Submitted:
        """Create a run of cells of the axes, which waits for this service or another one on the same database.

        Args:
            once: hexadecimal digits; if there is a run that was submitted with them, it is the result.

        Raises:
            MatrixError: as `selected`.
        """
        cells, excluded = self.selected(wanted)
        axes = self._runnable()
        options = argparse.Namespace(words=wanted.words, suite=wanted.suite, pytest=[])
        waits = {"suite": wanted.suite, "fingerprint": of_axes(axes)}
        more = {"excluded": excluded, "label": wanted.label, "submission": waits, "once": once}
        name = jobs.new_run(options, self.store, axes, cells, **more)
        return Submitted(run=name, cells=len(cells), excluded=len(excluded))

    def retry(self, run: str) -> Submitted:
        """Run the failed and the unfinished cells of a run that has ended.

        Raises:
            StateError: it hasn't ended, all its cells passed, or it tested something else than this service would.
            MatrixError: it doesn't exist, or a cell can't be run here.
        """
        axes, found = self._runnable(), self.store.run(run)
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
            if not connection.execute(begin).rowcount:
                raise submissions.StateError(f"the run {run} hasn't ended: cancel it first")
            inserts.submit(connection, key, found.suite, tested, again)
        return Submitted(run=run, cells=len(cells), excluded=0)

    def _runnable(self) -> Axes:
        if self._axes is None:
            raise MatrixError("this service runs no cells: it was started with --no-run or without an axes file")
        return self._axes

    def _check(self, axes: Axes, cells: Sequence[Cell], suite: str) -> None:
        """Check that each cell has its tests and its pins."""
        if without := next((cell for cell in cells if axes.tests_of(cell, suite) is None), None):
            raise MatrixError(f"{axes.path.name} has no tests for {without} in the suite {suite!r}")
        if self._options is not None:
            jobs.jobs_of(for_suite(self._options, suite), axes, cells, {})


_CELL = select(*stored.CELL_FIELDS).where(CELL.c.name == bindparam("cell"))
_OWN = select(CELL.c.extra).distinct()
_newest = select(func.max(RESULT.c.id)).scalar_subquery()
_latest = select(RUN.c.id).order_by(*stored.NEWEST_FIRST).limit(1).scalar_subquery()
#: Rows are counted besides their newest ids: PostgreSQL may commit them in another order, and ids of deleted ones are used again.
_VERSION = select(
    _newest,
    select(func.count()).select_from(RESULT).where(RESULT.c.id > _newest - _RECENT).scalar_subquery(),
    select(func.max(DOCUMENT.c.id)).scalar_subquery(),
    select(func.count()).select_from(PLANNED).where(PLANNED.c.run_id == _latest).scalar_subquery(),
    *(func.count(), func.count(RUN.c.finished), func.max(RUN.c.name), func.max(RUN.c.finished)),
).select_from(RUN)
_RUNNING = select(SUBMISSION.c.run_id, SUBMISSION.c.host, SUBMISSION.c.reason, SUBMISSION.c.running).order_by("run_id")


def _unless_known(request: Request, *, logs: bool) -> Site:
    site: Site = request.app.state.site
    token = getattr(request.state, "token", None)
    tag = request.state.tag = site.tag(token.name if token else "", logs=logs)
    if request.query_params.get("live") == tag:
        raise HTTPException(204)
    if tag in re.findall(r'"([^"]*)"', request.headers.get("if-none-match", "")):
        raise HTTPException(304)
    return site


def current(request: Request) -> Site:
    """The data for a response, unless the client has its current version, which costs a millisecond and is a 204 or a 304."""
    return _unless_known(request, logs=False)


def followed(request: Request) -> Site:
    """As `current`, for a page with the ends of the logs of running cells."""
    return _unless_known(request, logs=True)


Current = Annotated[Site, Depends(current)]
Followed = Annotated[Site, Depends(followed)]
