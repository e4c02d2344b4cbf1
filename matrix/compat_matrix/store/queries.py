"""The queries of the store, and the objects made from their rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, case, func, select, text

from ..cells import AXES, Cell, parse_own
from ..results import ENDED, CellResult, Figure, Test
from .models import CELL, FAILED, FIGURE, LOG, NEWEST, NODEID, PLANNED, RESULT, RUN, TEST, TEXT
from .records import Past, Run, Summary

#: The columns of a cell, the first of the rows that `cell_of` and `summary_of` take.
CELL_FIELDS = (*(CELL.c[axis] for axis in AXES), CELL.c.extra)
RUN_FIELDS: tuple[ColumnElement[Any], ...] = (
    RUN.c.name,
    RUN.c.started,
    RUN.c.finished,
    RUN.c.state,
    RUN.c.label,
    RUN.c.command,
    RUN.c.host,
    RUN.c.revision,
    RUN.c.partial,
    RUN.c.whole,
)
COUNTS = (
    *(RESULT.c.passed, RESULT.c.failed, RESULT.c.error, RESULT.c.skipped, RESULT.c.xfailed, RESULT.c.xpassed),
    *(RESULT.c.flaky, RESULT.c.known),
)
#: The number of columns that `summary_of` takes.
SUMMARY = len(CELL_FIELDS) + 7 + len(COUNTS)

#: The columns of a figure, in the order of its fields.
_FIGURE = (FIGURE.c.name, FIGURE.c.value, FIGURE.c.unit, FIGURE.c.better)
#: Their place in the rows of `figures` and `measured`, behind the cell's.
FIGURE_FIELDS = slice(len(CELL_FIELDS), len(CELL_FIELDS) + len(_FIGURE))
#: A store of unknown origin may have any value.
_FINITE = func.abs(FIGURE.c.value) <= sys.float_info.max

#: In the order in which the store received the runs, because the clock of the machine that ran one may be wrong.
NEWEST_FIRST = (RUN.c.id.desc(),)

#: The condition that the tests of a result ran.
HAS_ENDED = RESULT.c.verdict.in_(ENDED)

#: As `Summary.rank`.
RANK = case((HAS_ENDED, 0), (RESULT.c.verdict.is_not(None), 1), else_=2)

#: Of the results of a cell in several runs, the one that counts first.
COUNTS_FIRST = (RANK, RESULT.c.id.desc())


# Making an alias takes as long as a small query.
_NAMED, _LATER, _TEXTS = RUN.alias(), RESULT.alias(), tuple(TEXT.alias() for _ in range(3))


def of_run(*names: str) -> ColumnElement[bool]:
    """The condition that a run is a part of the same run as one of these."""
    return RUN.c.whole.in_(select(_NAMED.c.whole).where(_NAMED.c.name.in_(names)))


def last_attempt(run_id: ColumnElement[int], cell_id: ColumnElement[int]) -> Any:
    """The number of the last attempt at a cell in a run."""
    own = (_LATER.c.run_id == run_id, _LATER.c.cell_id == cell_id)
    return select(func.max(_LATER.c.attempt)).where(*own).scalar_subquery()


_LAST = last_attempt(PLANNED.c.run_id, PLANNED.c.cell_id)


def latest(query: Select[Any]) -> Select[Any]:
    """`query` over the planned cells and their latest results."""
    own = and_(RESULT.c.run_id == PLANNED.c.run_id, RESULT.c.cell_id == PLANNED.c.cell_id, RESULT.c.attempt == _LAST)
    return query.select_from(PLANNED).join(RUN, RUN.c.id == PLANNED.c.run_id).outerjoin(RESULT, own)


@lru_cache(16)  # making a statement takes as long as executing it
def summary(*more: Any) -> Select[Any]:
    """The planned cells with their latest results: the columns for `summary_of`, followed by `more`."""
    return latest(_summarised(*more)).join(CELL, CELL.c.id == PLANNED.c.cell_id)


def ends(run_name: str) -> Select[Any]:
    """The key, rank, verdict, kind and result of each planned cell, a fast way to find the cells that need a summary.

    The result that counts is the last of those of a cell.
    """
    query = latest(select(PLANNED.c.cell_id, RANK, RESULT.c.verdict, RESULT.c.kind, RESULT.c.id))
    return query.where(of_run(run_name)).order_by(RANK.desc(), RESULT.c.id)


def history(wanted: Cell) -> Select[Any]:
    """Every result of a cell, with the columns of `summary` followed by the run's fields."""
    own = and_(RESULT.c.run_id == PLANNED.c.run_id, RESULT.c.cell_id == PLANNED.c.cell_id)
    query = _summarised(*RUN_FIELDS).select_from(PLANNED).join(RUN, RUN.c.id == PLANNED.c.run_id).join(RESULT, own)
    query = query.join(CELL, CELL.c.id == PLANNED.c.cell_id).where(CELL.c.name == wanted.name)
    return query.order_by(*NEWEST_FIRST, RESULT.c.attempt.desc())


