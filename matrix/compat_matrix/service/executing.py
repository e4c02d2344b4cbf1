"""Executing submitted runs, one after the other, in a process beside the service, so that requests don't wait for it.

The process ends with the service, however that ends: it reads a pipe from it. A service claims a run by a conditional update, and
repeats every few seconds that it still executes it. A run whose service has fallen silent is claimed by another one, or by the same
after its restart. The clock of the database counts for all of them.
"""

import argparse
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime, timedelta, timezone
from typing import Any

from rich.console import Console
from sqlalchemy import ColumnElement, Row, and_, delete, func, select, update

from .. import runner
from ..axes import load
from ..cells import parse
from ..errors import MatrixError
from ..fingerprint import of_axes
from ..jobs import executor_of, jobs_of
from ..processes import share_priority
from ..progress import Progress
from ..store import Store, inserts, submissions
from ..store.models import RUN, SUBMISSION, Utc
from ..work import Job
from .submission import for_suite

#: The time by the clock of the database.
_NOW = select(func.now(type_=Utc))
#: Seconds between two looks for a run to execute.
_POLL = 1.0
#: Seconds between two signs of life.
_BEAT = 2.0
#: The silence after which a service counts as gone.
_GONE = timedelta(seconds=30)
#: How often the execution of a run may begin without a result before the run is given up.
_TRIES = 10
#: The shortest and the longest pause before the process is started again, in seconds.
_PAUSE, _LONGEST = 5.0, 300.0
#: Seconds for cells to end in order when the service ends.
_GRACE = 30.0
#: Seconds for which results wait for a database that is away.
_PATIENCE = 600.0
#: The priority of processes that run cells and copy runs, as in `nice`: readers come first.
NICE = 10

log = logging.getLogger(__name__)


class _Stopped(KeyboardInterrupt):
    """The service has ended, and not just the run."""


@contextmanager
def beside(work: Callable[[threading.Event], object], name: str, over: threading.Event | None = None) -> Iterator[None]:
    """Run a function in a thread; when the block is left, set the event that it was called with, and wait for its end."""
    over = over or threading.Event()
    # A signal may come before the block is entered: then nothing waits for the thread.
    thread = threading.Thread(target=work, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def supervised(
    what: str, command: Sequence[str], over: threading.Event, sockets: Sequence[int] = ()
) -> AbstractContextManager[None]:
    """Keep a process alive that does `what` with these sockets; it ends once `over` is set or the block is left."""

    def supervise(over: threading.Event) -> None:
        pause = 0.0
        while not over.wait(pause):
            began = time.monotonic()
            try:  # leaving the block closes the pipe, and waits
                with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=sockets) as one:
                    while one.poll() is None and not over.wait(0.5):
                        pass
                ended: object = one.returncode
            except OSError as error:
                ended = error.strerror
            if not over.is_set():
                pause = _PAUSE if time.monotonic() - began > _LONGEST else min(max(2 * pause, _PAUSE), _LONGEST)
                log.warning("a process that %s has ended early (%s); again in %d s", what, ended, pause)

    return beside(supervise, what, over)


def end_with_the_service() -> None:
    """Send this process SIGTERM when its service ends, however that ends, and end it some time later if it goes on."""

    def wait() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def execute_all(options: argparse.Namespace, claim: str) -> int:
    """Execute the runs that wait, until the service ends, which `claim` identifies; returns the exit code.

    Raises:
        MatrixError: an execution fails, or the database. The service starts another process, as this one may still be joined to a
            Ray cluster, and other services can say that they live before.
    """
    os.nice(NICE)
    share_priority(os.getpid())

    def stop(*_: object) -> None:
        raise _Stopped

    signal.signal(signal.SIGTERM, stop)
    # When a run is cancelled. A shell may have made this process ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with_the_service()
    with Store.open(options.store, create=False) as store, suppress(_Stopped):
        while True:
            if row := take(store, claim):
                _execute(store, claim, options, row)
            else:
                time.sleep(_POLL)
    return 0


