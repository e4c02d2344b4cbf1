"""The statements by which a store is read, and the objects made from their rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import islice
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import ColumnElement, Connection, Row, ScalarSelect, Select, and_, case, func, select, true

from ..cells import AXES, Cell, parse_own
from ..results import ENDED, CellResult, Figure, Measured, Past, Run, Summary, Test
from ..versions import exact
from .models import CELL, FIGURE, LOG, NEWEST, NODEID, PLANNED, RESULT, RUN, TEST, TEXT

T = TypeVar("T")

_CELL = len(AXES) + 1
#: The columns of a cell, the first of the rows that `cell_of` and `summary_of` take.
CELL_FIELDS = (*(CELL.c[axis] for axis in AXES), CELL.c.extra)
RUN_FIELDS: tuple[ColumnElement[Any], ...] = (RUN.c.name, *(RUN.c[one.name] for one in fields(Run)[1:]))
_FIGURE_FIELDS = tuple(FIGURE.c[one.name] for one in fields(Figure))
#: The columns from which `exact_versions` reads versions.
VERSION_FIELDS = (RESULT.c.environment_id, RESULT.c.pins_id)


def _number(name: str) -> ColumnElement[Any]:
    return func.coalesce(RESULT.c[name], 0).label(name)


#: The columns of a `Summary`. The first ones are enough for a grid.
_SUMMARY_FIELDS = (
    *(RESULT.c.verdict, RESULT.c.kind, func.coalesce(RESULT.c.reason, PLANNED.c.excluded, "").label("reason")),
    *(PLANNED.c.excluded.is_not(None).label("is_excluded"), _number("failed"), _number("error")),
    *(RESULT.c.started.label("result_started"), *map(_number, Summary._fields[7:])),
)
_BRIEF = 6

#: The number of columns that `summary_of` takes.
SUMMARY = _CELL + len(Summary._fields)

#: Results with their runs and cells.
RESULTS = RESULT.join(RUN, RUN.c.id == RESULT.c.run_id).join(CELL, CELL.c.id == RESULT.c.cell_id)

#: In the order in which the store received the runs, because the clock of the machine that ran one may be wrong.
NEWEST_FIRST = (RUN.c.id.desc(),)

#: The condition that the tests of a result ran.
HAS_ENDED = RESULT.c.verdict.in_(ENDED)

#: Of the results of a cell in several runs, the one that counts first: its tests ran, or else the machine lacked something.
_RANK = case((HAS_ENDED, 0), (RESULT.c.verdict.is_not(None), 1), else_=2)
_COUNTS_FIRST = (_RANK, RESULT.c.id.desc())
COUNTS_LAST = (_RANK.desc(), RESULT.c.id)

# Making an alias takes as long as a small query.
_named, _part, _later = RUN.alias(), RUN.alias(), RESULT.alias()
_same = and_(_later.c.run_id == RESULT.c.run_id, _later.c.cell_id == RESULT.c.cell_id)
#: The condition that a result is of the last attempt at its cell in its run.
IS_LAST = ~select(_later.c.id).where(_same, _later.c.attempt > RESULT.c.attempt).correlate(RESULT).exists()


def of_run(*names: str, run: ColumnElement[int] = RUN.c.id) -> ColumnElement[bool]:
    """The condition that the run with the key `run` is a part of the same run as one of these."""
    same = select(_part.c.id).join(_named, _named.c.whole == _part.c.whole)
    return run.in_(same.where(_named.c.name.in_(names)))


@lru_cache(16)  # making a statement takes as long as executing it
def summary(*more: Any, brief: bool = False, every: bool = False) -> Select[Any]:
    """The planned cells with their latest results, or with `every` one: the columns for `summary_of`, followed by `more`."""
    fields = _SUMMARY_FIELDS[:_BRIEF] if brief else _SUMMARY_FIELDS
    own = and_(RESULT.c.run_id == PLANNED.c.run_id, RESULT.c.cell_id == PLANNED.c.cell_id, true() if every else IS_LAST)
    query = select(*CELL_FIELDS, *fields, *more).select_from(PLANNED).join(RUN, RUN.c.id == PLANNED.c.run_id)
    return query.join(RESULT, own, isouter=not every).join(CELL, CELL.c.id == PLANNED.c.cell_id)


_ORDER = (*_COUNTS_FIRST, *NEWEST_FIRST)
_NUMBER = func.row_number().over(partition_by=PLANNED.c.cell_id, order_by=_ORDER).label("number")


def first(*more: Any, where: ColumnElement[bool]) -> Select[Any]:
    """As `summary`, for the result of each cell that counts first, in all runs for which `where` is true."""
    rows = summary(_NUMBER, *more).where(where).subquery()
    return select(rows).where(rows.c.number == 1)


#: As `summary`, for the newest result of each cell in whole runs, with its exact versions and its run. Every cell there is planned:
#: with an inner join SQLite would read all planned cells.
CURRENT = (
    select(*CELL_FIELDS, *_SUMMARY_FIELDS, NEWEST.c.versions, *RUN_FIELDS)
    .select_from(NEWEST)
    .join(RUN, RUN.c.id == NEWEST.c.run_id)
    .join(CELL, CELL.c.id == NEWEST.c.cell_id)
    .outerjoin(PLANNED, and_(PLANNED.c.run_id == NEWEST.c.run_id, PLANNED.c.cell_id == NEWEST.c.cell_id))
    .outerjoin(RESULT, RESULT.c.id == NEWEST.c.result_id)
)


def cell_of(row: Sequence[Any]) -> Cell:
    """The cell in the first fields of a row."""
    return _cell(*row[:_CELL])


@lru_cache(200_000)
def _cell(python: str, transformers: str, torch: str, flash_attention: str, device: str, extra: str) -> Cell:
    """The same object for the same cell, which makes creation and comparison fast."""
    return Cell(python, transformers, torch, flash_attention, device, parse_own(extra) if extra else ())


_VERSIONS = TypeAdapter(dict[str, str])


@lru_cache(20_000)
def versions_of(text: str) -> Mapping[str, str]:
    """The exact versions of a result, from the column of `NEWEST`; none from a text that isn't one of versions."""
    try:
        return _VERSIONS.validate_json(text)
    except ValidationError:
        return {}


