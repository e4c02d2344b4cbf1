"""Deleting runs, and what only they used."""

from collections.abc import Iterable

from sqlalchemy import Connection, delete, except_, select, update

from . import inserts
from .models import CELL, NEWEST, NODEID, RESULT, RUN, SUBMISSION, TEXT, metadata
from .store import Store
from .submissions import StateError


def delete_runs(store: Store, runs: Iterable[str]) -> None:
    """Delete runs, each in a transaction, and then the texts, names of tests and cells that no other run uses.

    If one of them can't be deleted, none is.

    Raises:
        StateError: a run hasn't ended.
        MatrixError: a run doesn't exist.
    """
    names = dict.fromkeys(runs)
    with store.reading() as connection:
        for name in names:
            _ended(connection, name)
    for name in names:
        with store.writing() as connection:
            _delete(connection, name)
    if names:
        _sweep(store)


def _ended(connection: Connection, name: str) -> int:
    """The key of a run that has ended, which stays so until the transaction ends."""
    key = inserts.key(connection, name)
    waits = select(SUBMISSION.c.id).where(SUBMISSION.c.run_id == key).exists()
    ended = select(RUN.c.id).where(RUN.c.id == key, RUN.c.state != "running", ~waits)
    if connection.scalar(ended.with_for_update()) is None:
        raise StateError(f"the run {name} hasn't ended: cancel it first")
    return key


def _delete(connection: Connection, name: str) -> None:
    """Delete a run and every row that refers to it or to its results, whichever table has it."""
    inserts.lock(connection)
    key = _ended(connection, name)
    results = select(RESULT.c.id).where(RESULT.c.run_id == key)
    shown = connection.scalars(select(NEWEST.c.cell_id).where(NEWEST.c.run_id == key)).all()
    for table in reversed(metadata.sorted_tables):
        if "result_id" in table.c:
            connection.execute(delete(table).where(table.c.result_id.in_(results)))
        if "run_id" in table.c:
            connection.execute(delete(table).where(table.c.run_id == key))
    connection.execute(delete(RUN).where(RUN.c.id == key))
    parts = select(RUN.c.name).where(RUN.c.whole == name).order_by(RUN.c.id)
    if first := connection.scalar(parts.limit(1)):  # the deleted one was the first part of these
        connection.execute(update(RUN).where(RUN.c.whole == name).values(whole=first))
    inserts.refresh_newest(connection, shown)


def _sweep(store: Store) -> None:
    """Delete the texts, the names of tests and the cells to which no row refers."""
    references = [key for table in metadata.sorted_tables for key in table.foreign_keys]
    for owner in (TEXT, NODEID, CELL):
        columns = (key.parent for key in references if key.column is owner.c.id)
        used = (select(column).where(column.is_not(None)) for column in columns)
        with store.writing() as connection:
            inserts.lock(connection)
            connection.execute(delete(owner).where(owner.c.id.in_(except_(select(owner.c.id), *used))))