def take(store: Store, claim: str) -> Row[Any] | None:
    """Claim the first run that waits or whose service has ended; None if no run can be claimed."""
    query = select(SUBMISSION, RUN.c.name).join_from(SUBMISSION, RUN).order_by(SUBMISSION.c.id)
    with store.reading() as connection:
        rows, now = connection.execute(query).all(), connection.scalars(_NOW).one()
    for row in rows:
        if row.claim not in (None, claim) and now - row.seen < _GONE:
            continue
        with store.writing() as connection:
            same = (SUBMISSION.c[name].is_not_distinct_from(getattr(row, name)) for name in ("id", "claim", "seen"))
            values = {"claim": claim, "host": platform.node(), "seen": now, "running": "{}", "tries": row.tries + 1}
            if not connection.execute(update(SUBMISSION).where(*same).values(values)).rowcount:
                continue  # another service was faster
            if row.tries < _TRIES:
                return row
            submissions.remove(connection, row.run_id)
        log.error("%s is interrupted: its execution began %d times without a result", row.name, row.tries)
    return None


def _execute(store: Store, claim: str, options: argparse.Namespace, row: Row[Any]) -> None:
    """Execute a run that was taken. One that was cancelled, or that another service has claimed, ends early.

    Raises:
        MatrixError: it can't be executed now. If it can't ever be, it is interrupted.
        KeyboardInterrupt: the service has ended.
    """
    own = and_(SUBMISSION.c.run_id == row.run_id, SUBMISSION.c.claim == claim)
    progress = Progress(0, 0, Console(quiet=True))
    try:
        with beside(lambda over: _beat(store, own, progress, over), "beat"):
            try:
                jobs = _jobs(store, options, row)
            except MatrixError as error:
                with store.writing() as connection:
                    submissions.remove(connection, row.run_id)
                log.error("%s is interrupted: %s", row.name, error)
                return
            executor = executor_of(options, options.ray is not None)
            progress.log_end = executor.log_end
            runner.execute(row.name, jobs, store, executor, progress, patience=_PATIENCE, finish=False)
    except (_Stopped, Exception) as error:  # let it wait for a service again, if it wasn't cancelled
        why = {"tries": 0} if isinstance(error, _Stopped) else {"reason": str(error)}
        free = {"claim": None, "seen": None, "host": "", "running": "{}", **why}
        with store.writing() as connection:
            connection.execute(update(SUBMISSION).where(own).values(free))
        raise
    except KeyboardInterrupt:
        return
    with store.writing() as connection:  # one transaction: a run that is finished can be retried and deleted
        if connection.execute(delete(SUBMISSION).where(own)).rowcount:
            inserts.finish(connection, row.run_id, "finished")


def _jobs(store: Store, options: argparse.Namespace, row: Row[Any]) -> list[Job]:
    """The jobs of a run that was taken, for the cells that are left."""
    axes = load(options.axes)
    if of_axes(axes) != row.fingerprint:
        said = f"the project or {axes.path.name} has changed since {row.name} was submitted"
        raise MatrixError(f"{said}: submit it again")
    again = {parse(name): attempts for name, attempts in json.loads(row.again).items()}
    cells, attempts = runner.left(store, row.name, axes, again)
    return jobs_of(for_suite(options, row.suite), axes, cells, attempts)


def _beat(store: Store, own: ColumnElement[bool], progress: Progress, over: threading.Event) -> None:
    """Say every few seconds that a run is executed, which cells run, and how their logs end. If the claim is lost, interrupt this process."""
    while not over.is_set():
        now, clock = datetime.now(timezone.utc), time.monotonic()
        running = {
            cell.name: (now - timedelta(seconds=clock - began), progress.log_end(cell))
            for cell, began in [*progress.running.items()]
        }
        values: dict[str, Any] = {"running": json.dumps(running, default=datetime.isoformat)}
        values |= {"tries": 0, "reason": ""} if progress.counts else {}
        with suppress(MatrixError):  # the database is away
            with store.writing() as connection:
                alive = update(SUBMISSION).where(own).values({**values, "seen": connection.scalars(_NOW).one()})
                claimed = connection.execute(alive).rowcount
            if not claimed:
                os.kill(os.getpid(), signal.SIGINT)
                return
        over.wait(_BEAT)
