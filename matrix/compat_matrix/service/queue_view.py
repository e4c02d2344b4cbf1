"""The queue as pages show it: the progress of runs, late results, and descriptions of machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Select, func, select

from ..cells import Cell
from ..store import Store, queries
from ..store.models import CELL, LATE, LEASE, RUN, TASK


class Late(NamedTuple):
    """A result that was reported after its lease had expired and doesn't count; without its tests and its log."""

    cell: Cell
    run: str
    attempt: int
    worker: str
    received: datetime
    verdict: str
    kind: str | None
    reason: str


def late(store: Store, cell: Cell | None = None, most: int = 50) -> list[Late]:
    """The newest late results, of one cell or of all."""
    query: Select[Any] = (
        select(
            *queries.CELL_FIELDS,
            RUN.c.name,
            TASK.c.attempt,
            LEASE.c.worker,
            LATE.c.received,
            LATE.c.verdict,
            LATE.c.kind,
            LATE.c.reason,
        )
        .join_from(LATE, TASK, TASK.c.id == LATE.c.task_id)
        .join(LEASE, LEASE.c.id == LATE.c.lease)
        .join(RUN, RUN.c.id == TASK.c.run_id)
        .join(CELL, CELL.c.id == TASK.c.cell_id)
        .order_by(LATE.c.received.desc())
        .limit(most)
    )
    if cell is not None:
        query = query.where(CELL.c.name == cell.name)
    with store.reading() as connection:
        return [Late(queries.cell_of(row), *row[len(queries.CELL_FIELDS) :]) for row in connection.execute(query)]


def progress(store: Store, most: int = 50) -> dict[str, Counter[str]]:
    """The number of cells in each state, for the unfinished runs of the queue, newest first."""
    runs = select(RUN.c.id).where(RUN.c.state == "running").order_by(*queries.NEWEST_FIRST).limit(most)
    query = (
        select(RUN.c.name, TASK.c.state, func.count())
        .join_from(TASK, RUN, RUN.c.id == TASK.c.run_id)
        .where(TASK.c.run_id.in_(runs))
        .group_by(RUN.c.name, TASK.c.state)
        .order_by(RUN.c.name.desc())
    )
    found: dict[str, Counter[str]] = {}
    with store.reading() as connection:
        for name, state, count in connection.execute(query):
            found.setdefault(name, Counter())[state] = count
    return found


def machine(said: Mapping[str, Any]) -> str:
    """A worker's description of its machine as text."""
    gpus = Counter(str(one.get("name", "?")) for one in said.get("gpus") or ())
    parts = [f"{count} {name}" if count > 1 else name for name, count in gpus.items()]
    parts += [f"{said['memory']:.0f} GiB"] if said.get("memory") else []
    parts += [f"{said['jobs']} cells at a time"] if said.get("jobs") else []
    parts += [f"Python {', '.join(said['pythons'])}"] if said.get("pythons") else []
    parts += [" ".join(said["labels"])] if said.get("labels") else []
    parts += [f"version {said['version']}"] if said.get("version") else []
    return "; ".join(parts)