@cache
def current() -> Select[Any]:
    """As `summary`, for the newest result of each cell in whole runs, followed by the run's key and the exact versions."""
    return with_newest(_summarised(NEWEST.c.run_id, NEWEST.c.versions))


def with_newest(query: Select[Any]) -> Select[Any]:
    """`query` over the cells, with their newest results and plans."""
    plan = and_(PLANNED.c.run_id == NEWEST.c.run_id, PLANNED.c.cell_id == NEWEST.c.cell_id)
    query = query.select_from(NEWEST).join(CELL, CELL.c.id == NEWEST.c.cell_id).join(PLANNED, plan)
    return query.outerjoin(RESULT, RESULT.c.id == NEWEST.c.result_id)


def newest(run_names: Collection[str]) -> Select[Any]:
    """As `summary`, for the newest result of each cell in the given runs, followed by the run's fields."""
    number = (
        func.row_number().over(partition_by=PLANNED.c.cell_id, order_by=(*COUNTS_FIRST, *NEWEST_FIRST)).label("number")
    )
    query = summary(*RUN_FIELDS, number)
    every = query.where(of_run(*run_names)).subquery()
    return select(*(column for column in every.c if column.name != "number")).where(every.c.number == 1)


def outcomes(results: Collection[int], *, failed_only: bool) -> Select[Any]:
    """The result, test and outcome of the tests of results."""
    query = select(TEST.c.result_id, NODEID.c.name, TEST.c.outcome).join_from(TEST, NODEID)
    query = query.where(TEST.c.result_id.in_(results))
    return query.where(text(f"test.{FAILED}")) if failed_only else query


def totals(run_names: Collection[str]) -> Select[Any]:
    """The number of cells in each state, by run."""
    own = and_(RESULT.c.run_id == PLANNED.c.run_id, RESULT.c.cell_id == PLANNED.c.cell_id)
    last = func.max(RESULT.c.attempt).over(partition_by=(PLANNED.c.run_id, PLANNED.c.cell_id)).label("last")
    unfinished = case((PLANNED.c.excluded.is_not(None), "excluded"), else_="unfinished")
    state = func.coalesce(RESULT.c.verdict, unfinished).label("state")
    every = select(RUN.c.name, state, RESULT.c.attempt, last).join_from(PLANNED, RUN).outerjoin(RESULT, own)
    some = every.where(RUN.c.name.in_(run_names)).subquery()
    query = select(some.c.name, some.c.state, func.count()).where(some.c.attempt.is_not_distinct_from(some.c.last))
    return query.group_by(some.c.name, some.c.state)


def _summarised(*more: Any) -> Select[Any]:
    return select(
        *CELL_FIELDS,
        RESULT.c.verdict,
        RESULT.c.kind,
        func.coalesce(RESULT.c.reason, PLANNED.c.excluded, "").label("reason"),
        PLANNED.c.excluded.is_not(None).label("is_excluded"),
        RESULT.c.started.label("result_started"),
        RESULT.c.seconds,
        RESULT.c.attempt,
        *COUNTS,
        *more,
    )


def cell_of(row: Sequence[Any]) -> Cell:
    """The cell in the first fields of a row."""
    return _cell(*row[: len(CELL_FIELDS)])


@lru_cache(200_000)
def _cell(python: str, transformers: str, torch: str, flash_attention: str, device: str, extra: str) -> Cell:
    """The same object for the same cell, which makes creation and comparison fast."""
    return Cell(python, transformers, torch, flash_attention, device, parse_own(extra))


@lru_cache(20_000)
def versions_of(text: str) -> Mapping[str, str]:
    """The exact versions of a result, from the column of `NEWEST`."""
    found: dict[str, str] = json.loads(text)
    return found


def summary_of(row: Sequence[Any]) -> tuple[Cell, Summary]:
    """The cell in a row, and its summary."""
    found = cell_of(row)
    verdict, kind, reason, excluded, *rest = row[len(CELL_FIELDS) : SUMMARY]
    if verdict is None:
        return found, Summary(reason=reason, excluded=bool(excluded))
    return found, Summary(verdict, kind, reason, bool(excluded), *rest)


def environment_of(text: str | None) -> Mapping[str, Any]:
    """The environment in a stored text; empty for a text that has none."""
    found = json.loads(text or "{}")
    return found if isinstance(found, dict) else {}


def past_of(row: Sequence[Any]) -> Past:
    """The result in a row of `newest` or `history`, which end with the run's fields."""
    return Past(Run(*row[-len(RUN_FIELDS) :]), summary_of(row)[1])


def _result(run_name: str, wanted: Cell, attempt: int | None, *, log: bool) -> Select[Any]:
    """A result of a cell in a run as in `of_cell`, without its tests."""
    environment, pins, command = _TEXTS
    query = (
        select(
            RESULT,
            environment.c.content.label("environment"),
            pins.c.content.label("pins"),
            command.c.content.label("command"),
        )
        .outerjoin(environment, RESULT.c.environment_id == environment.c.id)
        .outerjoin(pins, RESULT.c.pins_id == pins.c.id)
        .outerjoin(command, RESULT.c.command_id == command.c.id)
    )
    if log:
        query = query.add_columns(LOG.c.content.label("log")).outerjoin(LOG, RESULT.c.id == LOG.c.result_id)
    return of_cell(query, run_name, wanted, attempt)


