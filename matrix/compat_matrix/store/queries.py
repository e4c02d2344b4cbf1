"""The statements by which a store is read, and the objects made from their rows."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache, lru_cache
from itertools import islice
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Integer,
    Row,
    Select,
    and_,
    bindparam,
    case,
    func,
    select,
    true,
)

from ..cells import AXES, Cell, parse_own
from ..results import ENDED, CellResult, Figure, Measured, Past, Run, Summary, Test
from ..versions import exact
from .models import CELL, DOCUMENT, FIGURE, LOG, NEWEST, NODEID, PLANNED, RESULT, RUN, TEST, TEXT

T = TypeVar("T")

_CELL = len(AXES) + 1
#: The columns of a cell, the first of the rows that `cell_of` and `summary_of` take.
CELL_FIELDS = (*(CELL.c[axis] for axis in AXES), CELL.c.extra)
RUN_FIELDS: tuple[ColumnElement[Any], ...] = (RUN.c.name, *(RUN.c[one.name] for one in fields(Run)[1:]))
_FIGURE_FIELDS = tuple(FIGURE.c[one.name] for one in fields(Figure))
#: The columns from which `exact_versions` reads versions.
VERSION_FIELDS = (RESULT.c.environment_id, RESULT.c.pins_id)


#: A store of unknown origin may have any value.
_IS_FINITE = func.abs(FIGURE.c.value) <= sys.float_info.max


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


def of_run(*names: str | BindParameter[str], run: ColumnElement[int] = RUN.c.id) -> ColumnElement[bool]:
    """The condition that the run with the key `run` is a part of the same run as one of these."""
    same = select(_part.c.id).join(_named, _named.c.whole == _part.c.whole)
    return run.in_(same.where(_named.c.name.in_(names)))


# SQLAlchemy takes as long to build a statement as the database takes to execute it. Those that pages execute are built once, and
# take their values as parameters: in a docstring `:cell` is the parameter `cell`.


@lru_cache(16)
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


_OWN_CELL = select(CELL.c.id).where(CELL.c.name == bindparam("cell")).scalar_subquery()
#: As `CURRENT`, for the cell `:cell`.
CURRENT_OF_CELL = CURRENT.where(NEWEST.c.cell_id == _OWN_CELL)

#: The first part of each run, newest first.
WHOLES = select(RUN.c.whole).order_by(*NEWEST_FIRST)

#: The whole run that began last and wasn't cancelled.
LAST = select(*RUN_FIELDS).where(RUN.c.partial.is_(False), RUN.c.state != "interrupted")
LAST = LAST.order_by(RUN.c.started.desc(), RUN.c.id.desc()).limit(1)


@cache
def runs(limited: bool, after: bool, where: tuple[str, ...]) -> Select[Any]:
    """Runs, newest first: at most `:most`, received before the run `:after`, and with values of these columns."""
    query = select(*RUN_FIELDS).order_by(*NEWEST_FIRST).where(*(RUN.c[name] == bindparam(name) for name in where))
    if after:
        query = query.where(RUN.c.id < select(_named.c.id).where(_named.c.name == bindparam("after")).scalar_subquery())
    return query.limit(bindparam("most", type_=Integer)) if limited else query


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


@lru_cache(16)
def of_result(query: Select[Any], attempt: bool = False) -> Select[Any]:
    """A query of `RESULT` for one result of the cell `:cell` in the run `:run`.

    It is the one that counts; or with `attempt` that of `:attempt`, in this part of the run before other parts.
    """
    key = select(RESULT.c.id).join(RUN, RUN.c.id == RESULT.c.run_id).where(RESULT.c.cell_id == _OWN_CELL)
    key = key.where(of_run(bindparam("run"), run=RESULT.c.run_id))
    key = key.where(RESULT.c.attempt == bindparam("attempt") if attempt else IS_LAST)
    own_first = (case((RUN.c.name == bindparam("run"), 0), else_=1),) if attempt else ()
    return query.where(RESULT.c.id == key.order_by(*own_first, *_COUNTS_FIRST).limit(1).scalar_subquery())


def named(run: str, cell: Cell, attempt: int | None = None) -> dict[str, Any]:
    """The parameters of `of_result`."""
    return {"run": run, "cell": cell.name} | ({} if attempt is None else {"attempt": attempt})


@cache
def history(limited: bool) -> Select[Any]:
    """As `summary`, for the attempts at the cell `:cell`: the `:most` newest ones, the newest run and its latest attempt first."""
    own = RESULT.c.cell_id == _OWN_CELL
    if limited:  # by an index that has them in order
        last = select(RESULT.c.id).where(own).order_by(RESULT.c.id.desc()).limit(bindparam("most", type_=Integer))
        own = RESULT.c.id.in_(last)
    return summary(*RUN_FIELDS, every=True).where(own).order_by(*NEWEST_FIRST, RESULT.c.attempt.desc())


#: The document with the name of the project whose runs a store has.
PROJECT = select(DOCUMENT.c.content).where(DOCUMENT.c.name == "project").order_by(DOCUMENT.c.id.desc()).limit(1)

#: The names of the runs that have planned the cell `:cell`.
PLANS = select(RUN.c.name).join_from(PLANNED, RUN).where(PLANNED.c.cell_id == _OWN_CELL).order_by(*NEWEST_FIRST)

#: The text with the environment of a result.
ENVIRONMENT = select(TEXT.c.content).join(RESULT, RESULT.c.environment_id == TEXT.c.id)
_RESULT = select(RESULT)
_FIGURES = select(FIGURE.c.nodeid_id, *_FIGURE_FIELDS).where(FIGURE.c.result_id == bindparam("result"))
_FIGURES = _FIGURES.where(_IS_FINITE).order_by(FIGURE.c.name)
_TESTS = (
    select(NODEID.c.id, NODEID.c.name, TEST.c.outcome, TEST.c.seconds, TEXT.c.content)
    .join_from(TEST, NODEID)
    .outerjoin(TEXT, TEST.c.message_id == TEXT.c.id)
    .where(TEST.c.result_id == bindparam("result"))
    .order_by(TEST.c.position)
)


def read_result(
    connection: Connection, run_name: str, wanted: Cell, attempt: int | None, *, log: bool = True
) -> CellResult | None:
    """One result of a cell in a run, chosen as in `of_result`; None if the run has no such result."""
    query = of_result(_RESULT, attempt is not None)
    row = connection.execute(query, named(run_name, wanted, attempt)).one_or_none()
    if row is None:
        return None
    figures: dict[int, list[Figure]] = {}
    for key, *values in connection.execute(_FIGURES, {"result": row.id}):
        figures.setdefault(key, []).append(Figure(*values))
    tests = connection.execute(_TESTS, {"result": row.id}).all()
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


_TEXTS = select(TEXT.c.id, TEXT.c.content).where(TEXT.c.id.in_(bindparam("keys", expanding=True)))


def texts_of(connection: Connection, keys: Iterable[int | None]) -> dict[int | None, str]:
    """Shared texts by key; a key that is None has no text."""
    found: dict[int | None, str] = {}
    for some in chunks({key for key in keys if key is not None}):
        found |= {row[0]: row[1] for row in connection.execute(_TEXTS, {"keys": some})}
    return found


_MEASURED = RESULTS.join(FIGURE, FIGURE.c.result_id == RESULT.c.id)
#: Every figure, in the order received, for `measured`.
MEASURED = (
    select(*CELL_FIELDS, *_FIGURE_FIELDS, RESULT.c.environment_id, *RUN_FIELDS)
    .select_from(_MEASURED)
    .where(_IS_FINITE)
    .order_by(RUN.c.id, RESULT.c.attempt, FIGURE.c.name)
)
_has_any = select(FIGURE.c.result_id).where(FIGURE.c.result_id == RESULT.c.id).exists()
_last = select(RESULT.c.id).where(RESULT.c.cell_id == _OWN_CELL, _has_any).order_by(RESULT.c.id.desc()).limit(100)
#: As `MEASURED`, for the last 100 results of the cell `:cell` that have any.
LAST_MEASURED = MEASURED.where(RESULT.c.id.in_(_last))


def measured(connection: Connection, query: Select[Any], **parameters: object) -> dict[Cell, list[Measured]]:
    """Figures by cell, in the order received, from rows of `MEASURED`."""
    rows = connection.execute(query, parameters).all()
    texts = texts_of(connection, (row.environment_id for row in rows))
    devices = {key: str(environment_of(content).get("device", "")) for key, content in texts.items()}
    found: dict[Cell, list[Measured]] = {}
    for row in rows:
        figure = Figure(*row[_CELL : _CELL + len(_FIGURE_FIELDS)])
        one = Measured(_run(*row[-len(RUN_FIELDS) :]), figure, devices.get(row.environment_id, ""))
        found.setdefault(cell_of(row), []).append(one)
    return found


def chunks(values: Iterable[T]) -> Iterator[list[T]]:
    """Chunks that are small enough for the parameter limit of every database."""
    iterator = iter(values)
    while chunk := list(islice(iterator, 400)):
        yield chunk
