"""Submitted runs: they wait until a service executes them."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, select

from ..cells import Cell, parse
from ..errors import MatrixError
from . import inserts
from .models import RUN, SUBMISSION
from .store import Store


class StateError(MatrixError):
    """The state of a run doesn't allow the request."""


class Running(NamedTuple):
    """A cell that a service runs now.

    Attributes:
        since: when it began, by that service's clock.
        host: the machine of the service.
        log: the end of its log so far; empty if it runs on another machine.
    """

    run: str
    cell: Cell
    since: datetime
    host: str
    log: str


def remove(connection: Connection, run: int) -> None:
    """Let a run wait no more; the service that executes it ends its cells within seconds. It is interrupted."""
    connection.execute(delete(SUBMISSION).where(SUBMISSION.c.run_id == run))
    inserts.finish(connection, run, "interrupted")


def cancel(store: Store, run: str) -> None:
    """Interrupt a run that waits for a service or is executed by one, or whose runner was killed.

    Raises:
        StateError: it has ended.
        MatrixError: it doesn't exist.
    """
    with store.writing() as connection:
        key = inserts.key(connection, run)
        if connection.scalar(select(RUN.c.state).where(RUN.c.id == key)) != "running":
            raise StateError(f"the run {run} has ended")
        remove(connection, key)


_WAITING = (
    select(
        *(RUN.c.name.label("run"), SUBMISSION.c.host, SUBMISSION.c.seen),
        *(SUBMISSION.c.reason, SUBMISSION.c.running, SUBMISSION.c.again),
    )
    .join_from(SUBMISSION, RUN)
    .order_by(SUBMISSION.c.id)
)


def waiting(store: Store) -> Sequence[Any]:
    """The rows of the runs that wait or are executed, in order, with the id of the `run`."""
    return store.rows(_WAITING)


def running(store: Store, run: str | None = None) -> list[Running]:
    """The cells of one run or of all that services run now."""
    return [
        Running(row.run, parse(cell), datetime.fromisoformat(since), row.host, "".join(log))
        for row in store.rows(_WAITING)
        if run in (None, row.run)
        for cell, value in json.loads(row.running).items()
        for since, *log in [[value] if isinstance(value, str) else value]  # of an older version only the time
    ]