def of_cell(query: Select[Any], run_name: str, wanted: Cell, attempt: int | None = None) -> Select[Any]:
    """`query` over one result of a cell in a run.

    Args:
        attempt: the number of the attempt; by default the result that counts. If several parts of the run have it, the
            attempt of the part `run_name` comes first.
    """
    query = query.join(RUN, RUN.c.id == RESULT.c.run_id).join(CELL, CELL.c.id == RESULT.c.cell_id)
    query = query.where(of_run(run_name), CELL.c.name == wanted.name)
    if attempt is None:
        query = query.where(RESULT.c.attempt == last_attempt(RESULT.c.run_id, RESULT.c.cell_id))
    else:
        query = query.where(RESULT.c.attempt == attempt).order_by(case((RUN.c.name == run_name, 0), else_=1))
    return query.order_by(*COUNTS_FIRST).limit(1)


def read_result(
    connection: Connection, run_name: str, wanted: Cell, attempt: int | None, *, log: bool = True
) -> CellResult | None:
    """One result of a cell in a run, chosen as in `of_cell`; None if the run has no such result."""
    row = connection.execute(_result(run_name, wanted, attempt, log=log)).one_or_none()
    if row is None:
        return None
    figures: dict[str, list[Figure]] = {}
    for nodeid, *fields in connection.execute(_figures_of(row.id)):
        figures.setdefault(nodeid, []).append(Figure(*fields))
    tests = connection.execute(_tests(row.id))
    return CellResult(
        cell=wanted,
        verdict=row.verdict,
        kind=row.kind,
        reason=row.reason,
        started=row.started,
        seconds=row.seconds,
        tests=tuple(
            Test(name, outcome, seconds, said or "", tuple(figures.get(name, ())))
            for name, outcome, seconds, said in tests
        ),
        environment=json.loads(row.environment or "{}"),
        pins=row.pins or "",
        command=tuple(json.loads(row.command or "[]")),
        log=(row.log or "") if log else "",
        attempt=row.attempt,
    )


def _tests(result_id: int) -> Select[Any]:
    """The tests of a result, in the order of the run."""
    query = select(NODEID.c.name, TEST.c.outcome, TEST.c.seconds, TEXT.c.content).join_from(TEST, NODEID)
    query = query.outerjoin(TEXT, TEST.c.message_id == TEXT.c.id)
    return query.where(TEST.c.result_id == result_id).order_by(TEST.c.position)


def _figures_of(result_id: int) -> Select[Any]:
    """The test of each figure of a result, and the figure."""
    query = select(NODEID.c.name, *_FIGURE).join_from(FIGURE, NODEID, FIGURE.c.nodeid_id == NODEID.c.id)
    return query.where(FIGURE.c.result_id == result_id, _FINITE).order_by(FIGURE.c.name)


def figures(run_name: str) -> Select[Any]:
    """The figures in the latest results of a run's parts: the cell's fields, the figure's and the key of the result."""
    query = latest(select(*CELL_FIELDS, *_FIGURE, RESULT.c.id)).join(CELL, CELL.c.id == PLANNED.c.cell_id)
    query = query.join(FIGURE, FIGURE.c.result_id == RESULT.c.id).where(of_run(run_name), _FINITE)
    return query.order_by(FIGURE.c.name)


def measured(*conditions: Any) -> Select[Any]:
    """Figures, those received first at the beginning: the cell's fields, the figure's, the environment and the run's fields."""
    query = select(*CELL_FIELDS, *_FIGURE, RESULT.c.environment_id, *RUN_FIELDS).select_from(FIGURE)
    query = query.join(RESULT, RESULT.c.id == FIGURE.c.result_id).join(RUN, RUN.c.id == RESULT.c.run_id)
    query = query.join(CELL, CELL.c.id == RESULT.c.cell_id)
    return query.where(*conditions, _FINITE).order_by(RUN.c.id, RESULT.c.attempt)


def planned(run_name: str) -> Select[Any]:
    """The cells of a run, in order, each with the reason if it is excluded."""
    query = select(*CELL_FIELDS, PLANNED.c.excluded).join_from(PLANNED, CELL).join(RUN, RUN.c.id == PLANNED.c.run_id)
    return query.where(RUN.c.name == run_name).order_by(PLANNED.c.position)


def attempts(run_name: str) -> Select[Any]:
    """The cells and attempts of a run's results, oldest first."""
    query = select(*CELL_FIELDS, RESULT.c.attempt).select_from(RESULT).join(CELL, CELL.c.id == RESULT.c.cell_id)
    return query.join(RUN, RUN.c.id == RESULT.c.run_id).where(RUN.c.name == run_name).order_by(RESULT.c.id)
