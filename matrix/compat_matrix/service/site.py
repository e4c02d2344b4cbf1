"""The data that pages and the API share: the version of what they show, and its runs and cells by name."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from fastapi import Depends, Request
from sqlalchemy import Select, func, select
from starlette.exceptions import HTTPException

from ..axes import Axes
from ..cells import Cell, parse_own
from ..errors import MatrixError
from ..pages import ask, logs
from ..pages.render import project_name
from ..store import Past, Run, Store
from ..store import queries as stored
from ..store.models import CELL, DOCUMENT, PLANNED, RESULT, RUN, SUBMISSION
from ..views import explain
from ..views.common import one_line
from .submission import Queue

#: The number of recent results that are counted, to notice one that was committed after a later one.
_RECENT = 1000


class Site:
    """The data of a service. The cells of its axes are shown also before they have run; what isn't there is a 404."""

    def __init__(self, store: Store, queue: Queue, axes: Axes | None) -> None:
        self.store, self.queue, self.project = store, queue, project_name(axes)
        self.served: Mapping[Cell, str] = axes.all_cells if axes else {}
        self._name = secrets.token_hex(4)

    def tag(self) -> str:
        """A version of everything that is shown: differs after every change. Another service has another one."""
        running = select(SUBMISSION.c.run_id, SUBMISSION.c.host, SUBMISSION.c.running, SUBMISSION.c.reason)
        with self.store.reading() as connection:
            shown = (self._name, *connection.execute(_VERSION).one(), *connection.execute(running.order_by("run_id")))
        return hashlib.sha256(repr(shown).encode()).hexdigest()[:24]

    def run(self, name: str) -> Run:
        """The run with this id, or else the one that `Store.resolve` finds."""
        if found := self.store.runs(1, name=name):
            return found[0]
        try:
            return self.store.run(self.store.resolve(name))
        except MatrixError as error:
            if error.__cause__ is not None:  # the database doesn't answer
                raise
        said = f"There is no run {one_line(name, 100)!r}: a run has an id, a label, or is latest or latest~1."
        raise HTTPException(404, said)

    def cell(self, name: str) -> Cell:
        """The cell of this name in the store or in the axes."""
        for row in self.store.rows(select(*stored.CELL_FIELDS).where(CELL.c.name == name)):
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

    def log(self, cell: Cell, past: Past) -> Iterator[bytes]:
        """The log of a result as text, in pieces."""
        packed = logs.packed_log(self.store, past.run.id, cell, past.summary.attempt)
        if packed is None:
            raise HTTPException(404, f"{cell} has no log in {past.run.id}.")
        return logs.plain(packed)

    def own_axes(self) -> dict[str, str]:
        """The project's own axes, each with one of its values."""
        rows = self.store.rows(select(CELL.c.extra).distinct())
        planned = {axis: value for row in rows for axis, value in parse_own(row.extra)}
        return planned | ask.own_axes(self.served)


def _version() -> Select[Any]:
    """Rows are counted besides their newest ids: PostgreSQL may commit them in another order, and ids of deleted ones are used again."""
    newest = select(func.max(RESULT.c.id)).scalar_subquery()
    recent = select(func.count()).select_from(RESULT).where(RESULT.c.id > newest - _RECENT).scalar_subquery()
    documents = select(func.max(DOCUMENT.c.id)).scalar_subquery()
    latest = select(RUN.c.id).order_by(*stored.NEWEST_FIRST).limit(1).scalar_subquery()
    planned = select(func.count()).select_from(PLANNED).where(PLANNED.c.run_id == latest).scalar_subquery()
    runs = (func.count(), func.count(RUN.c.finished), func.max(RUN.c.name), func.max(RUN.c.finished))
    return select(newest, recent, documents, planned, *runs).select_from(RUN)


_VERSION = _version()


def current(request: Request) -> Site:
    """The data for a response, unless the client has its current version, which costs a millisecond and is a 204 or a 304."""
    site: Site = request.app.state.site
    tag = request.state.tag = site.tag()
    if request.query_params.get("live") == tag:
        raise HTTPException(204)
    if tag in re.findall(r'"([^"]*)"', request.headers.get("if-none-match", "")):
        raise HTTPException(304)
    return site


Current = Annotated[Site, Depends(current)]
