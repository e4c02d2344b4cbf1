"""Deleting runs, and what only they used."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta, timezone

from sqlalchemy import Connection, delete, except_, select, update

from . import inserts
from .models import CELL, NEWEST, NODEID, RESULT, RUN, SUBMISSION, TEXT, metadata
from .records import Run
from .store import Store
from .submissions import StateError, waiting


def delete_runs(store: Store, runs: Iterable[str]) -> None:
    """Delete runs, each in a transaction, and then the texts, names of tests and cells that no other run uses.

    If one of them can't be deleted, none is.

    Raises:
        StateError: a run hasn't ended.
        MatrixError: a run doesn't exist.
    """
    names = [*dict.fromkeys(runs)]
    executed = {one.run for one in waiting(store)}
    for name in names:
        if store.run(name).state == "running" or name in executed:
            raise _running(name)
    for name in names:
        with store.writing() as connection:
            deleted = _delete(connection, name)
        if not deleted:
            raise _running(name)
    if names:
        _sweep(store)


def older(store: Store, keep: timedelta) -> list[Run]:
    """The runs that ended longer ago than `keep`, newest first."""
    before = datetime.now(timezone.utc) - keep
    return [one for one in store.runs() if one.state != "running" and (one.finished or one.started) < before]


def _running(name: str) -> StateError:
    return StateError(f"the run {name} hasn't ended: cancel it first")


def _delete(connection: Connection, name: str) -> bool:
    """Delete a run and every row that refers to it or to its results, whichever table has it; false if it hasn't ended."""
    inserts.lock(connection)
    key = inserts.key(connection, name)
    waits = select(SUBMISSION.c.id).where(SUBMISSION.c.run_id == key).exists()
    ended = RUN.c.id == key, RUN.c.state != "running", ~waits
    if not connection.execute(update(RUN).where(*ended).values(state=RUN.c.state)).rowcount:  # locks the row
        return False
    results = select(RESULT.c.id).where(RESULT.c.run_id == key)
    shown = connection.scalars(select(NEWEST.c.cell_id).where(NEWEST.c.run_id == key)).all()
    for table in reversed(metadata.sorted_tables):
        if "result_id" in table.c:
            connection.execute(delete(table).where(table.c.result_id.in_(results)))
        if "run_id" in table.c:
            connection.execute(delete(table).where(table.c.run_id == key))
    connection.execute(delete(RUN).where(RUN.c.id == key))
    inserts.refresh_newest(connection, shown)
    return True


def _sweep(store: Store) -> None:
    """Delete the texts, the names of tests and the cells to which no row refers."""
    for owner in (TEXT, NODEID, CELL):
        references = (key for table in metadata.sorted_tables for key in table.foreign_keys)
        columns = [key.parent for key in references if key.column is owner.c.id]
        used = (select(column).where(column.is_not(None)) for column in columns)
        with store.writing() as connection:
            inserts.lock(connection)
            connection.execute(delete(owner).where(owner.c.id.in_(except_(select(owner.c.id), *used))))
