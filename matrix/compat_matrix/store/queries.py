"""The queries of the store, and the objects made from their rows."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Select, and_, case, func, select

from ..cells import AXES, Cell, parse_own
from ..results import ENDED
from .models import CELL, FIGURE, LOG, NODEID, PLANNED, RESULT, RUN, TEST, TEXT
from .records import Past, Run, Summary

#: The columns of a cell, the first of the rows that `cell_of` and `summary_of` take.
CELL_FIELDS = (*(CELL.c[axis] for axis in AXES), CELL.c.extra)
RUN_FIELDS = (
    RUN.c.name,
    RUN.c.started,
    RUN.c.finished,
    RUN.c.state,
    RUN.c.label,
    RUN.c.command,
    RUN.c.host,
    RUN.c.revision,
    RUN.c.partial,
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

NEWEST_FIRST = (RUN.c.started.desc(), RUN.c.id.desc())


def latest(query: Select[Any]) -> Select[Any]:
    """`query` over the planned cells and their latest results."""
    later = RESULT.alias()
    last = (
        select(func.max(later.c.attempt))
        .where(later.c.run_id == PLANNED.c.run_id, later.c.cell_id == PLANNED.c.cell_id)
        .scalar_subquery()
    )
    own = and_(RESULT.c.run_id == PLANNED.c.run_id, RESULT.c.cell_id == PLANNED.c.cell_id, RESULT.c.attempt == last)
    return query.select_from(PLANNED).join(RUN, RUN.c.id == PLANNED.c.run_id).outerjoin(RESULT, own)


def summary(*more: Any) -> Select[Any]:
    """The planned cells with their latest results: the columns for `summary_of`, followed by `more`."""
    return latest(_summarised(*more)).join(CELL, CELL.c.id == PLANNED.c.cell_id)


def verdicts(run_name: str) -> Select[Any]:
    """The key, verdict and kind of each planned cell, a fast way to find the cells that need a summary."""
    return latest(select(PLANNED.c.cell_id, RESULT.c.verdict, RESULT.c.kind)).where(RUN.c.name == run_name)


def history(wanted: Cell) -> Select[Any]:
    """Every result of a cell, with the columns of `summary` followed by the run's fields."""
    own = and_(RESULT.c.run_id == PLANNED.c.run_id, RESULT.c.cell_id == PLANNED.c.cell_id)
    query = _summarised(*RUN_FIELDS).select_from(PLANNED).join(RUN, RUN.c.id == PLANNED.c.run_id).join(RESULT, own)
    query = query.join(CELL, CELL.c.id == PLANNED.c.cell_id).where(CELL.c.name == wanted.name)
    return query.order_by(*NEWEST_FIRST, RESULT.c.attempt.desc())


def newest(run_names: Collection[str] | None) -> Select[Any]:
    """As `summary`, for the newest result of each cell in whole runs or in the given ones, followed by the run's fields."""
    verdict = RESULT.c.verdict
    rank = case((verdict.in_(ENDED), 0), (verdict.is_not(None), 1), else_=2)
    number = func.row_number().over(partition_by=PLANNED.c.cell_id, order_by=(rank, *NEWEST_FIRST)).label("number")
    query = summary(*RUN_FIELDS, number)
    query = query.where(RUN.c.partial.is_(False) if run_names is None else RUN.c.name.in_(run_names))
    every = query.subquery()
    return select(*(column for column in every.c if column.name != "number")).where(every.c.number == 1)


def outcomes(run_name: str) -> Select[Any]:
    """The cell, test and outcome in the latest results of a run."""
    query = latest(select(*CELL_FIELDS, NODEID.c.name, TEST.c.outcome)).join(CELL, CELL.c.id == PLANNED.c.cell_id)
    query = query.join(TEST, TEST.c.result_id == RESULT.c.id).join(NODEID, NODEID.c.id == TEST.c.nodeid_id)
    return query.where(RUN.c.name == run_name).order_by(TEST.c.position)


def totals() -> Select[Any]:
    """The number of cells in each state, by run."""
    unfinished = case((PLANNED.c.excluded.is_not(None), "excluded"), else_="unfinished")
    state = func.coalesce(RESULT.c.verdict, unfinished).label("state")
    return latest(select(RUN.c.name, state, func.count())).group_by(RUN.c.name, state)


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


def summary_of(row: Sequence[Any]) -> tuple[Cell, Summary]:
    """The cell in a row, and its summary."""
    found = cell_of(row)
    verdict, kind, reason, excluded, *rest = row[len(CELL_FIELDS) : SUMMARY]
    if verdict is None:
        return found, Summary(reason=reason, excluded=bool(excluded))
    return found, Summary(verdict, kind, reason, bool(excluded), *rest)


