"""The runs of a service: they wait in the store, and are executed one after the other, each by a process of its own.

That process does what `run --resume` does, so that neither a lost Ray cluster nor storing results disturbs the requests of the
service. It ends with the service, however that ends.

A service claims a run by a conditional update, and repeats every few seconds that it still executes it. A run whose service has
fallen silent is claimed by another one, or by the same after its restart. The clock of the database counts for all of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import secrets
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from sqlalchemy import ColumnElement, Connection, and_, delete, func, select, update

from .. import runner
from ..axes import Axes
from ..cells import Cell, parse
from ..errors import MatrixError
from ..fingerprint import of_axes
from ..options import executor_of, jobs_of, revision
from ..processes import fresh, share_priority
from ..progress import Progress
from ..store import Store, inserts, submissions
from ..store.models import RUN, SUBMISSION, Utc
from .submission import Submission, Submitted

#: Seconds between two looks for a run to execute.
_POLL = 1.0
#: Seconds between two signs of life.
_BEAT = 2.0
#: The silence after which a service counts as gone.
_GONE = timedelta(seconds=30)
#: Seconds after a failure of the database in which the other services can say that they live.
_RECOVERY = 3 * _BEAT
#: How often the execution of a run may begin without a result before the run is given up.
_TRIES = 10
#: The longest pause between two of these, in seconds.
_PAUSE = 300.0
#: Seconds for cells to end in order when the service is stopped.
_GRACE = 30.0
#: The exit code of an interrupted process.
_INTERRUPTED = 130
#: The priority of processes that run cells and copy runs, as in `nice`: readers come first.
NICE = 10
#: Seconds for which results wait for a database that is away.
_PATIENCE = 600.0

log = logging.getLogger(__name__)


@contextmanager
def beside(work: Callable[[threading.Event], object], name: str) -> Iterator[None]:
    """Run a function in a thread, and wait for its end when the block is left. It is called with an event that is set then."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Queue:
    """The runs of a store that wait for this service or another one on the same database. Thread-safe but for `execute_all`.

    Args:
        axes: the axes whose cells can be run; None if the service runs none.
        options: those of `serve`; None if nothing is executed, and pins aren't checked.
    """

    def __init__(self, store: Store, axes: Axes | None, options: argparse.Namespace | None = None) -> None:
        self.store, self.axes, self._options = store, axes, options
        self.id = secrets.token_hex(16)

    # Requests.

    def submit(self, wanted: Submission) -> Submitted:
        """Create a run of cells of the axes.

        Raises:
            MatrixError: it selects no cells or unknown ones, a cell has no tests or no pins, or nothing is run here.
        """
        axes = self._axes()
        if not (wanted.cells or wanted.only or wanted.all):
            raise MatrixError(
                f'no cells are selected: "all": true selects every one that {axes.path.name} has ({len(axes.cells):,})'
            )
        if wanted.all and (wanted.cells or wanted.only):
            raise MatrixError('"all" can\'t be combined with a selection of cells')
        cells = axes.select(wanted.only, wanted.cells)
        excluded = {} if wanted.cells else axes.excluded(wanted.only)
        self._check(axes, cells, wanted.suite)
        words = ["run", *wanted.cells, *([f"--only={wanted.only}"] if wanted.only else [])]
        words += ["--all"] if wanted.all else []
        words += [f"--suite={wanted.suite}"] if wanted.suite != "default" else []
        name = self.store.new_run(
            cells,
            excluded=excluded,
            axes=axes.path.read_text(encoding="utf-8"),
            command=shlex.join(words),
            label=wanted.label,
            host=platform.node(),
            revision=revision(axes.folder),
            partial=wanted.suite != "default",
            submission={"suite": wanted.suite, "fingerprint": of_axes(axes)},
        )
        return Submitted(run=name, cells=len(cells), excluded=len(excluded))

    def retry(self, run: str) -> Submitted:
        """Run the failed and the unfinished cells of a run that has ended.

        Raises:
            StateError: it hasn't ended, all its cells passed, or it tested something else than this service would.
            MatrixError: it doesn't exist, or a cell can't be run here.
        """
        axes, found = self._axes(), self.store.run(run)
        if found.revision != (here := revision(axes.folder)):
            raise submissions.StateError(f"the run {run} tested {found.revision or 'no commit'}, and here is {here}")
        if other := next((one for one in ("--pytest", "--latest") if one in found.command), None):
            raise submissions.StateError(f"the run {run} was made with {other}: resume it with the command line")
        again = runner.failed(self.store, run)
        cells, _ = runner.left(self.store, run, axes, again)
        if not cells:
            raise submissions.StateError(f"the run {run} has no cell that failed or is unfinished")
        self._check(axes, cells, found.suite)
        tested = of_axes(axes)
        with self.store.writing() as connection:
            key = inserts.key(connection, run)
            begin = update(RUN).where(RUN.c.id == key, RUN.c.state != "running").values(state="running", finished=None)
            taken = connection.execute(begin).rowcount
            if taken:
                inserts.submit(connection, key, found.suite, tested, again)
        if not taken:
            raise submissions.StateError(f"the run {run} hasn't ended: cancel it first")
        return Submitted(run=run, cells=len(cells), excluded=0)

    @property
    def suites(self) -> list[str]:
        """The suites that can be run."""
        return sorted({tests.suite for tests in self.axes.tests}) if self.axes else []

    def _axes(self) -> Axes:
        if self.axes is None:
            raise MatrixError("this service runs no cells: it was started with --no-run or without an axes file")
        return self.axes

    def _check(self, axes: Axes, cells: Sequence[Cell], suite: str) -> None:
        if without := next((cell for cell in cells if axes.tests_of(cell, suite) is None), None):
            raise MatrixError(f"{axes.path.name} has no tests for {without} in the suite {suite!r}")
        if self._options is not None:
            jobs_of(_for_suite(self._options, suite), axes, cells, {})

    # Execution.

    def execute_all(self, over: threading.Event) -> None:
        """Execute the runs that wait, one after the other, until `over` is set."""
        assert self._options is not None
        pause = _POLL
        while not over.wait(pause):
            pause = _POLL
            try:
                if (run := self.take()) is not None:
                    code, said = _executed([*self._options.words, "--execute", run, self.id], over)
                    pause = self._settle(run, code, said, over.is_set())
            except MatrixError as error:  # the database is unavailable, and may come back
                log.warning("%s", error)
                pause = _RECOVERY
            except Exception:
                log.exception("a run can't be executed")

    def take(self) -> str | None:
        """Claim the first run that waits or whose service has ended, and return its id; None if no run can be claimed."""
        query = select(SUBMISSION, RUN.c.name).join_from(SUBMISSION, RUN).order_by(SUBMISSION.c.id)
        with self.store.reading() as connection:
            rows, now = connection.execute(query).all(), _now(connection)
        for row in rows:
            if row.claim not in (None, self.id) and now - row.seen < _GONE:
                continue
            with self.store.writing() as connection:
                same = (SUBMISSION.c[name].is_not_distinct_from(getattr(row, name)) for name in ("id", "claim", "seen"))
                claim = {
                    "claim": self.id,
                    "host": platform.node(),
                    "seen": now,
                    "running": "{}",
                    "tries": row.tries + 1,
                }
                if not connection.execute(update(SUBMISSION).where(*same).values(claim)).rowcount:
                    continue  # another service was faster
                if row.tries < _TRIES:
                    return str(row.name)
                submissions.remove(connection, row.run_id)
            log.error("%s is interrupted: its execution began %d times without a result", row.name, row.tries)
        return None

    def _settle(self, run: str, code: int, said: str, over: bool) -> float:
        """Release a run whose execution has ended before the run did; returns the seconds until the next one may begin."""
        own = _own(self.id, run)
        values: dict[str, Any] = {"claim": None, "seen": None, "host": "", "running": "{}"}
        values |= {"tries": 0} if over else {"reason": said}
        with self.store.writing() as connection:
            tries = connection.scalar(select(SUBMISSION.c.tries).where(own))
            connection.execute(update(SUBMISSION).where(own).values(values))
        if tries is None:  # the run has ended, was cancelled, or has another service
            if code not in (0, 1, _INTERRUPTED):
                log.warning("%s: %s", run, said)
            return _POLL
        if over:
            return 0.0
        pause: float = min(5.0 * 2.0 ** max(tries - 1, 0), _PAUSE)
        log.warning("the execution of %s has ended early: %s; once more in %d s", run, said, pause)
        return pause


