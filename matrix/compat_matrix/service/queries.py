"""Queries of the service beyond the store's own methods: its version, pages of lists, and what broke."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, func, select

from .. import __version__
from ..cells import Cell
from ..store import Past, Run, Store, Summary
from ..store import queries as stored
from ..store.models import CELL, DOCUMENT, NEWEST, PLANNED, RESULT, RUN

#: The number of recent results that are counted, to notice one that was committed after a later one.
_RECENT = 1000


def version(store: Store) -> str:
    """A version token of a store: differs after every change that the pages and the API can show. Takes about a millisecond.

    Rows are counted besides their newest ids: PostgreSQL may commit them in another order, and ids of deleted ones are used again.
    """
    with store.reading() as connection:
        row = connection.execute(_version()).one()
    return hashlib.sha256(f"{__version__} {tuple(row)}".encode()).hexdigest()[:24]


@cache
def _version() -> Select[Any]:
    newest = select(func.max(RESULT.c.id)).scalar_subquery()
    recent = select(func.count()).select_from(RESULT).where(RESULT.c.id > newest - _RECENT).scalar_subquery()
    documents = select(func.max(DOCUMENT.c.id)).scalar_subquery()
    latest = select(RUN.c.id).order_by(*stored.NEWEST_FIRST).limit(1).scalar_subquery()
    planned = select(func.count()).select_from(PLANNED).where(PLANNED.c.run_id == latest).scalar_subquery()
    runs = (func.count(), func.count(RUN.c.finished), func.max(RUN.c.name), func.max(RUN.c.finished))
    return select(newest, recent, documents, planned, *runs).select_from(RUN)


def cells(store: Store, axes: Mapping[str, str] = {}) -> list[Cell]:
    """Every cell that a run has planned, or those with the given values of axes."""
    query = select(*stored.CELL_FIELDS).where(*_on(axes)).order_by(CELL.c.id)
    with store.reading() as connection:
        return [stored.cell_of(row) for row in connection.execute(query)]


def unfinished(store: Store) -> list[tuple[Cell, Run]]:
    """The cells without a result in unfinished whole runs that no newer run has; those of the newest run first."""
    with store.reading() as connection:
        rows = connection.execute(_unfinished()).all()
    return [(stored.cell_of(row), stored.past_of(row).run) for row in rows]


@cache
def _unfinished() -> Select[Any]:
    query = stored.summary(*stored.RUN_FIELDS).order_by(*stored.NEWEST_FIRST)
    query = query.where(RUN.c.state == "running", RUN.c.partial.is_(False), RESULT.c.id.is_(None))
    query = query.join(NEWEST, NEWEST.c.cell_id == PLANNED.c.cell_id).where(NEWEST.c.run_id <= RUN.c.id)
    return query.where(PLANNED.c.excluded.is_(None))


def run_page(
    store: Store, limit: int, after: tuple[datetime, str] | None, where: Mapping[str, str | bool | None]
) -> list[Run]:
    """Runs, newest first, after the run with the given start and id."""
    query = select(*stored.RUN_FIELDS).order_by(*stored.NEWEST_FIRST).limit(limit)
    query = query.where(*(RUN.c[name] == value for name, value in where.items() if value is not None))
    if after is not None:
        last = RUN.alias()
        query = query.where(RUN.c.id < select(last.c.id).where(last.c.name == after[1]).scalar_subquery())
    with store.reading() as connection:
        return [Run(*row) for row in connection.execute(query)]


def cell_page(
    store: Store,
    run: str,
    limit: int,
    after: int,
    axes: Mapping[str, str],
    state: str | None = None,
    kind: str | None = None,
) -> list[tuple[int, Cell, Summary]]:
    """Cells of a run in order, each with its position, after a position."""
    every = enumerate(store.summary(run).items())
    found = [
        (position, cell, summary)
        for position, (cell, summary) in every
        if position > after
        and all(getattr(cell, axis) == value for axis, value in axes.items())
        and state in (None, summary.state)
        and kind in (None, summary.kind)
    ]
    return found[:limit]


def result_key(store: Store, run: str, cell: Cell, attempt: int | None) -> int | None:
    """The key of a result, which never changes; None if there is no such result."""
    with store.reading() as connection:
        found: int | None = connection.scalar(stored.of_cell(select(RESULT.c.id), run, cell, attempt))
    return found


class Breakage(NamedTuple):
    """A cell that failed after it had passed, both in whole runs."""

    cell: Cell
    now: Past
    before: str


def broke(store: Store, limit: int) -> list[Breakage]:
    """The latest breakages, newest first."""
    order = RUN.c.id
    ends = (
        stored.latest(
            select(
                RESULT.c.id,
                RESULT.c.verdict,
                func.lag(RESULT.c.verdict).over(partition_by=RESULT.c.cell_id, order_by=order).label("before"),
                func.lag(RUN.c.name).over(partition_by=RESULT.c.cell_id, order_by=order).label("run_before"),
            )
        )
        .where(stored.HAS_ENDED, RUN.c.partial.is_(False))
        .subquery()
    )
    query: Select[Any] = stored.summary(ends.c.run_before, *stored.RUN_FIELDS).join(ends, ends.c.id == RESULT.c.id)
    query = query.where(ends.c.verdict == "failed", ends.c.before != "failed")
    query = query.order_by(*stored.NEWEST_FIRST, RESULT.c.id.desc()).limit(limit)
    with store.reading() as connection:
        rows = connection.execute(query).all()
    return [Breakage(stored.cell_of(row), stored.past_of(row), row[stored.SUMMARY]) for row in rows]


def _on(axes: Mapping[str, str]) -> Iterator[ColumnElement[bool]]:
    return (CELL.c[axis] == value for axis, value in axes.items())