def past_of(row: Sequence[Any]) -> Past:
    """The result in a row of `newest` or `history`, which end with the run's fields."""
    return Past(Run(*row[-len(RUN_FIELDS) :]), summary_of(row)[1])


def result(run_name: str, wanted: Cell) -> Select[Any]:
    """The latest result of a cell in a run, without its tests."""
    environment, pins, command = (TEXT.alias() for _ in range(3))
    return (
        select(
            RESULT,
            environment.c.content.label("environment"),
            pins.c.content.label("pins"),
            command.c.content.label("command"),
            LOG.c.content.label("log"),
        )
        .outerjoin(environment, RESULT.c.environment_id == environment.c.id)
        .outerjoin(pins, RESULT.c.pins_id == pins.c.id)
        .outerjoin(command, RESULT.c.command_id == command.c.id)
        .outerjoin(LOG, RESULT.c.id == LOG.c.result_id)
        .join(RUN, RUN.c.id == RESULT.c.run_id)
        .join(CELL, CELL.c.id == RESULT.c.cell_id)
        .where(RUN.c.name == run_name, CELL.c.name == wanted.name)
        .order_by(RESULT.c.attempt.desc())
        .limit(1)
    )


def tests(result_id: int) -> Select[Any]:
    """The tests of a result, in the order of the run."""
    query = select(NODEID.c.name, TEST.c.outcome, TEST.c.seconds, TEXT.c.content).join_from(TEST, NODEID)
    query = query.outerjoin(TEXT, TEST.c.message_id == TEXT.c.id)
    return query.where(TEST.c.result_id == result_id).order_by(TEST.c.position)


def figures_of(result_id: int) -> Select[Any]:
    """The test of each figure of a result, and the figure."""
    query = select(NODEID.c.name, *_FIGURE).join_from(FIGURE, NODEID, FIGURE.c.nodeid_id == NODEID.c.id)
    return query.where(FIGURE.c.result_id == result_id, _FINITE).order_by(FIGURE.c.name)


def figures(run_name: str) -> Select[Any]:
    """The figures in the latest results of a run: the cell's fields and the figure's."""
    query = latest(select(*CELL_FIELDS, *_FIGURE)).join(CELL, CELL.c.id == PLANNED.c.cell_id)
    query = query.join(FIGURE, FIGURE.c.result_id == RESULT.c.id).where(RUN.c.name == run_name, _FINITE)
    return query.order_by(FIGURE.c.name)


def measured(*conditions: Any) -> Select[Any]:
    """Figures, those of the oldest run first: the cell's fields, the figure's, the environment and the run's fields."""
    query = select(*CELL_FIELDS, *_FIGURE, RESULT.c.environment_id, *RUN_FIELDS).select_from(FIGURE)
    query = query.join(RESULT, RESULT.c.id == FIGURE.c.result_id).join(RUN, RUN.c.id == RESULT.c.run_id)
    query = query.join(CELL, CELL.c.id == RESULT.c.cell_id)
    return query.where(*conditions, _FINITE).order_by(RUN.c.started, RUN.c.id, RESULT.c.attempt)


def environment(run_name: str, wanted: Cell) -> Select[Any]:
    """The environment in the latest result of a cell in a run."""
    query = select(TEXT.c.content).select_from(RESULT).outerjoin(TEXT, RESULT.c.environment_id == TEXT.c.id)
    query = query.join(RUN, RUN.c.id == RESULT.c.run_id).join(CELL, CELL.c.id == RESULT.c.cell_id)
    query = query.where(RUN.c.name == run_name, CELL.c.name == wanted.name)
    return query.order_by(RESULT.c.attempt.desc()).limit(1)


def planned(run_name: str) -> Select[Any]:
    """The cells of a run, in order, each with the reason if it is excluded."""
    query = select(*CELL_FIELDS, PLANNED.c.excluded).join_from(PLANNED, CELL).join(RUN, RUN.c.id == PLANNED.c.run_id)
    return query.where(RUN.c.name == run_name).order_by(PLANNED.c.position)


def attempts(run_name: str) -> Select[Any]:
    """The cells and attempts of a run's results, oldest first."""
    query = select(*CELL_FIELDS, RESULT.c.attempt).select_from(RESULT).join(CELL, CELL.c.id == RESULT.c.cell_id)
    return query.join(RUN, RUN.c.id == RESULT.c.run_id).where(RUN.c.name == run_name).order_by(RESULT.c.id)