def _own(claim: str, run: str) -> ColumnElement[bool]:
    """The condition that a run is claimed by this service."""
    key = select(RUN.c.id).where(RUN.c.name == run).scalar_subquery()
    return and_(SUBMISSION.c.claim == claim, SUBMISSION.c.run_id == key)


def _now(connection: Connection) -> datetime:
    """The time by the clock of the database."""
    return connection.execute(select(func.now(type_=Utc))).scalar_one()


def _executed(words: Sequence[str], over: threading.Event) -> tuple[int, str]:
    """Execute a run in a process of its own; returns its exit code and the last line of its output.

    `over` ends it, as Ctrl-C ends `run`.
    """
    with tempfile.TemporaryDirectory(prefix="kernel-compat-matrix-") as folder:
        output = Path(folder) / "output"
        process = fresh([sys.executable, "-m", "compat_matrix", *words], os.environ, Path.cwd(), output)
        try:
            while True:
                try:
                    code = process.wait(0.5)
                    break
                except TimeoutError:
                    if over.is_set():
                        with suppress(ProcessLookupError):
                            os.kill(process.pid, signal.SIGTERM)
                        process.end(_GRACE)
        finally:
            process.end()
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
        said = lines[-1][-1000:] if lines and code > 0 else f"exit code {code}"
        return code, said.removeprefix("kernel-compat-matrix: ")


