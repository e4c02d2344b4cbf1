"""Queries of the API beyond the store's own methods: pages of lists, and lookups whose cost doesn't grow with the runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, case, func, select

from .. import __version__
from ..cells import Cell
from ..results import ENDED
from ..store import Past, Run, Store, Summary
from ..store import queries as stored
from ..store.inserts import chunks
from ..store.models import CELL, DOCUMENT, PLANNED, RESULT, RUN, TEXT

#: The number of recent results that are counted, to notice one that was committed after a later one.
_RECENT = 1000

_ENDED = RESULT.c.verdict.in_(ENDED)


def version(store: Store) -> str:
    """A version token of a store: differs after every change that the API can show. Takes about a millisecond.

    Only whole runs are deleted, which changes their number. PostgreSQL may commit rows in a different order than that of their ids, so recent ones are counted.
    """
    newest = select(func.max(RESULT.c.id)).scalar_subquery()
    recent = select(func.count()).select_from(RESULT).where(RESULT.c.id > newest - _RECENT).scalar_subquery()
    documents = select(func.max(DOCUMENT.c.id)).scalar_subquery()
    ended = func.count(RUN.c.finished)
    with store.reading() as connection:
        row = connection.execute(
            select(newest, recent, documents, func.count(), ended, func.max(RUN.c.name), func.max(RUN.c.finished))
        ).one()
        latest = select(RUN.c.id).order_by(*stored.NEWEST_FIRST).limit(1).scalar_subquery()
        planned = connection.scalar(select(func.count()).select_from(PLANNED).where(PLANNED.c.run_id == latest))
    return hashlib.sha256(f"{__version__} {tuple(row)} {planned}".encode()).hexdigest()[:24]


def cells(store: Store, axes: Mapping[str, str] = {}) -> list[Cell]:
    """Every cell that a run has planned, or those with the given values of axes."""
    query = select(*stored.CELL_FIELDS).where(*_on(axes)).order_by(CELL.c.id)
    with store.reading() as connection:
        return [stored.cell_of(row) for row in connection.execute(query)]


def newest(store: Store, wanted: Collection[Cell]) -> dict[Cell, Past]:
    """As `Store.current` for these cells, in a time that doesn't grow with the number of runs: the newest runs have most of them."""
    found: dict[Cell, Past] = {}
    with store.reading() as connection:
        keys: Mapping[int, Cell] = {}
        for names in chunks(cell.name for cell in wanted):
            rows = connection.execute(select(CELL.c.id, *stored.CELL_FIELDS).where(CELL.c.name.in_(names)))
            keys = {**keys, **{row[0]: stored.cell_of(row[1:]) for row in rows}}
        left = keys
        # A verdict of tests takes precedence over a missing GPU, and that over a plan.
        for rank, such in enumerate((_ENDED, RESULT.c.verdict.is_not(None), None)):
            has = left if such is None else _having(connection, left, such)
            found |= {keys[key]: past for key, past in _newest_past(connection, has, rank)}
            # Not the cells missing from `has`: a later attempt may have replaced such a result.
            left = {key: cell for key, cell in left.items() if cell not in found}
    return {cell: found[cell] for cell in sorted(found)}


def _having(connection: Connection, keys: Mapping[int, Cell], such: ColumnElement[bool]) -> dict[int, Cell]:
    """The cells that have a result matching the condition in a whole run."""
    there = select(RESULT.c.id).join(RUN, RUN.c.id == RESULT.c.run_id)
    there = there.where(RESULT.c.cell_id == CELL.c.id, such, RUN.c.partial.is_(False))
    found: dict[int, Cell] = {}
    for some in chunks(keys):
        query = select(CELL.c.id).where(CELL.c.id.in_(some), there.exists())
        found |= {key: keys[key] for key in connection.scalars(query)}
    return found