def summary_of(row: Sequence[Any]) -> tuple[Cell, Summary]:
    """The cell in a row, and its summary; of a brief query most rows have one of a few summaries."""
    return _cell(*row[:_CELL]), (Summary if len(row) > _CELL + _BRIEF else _brief)(*row[_CELL:SUMMARY])


_brief = lru_cache(1000)(Summary)


def environment_of(text: str | None) -> Mapping[str, Any]:
    """The environment in a stored text; empty for a text that has none."""
    found = json.loads(text or "{}")
    return found if isinstance(found, dict) else {}


def past_of(row: Sequence[Any], versions: Mapping[str, str] = {}) -> Past:
    """The result in a row of `summary` that ends with the run's fields."""
    cell, summary = summary_of(row)
    return Past(cell, _run(*row[-len(RUN_FIELDS) :]), summary, versions)


_run = lru_cache(1000)(Run)


def exact_versions(connection: Connection, rows: Sequence[Row[Any]]) -> list[dict[str, str]]:
    """The exact versions of the results in rows of `summary` with `VERSION_FIELDS`; none without a result."""
    texts = texts_of(connection, (key for row in rows for key in (row.environment_id, row.pins_id)))
    return [
        exact(cell_of(row), environment_of(texts.get(row.environment_id)), texts.get(row.pins_id, ""))
        if row.verdict
        else {}
        for row in rows
    ]


def with_versions(connection: Connection, query: Select[Any]) -> list[Past]:
    """The results in the rows of `summary` with `VERSION_FIELDS`, which end with the run's fields."""
    rows = connection.execute(query).all()
    return [*map(past_of, rows, exact_versions(connection, rows))]