def execute(options: argparse.Namespace, axes: Axes, store: Store, run: str, claim: str) -> int:
    """Execute a run in this process for the service that has claimed it; returns the exit code.

    Args:
        options: the options of that service.

    Raises:
        MatrixError: it can't be executed now; if it can't ever be, it is interrupted.
        KeyboardInterrupt: it was cancelled, or the service is stopped.
    """
    os.nice(NICE)
    share_priority(os.getpid())
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the shell may have made it ignore SIGINT
    own = _own(claim, run)
    with store.reading() as connection:
        row = connection.execute(select(SUBMISSION).where(own)).one_or_none()
    if row is None:  # it was cancelled
        return 1
    progress, problem = Progress(0, 0, Console(highlight=False)), None
    with _beating(store, own, progress):
        try:
            if of_axes(axes) != row.fingerprint:
                said = f"the project or {axes.path.name} has changed since {run} was submitted"
                raise MatrixError(f"{said}: submit it again")
            again = {parse(name): attempts for name, attempts in json.loads(row.again).items()}
            cells, attempts = runner.left(store, run, axes, again)
            jobs = jobs_of(_for_suite(options, row.suite), axes, cells, attempts)
        except MatrixError as error:
            problem = error
        else:
            executor = executor_of(options, options.ray is not None)
            progress.total, progress.jobs = len(cells), executor.jobs
            with progress:
                counts = runner.execute(run, jobs, store, executor, progress, patience=_PATIENCE, finish=False)
    if problem is not None:
        with store.writing() as connection:
            submissions.remove(connection, row.run_id)
        raise problem
    with store.writing() as connection:
        # In one transaction: a run that is finished can be retried and deleted.
        if connection.execute(delete(SUBMISSION).where(own)).rowcount:
            ended = {"state": "finished", "finished": datetime.now(timezone.utc)}
            connection.execute(update(RUN).where(RUN.c.id == row.run_id).values(ended))
    return 0 if counts.keys() <= {"passed"} else 1


def _for_suite(options: argparse.Namespace, suite: str) -> argparse.Namespace:
    """The options of a service for `jobs_of`."""
    return argparse.Namespace(**{**vars(options), "suite": suite, "latest": False, "pytest": []})


@contextmanager
def _beating(store: Store, own: ColumnElement[bool], progress: Progress) -> Iterator[None]:
    """Say every few seconds that a run is executed and which cells run. If the claim is lost, interrupt this process."""

    def beat(over: threading.Event) -> None:
        while not over.is_set():
            now, clock = datetime.now(timezone.utc), time.monotonic()
            begun = {
                cell.name: (now - timedelta(seconds=clock - since)).isoformat()
                for cell, since in [*progress.running.items()]
            }
            values: dict[str, Any] = {"running": json.dumps(begun)}
            values |= {"tries": 0, "reason": ""} if progress.counts else {}
            with suppress(MatrixError):  # the database is away
                with store.writing() as connection:
                    alive = update(SUBMISSION).where(own).values(values | {"seen": _now(connection)})
                    claimed = connection.execute(alive).rowcount
                if not claimed:
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
            over.wait(_BEAT)

    with beside(beat, "beat"):
        yield