def _newest_past(connection: Connection, keys: Collection[int], worst: int) -> Iterator[tuple[int, Past]]:
    """The result of each cell in the newest whole run that has it; searches more and more runs until all cells are found.

    Args:
        worst: 0 for cells that ended, 1 also for cells that were not run, 2 also for cells that were only planned.
    """
    runs = select(RUN.c.id).where(RUN.c.partial.is_(False)).order_by(*stored.NEWEST_FIRST)
    rank = case((_ENDED, 0), (RESULT.c.verdict.is_not(None), 1), else_=2)
    left, begin, size = set(keys), 0, 4
    while left and (part := connection.scalars(runs.offset(begin).limit(size)).all()):
        begin, size = begin + size, size * 4
        best: dict[int, tuple[int, Past]] = {}
        for some in chunks(left):
            query = stored.summary(PLANNED.c.cell_id, RUN.c.id, *stored.RUN_FIELDS)
            query = query.where(PLANNED.c.run_id.in_(part), PLANNED.c.cell_id.in_(some), rank <= worst)
            for row in connection.execute(query):
                key, place = row[stored.SUMMARY], part.index(row[stored.SUMMARY + 1])
                if key not in best or place < best[key][0]:
                    best[key] = (place, stored.past_of(row))
        yield from ((key, past) for key, (_, past) in best.items())
        left -= best.keys()


def unfinished(store: Store) -> list[tuple[Cell, Run]]:
    """The cells without a result in unfinished whole runs, those of the newest run first."""
    query = stored.summary(*stored.RUN_FIELDS).order_by(*stored.NEWEST_FIRST)
    query = query.where(RUN.c.state == "running", RUN.c.partial.is_(False), RESULT.c.id.is_(None))
    with store.reading() as connection:
        rows = connection.execute(query.where(PLANNED.c.excluded.is_(None))).all()
    return [(stored.cell_of(row), stored.past_of(row).run) for row in rows]


class Evidence(NamedTuple):
    """The environment that a result reports, and its pins in case it died before reporting."""

    environment: Mapping[str, Any]
    pins: str


def earlier(store: Store, wanted: Collection[Cell]) -> list[tuple[Cell, Past]]:
    """The passed and failed results of these cells in whole runs; the newest of those with the same environment and pins."""
    same = (PLANNED.c.cell_id, RESULT.c.environment_id, RESULT.c.pins_id)
    number = func.row_number().over(partition_by=same, order_by=stored.NEWEST_FIRST).label("number")
    found = []
    with store.reading() as connection:
        for names in chunks(cell.name for cell in wanted):
            query = stored.summary(*stored.RUN_FIELDS, number)
            query = query.where(_ENDED, RUN.c.partial.is_(False), CELL.c.name.in_(names))
            every = query.subquery()
            columns = (column for column in every.c if column.name != "number")
            rows = connection.execute(select(*columns).where(every.c.number == 1))
            found += [(stored.cell_of(row), stored.past_of(row)) for row in rows]
    return found


def evidence(store: Store, of: Iterable[tuple[Cell, Past]]) -> dict[tuple[Cell, str], Evidence]:
    """The evidence of results, by cell and run."""
    environment, pins = TEXT.alias(), TEXT.alias()
    query = (
        select(*stored.CELL_FIELDS, environment.c.content, pins.c.content, RESULT.c.attempt)
        .select_from(RESULT)
        .join(RUN, RUN.c.id == RESULT.c.run_id)
        .join(CELL, CELL.c.id == RESULT.c.cell_id)
        .outerjoin(environment, environment.c.id == RESULT.c.environment_id)
        .outerjoin(pins, pins.c.id == RESULT.c.pins_id)
    )
    runs: dict[str, dict[str, int]] = {}
    for cell, past in of:
        runs.setdefault(past.run.id, {})[cell.name] = past.summary.attempt
    found = {}
    with store.reading() as connection:
        for run, attempts in runs.items():
            for names in chunks(attempts):
                for row in connection.execute(query.where(RUN.c.name == run, CELL.c.name.in_(names))):
                    cell = stored.cell_of(row)
                    said, pinned, attempt = row[-3:]
                    if attempt == attempts[cell.name]:
                        told = json.loads(said or "{}")
                        found[cell, run] = Evidence(told if isinstance(told, dict) else {}, pinned or "")
    return found


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
        .where(_ENDED, RUN.c.partial.is_(False))
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