def result_key(run_name: str, wanted: Cell, attempt: int | None = None) -> ScalarSelect[int]:
    """The key of the result of a cell in a run that counts, or of an attempt: that in the part `run_name` before other parts'."""
    cell = select(CELL.c.id).where(CELL.c.name == wanted.name).scalar_subquery()
    query = select(RESULT.c.id).join(RUN, RUN.c.id == RESULT.c.run_id).where(RESULT.c.cell_id == cell)
    query = query.where(of_run(run_name, run=RESULT.c.run_id))
    query = query.where(IS_LAST if attempt is None else RESULT.c.attempt == attempt)
    own_first = () if attempt is None else (case((RUN.c.name == run_name, 0), else_=1),)
    return query.order_by(*own_first, *_COUNTS_FIRST).limit(1).scalar_subquery()


def read_result(
    connection: Connection, run_name: str, wanted: Cell, attempt: int | None, *, log: bool = True
) -> CellResult | None:
    """One result of a cell in a run, chosen as in `result_key`; None if the run has no such result."""
    row = connection.execute(select(RESULT).where(RESULT.c.id == result_key(run_name, wanted, attempt))).one_or_none()
    if row is None:
        return None
    figures: dict[int, list[Figure]] = {}
    query = select(FIGURE.c.nodeid_id, *_FIGURE_FIELDS).where(FIGURE.c.result_id == row.id, _IS_FINITE)
    for key, *values in connection.execute(query.order_by(FIGURE.c.name)):
        figures.setdefault(key, []).append(Figure(*values))
    query = select(NODEID.c.id, NODEID.c.name, TEST.c.outcome, TEST.c.seconds, TEXT.c.content).join_from(TEST, NODEID)
    query = query.outerjoin(TEXT, TEST.c.message_id == TEXT.c.id).where(TEST.c.result_id == row.id)
    tests = connection.execute(query.order_by(TEST.c.position)).all()
    texts = texts_of(connection, [row.environment_id, row.pins_id, row.command_id])
    found_log = connection.scalar(select(LOG.c.content).where(LOG.c.result_id == row.id)) if log else None
    return CellResult(
        wanted,
        *(row.verdict, row.kind, row.reason, row.started, row.seconds),
        tests=tuple(
            Test(name, outcome, seconds, said or "", tuple(figures.get(key, ())))
            for key, name, outcome, seconds, said in tests
        ),
        environment=json.loads(texts.get(row.environment_id, "{}")),
        pins=texts.get(row.pins_id, ""),
        command=tuple(json.loads(texts.get(row.command_id, "[]"))),
        log=found_log or "",
        attempt=row.attempt,
    )


def texts_of(connection: Connection, keys: Iterable[int | None]) -> dict[int | None, str]:
    """Shared texts by key; a key that is None has no text."""
    found: dict[int | None, str] = {}
    for some in chunks({key for key in keys if key is not None}):
        rows = connection.execute(select(TEXT.c.id, TEXT.c.content).where(TEXT.c.id.in_(some)))
        found |= {row[0]: row[1] for row in rows}
    return found


def measured(connection: Connection, *conditions: ColumnElement[bool]) -> dict[Cell, list[Measured]]:
    """Figures by cell, in the order received."""
    query = select(*CELL_FIELDS, *_FIGURE_FIELDS, RESULT.c.environment_id, *RUN_FIELDS).select_from(RESULTS)
    query = query.join(FIGURE, FIGURE.c.result_id == RESULT.c.id).where(*conditions, _IS_FINITE)
    rows = connection.execute(query.order_by(RUN.c.id, RESULT.c.attempt, FIGURE.c.name)).all()
    texts = texts_of(connection, (row.environment_id for row in rows))
    devices = {key: str(environment_of(content).get("device", "")) for key, content in texts.items()}
    found: dict[Cell, list[Measured]] = {}
    for row in rows:
        figure = Figure(*row[_CELL : _CELL + len(_FIGURE_FIELDS)])
        one = Measured(_run(*row[-len(RUN_FIELDS) :]), figure, devices.get(row.environment_id, ""))
        found.setdefault(cell_of(row), []).append(one)
    return found


#: A store of unknown origin may have any value.
_IS_FINITE = func.abs(FIGURE.c.value) <= sys.float_info.max


def chunks(values: Iterable[T]) -> Iterator[list[T]]:
    """Chunks that are small enough for the parameter limit of every database."""
    iterator = iter(values)
    while chunk := list(islice(iterator, 400)):
        yield chunk
