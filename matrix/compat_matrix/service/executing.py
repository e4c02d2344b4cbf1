"""The runs of a service: they wait in the store, and are executed one after the other, each by a process of its own.

That process does what `run --resume` does, so that neither a lost Ray cluster nor storing results disturbs the requests of the
service. It ends with the service, however that ends.

A service claims a run by a conditional update, and repeats every few seconds that it still executes it. A run whose service has
fallen silent is claimed by another one, or by the same after its restart. No clocks are compared.
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
from sqlalchemy import and_, delete, select, update

from .. import runner
from ..axes import Axes
from ..cells import Cell, parse
from ..errors import MatrixError
from ..fingerprint import of_axes
from ..options import executor_of, jobs_of, revision
from ..processes import fresh, share_priority
from ..progress import Progress
from ..store import Store, inserts, submissions
from ..store.models import RUN, SUBMISSION
from .background import beside
from .submission import Submission, Submitted

#: Seconds between two looks for a run to execute.
_POLL = 1.0
#: Seconds between two signs of life.
_BEAT = 2.0
#: Seconds of silence after which a service counts as gone.
_GONE = 30.0
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


class Queue:
    """The runs of a store that wait for this service or another one on the same database. Thread-safe but for `execute_all`.

    Args:
        axes: the axes whose cells can be run; None if the service runs none.
        check: raises a `MatrixError` if cells can't be run in a suite, such as for a lack of pins.
    """

    def __init__(
        self, store: Store, axes: Axes | None, check: Callable[[Sequence[Cell], str], object] | None = None
    ) -> None:
        self.store, self.axes, self._check = store, axes, check
        self.id = secrets.token_hex(16)
        #: When each claim was first seen as it is, by the monotonic clock.
        self._noticed: dict[tuple[Any, ...], float] = {}

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
        self._runnable(axes, cells, wanted.suite)
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
        suite = found.suite
        if found.state == "running":
            raise submissions.StateError(f"the run {run} hasn't ended: cancel it first")
        if found.revision != (here := revision(axes.folder)):
            raise submissions.StateError(f"the run {run} tested {found.revision or 'no commit'}, and here is {here}")
        if other := next((one for one in ("--pytest", "--latest") if one in found.command), None):
            raise submissions.StateError(f"the run {run} was made with {other}: resume it with the command line")
        again = runner.failed(self.store, run)
        cells, _ = runner.left(self.store, run, axes, again)
        if not cells:
            raise submissions.StateError(f"the run {run} has no cell that failed or is unfinished")
        self._runnable(axes, cells, suite)
        tested = of_axes(axes)
        with self.store.writing() as connection:
            key = inserts.key(connection, run)
            ended = and_(RUN.c.id == key, RUN.c.state != "running")
            taken = connection.execute(update(RUN).where(ended).values(state="running", finished=None)).rowcount
            if taken:
                inserts.submit(connection, key, suite, tested, again)
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

    def _runnable(self, axes: Axes, cells: Sequence[Cell], suite: str) -> None:
        if without := next((cell for cell in cells if axes.tests_of(cell, suite) is None), None):
            raise MatrixError(f"{axes.path.name} has no tests for {without} in the suite {suite!r}")
        if self._check is not None:
            self._check(cells, suite)

    # Execution.

    def execute_all(self, command: Callable[[str], Sequence[str]], over: threading.Event) -> None:
        """Execute the runs that wait, one after the other, until `over` is set.

        Args:
            command: the arguments of ``kernel-compat-matrix`` that execute a run.
        """
        pause = _POLL
        while not over.wait(pause):
            pause = _POLL
            try:
                if (run := self.take()) is not None:
                    code, said = _executed(command(run), over)
                    pause = self._settle(run, code, said, over.is_set())
            except MatrixError as error:  # the database is unavailable, and may come back
                log.warning("%s", error)
            except Exception:
                log.exception("a run can't be executed")

    def take(self) -> str | None:
        """Claim the first run that waits or whose service has ended, and return its id; None if no run can be claimed."""
        query = select(SUBMISSION, RUN.c.name).join_from(SUBMISSION, RUN).order_by(SUBMISSION.c.id)
        try:
            with self.store.reading() as connection:
                rows = connection.execute(query).all()
        except MatrixError:
            self._noticed.clear()  # the other services couldn't say that they live either
            raise
        now = time.monotonic()
        self._noticed = {key: self._noticed.get(key, now) for key in ((row.id, row.claim, row.seen) for row in rows)}
        for row in rows:
            silent = now - self._noticed[row.id, row.claim, row.seen]
            if row.claim not in (None, self.id) and silent < _GONE:
                continue
            with self.store.writing() as connection:
                own = and_(
                    SUBMISSION.c.id == row.id,
                    SUBMISSION.c.claim.is_not_distinct_from(row.claim),
                    SUBMISSION.c.seen.is_not_distinct_from(row.seen),
                )
                values = {
                    "claim": self.id,
                    "host": platform.node(),
                    "seen": datetime.now(timezone.utc),
                    "running": "{}",
                    "tries": row.tries + 1,
                }
                if not connection.execute(update(SUBMISSION).where(own).values(values)).rowcount:
                    continue  # another service was faster
                if row.tries < _TRIES:
                    started = {"state": "running", "finished": None}
                    connection.execute(update(RUN).where(RUN.c.id == row.run_id).values(started))
                    return str(row.name)
                submissions.remove(connection, row.run_id)
            log.error("%s is interrupted: its execution began %d times without a result", row.name, row.tries)
        return None

    def _settle(self, run: str, code: int, said: str, over: bool) -> float:
        """Release a run whose execution has ended before the run did; returns the seconds until the next one may begin."""
        claimed = and_(SUBMISSION.c.claim == self.id, SUBMISSION.c.run_id == RUN.c.id, RUN.c.name == run)
        with self.store.writing() as connection:
            row = connection.execute(select(SUBMISSION.c.run_id, SUBMISSION.c.tries).where(claimed)).one_or_none()
            if row is None:  # it has ended, was cancelled, or has another service
                if code not in (0, 1, _INTERRUPTED):
                    log.warning("%s: %s", run, said)
                return _POLL
            values: dict[str, Any] = {"claim": None, "seen": None, "host": "", "running": "{}"}
            values |= {"tries": 0} if over else {"reason": said}
            own = SUBMISSION.c.run_id == row.run_id
            connection.execute(update(SUBMISSION).where(own).values(values))
            waits = {"state": "running", "finished": None}
            connection.execute(update(RUN).where(RUN.c.id == row.run_id).values(waits))
        if over:
            return 0.0
        pause: float = min(5.0 * 2.0 ** max(row.tries - 1, 0), _PAUSE)
        log.warning("the execution of %s has ended early: %s; once more in %d s", run, said, pause)
        return pause


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
    own = and_(SUBMISSION.c.claim == claim, SUBMISSION.c.run_id == RUN.c.id, RUN.c.name == run)
    with store.reading() as connection:
        row = connection.execute(select(SUBMISSION).where(own)).one_or_none()
    if row is None:  # it was cancelled
        return 1
    console = Console(highlight=False)
    try:
        with _beating(store, row.run_id, claim, Progress(0, 0, console)):
            if of_axes(axes) != row.fingerprint:
                said = f"the project or {axes.path.name} has changed since {run} was submitted"
                raise MatrixError(f"{said}: submit it again")
            again = {parse(name): attempts for name, attempts in json.loads(row.again).items()}
            cells, attempts = runner.left(store, run, axes, again)
            jobs = jobs_of(for_suite(options, row.suite), axes, cells, attempts)
    except MatrixError:
        with store.writing() as connection:
            submissions.remove(connection, row.run_id)
        raise
    executor = executor_of(options, options.ray is not None)
    with Progress(len(cells), executor.jobs, console) as progress, _beating(store, row.run_id, claim, progress):
        counts = runner.execute(run, jobs, store, executor, progress, patience=_PATIENCE, finish=False)
    with store.writing() as connection:
        mine = and_(SUBMISSION.c.run_id == row.run_id, SUBMISSION.c.claim == claim)
        # In one transaction: a run that is finished can be retried and deleted.
        if connection.execute(delete(SUBMISSION).where(mine)).rowcount:
            ended = {"state": "finished", "finished": datetime.now(timezone.utc)}
            connection.execute(update(RUN).where(RUN.c.id == row.run_id).values(ended))
    return 0 if set(counts) <= {"passed"} else 1


def for_suite(options: argparse.Namespace, suite: str) -> argparse.Namespace:
    """The options of a service for `jobs_of`."""
    return argparse.Namespace(**{**vars(options), "suite": suite, "latest": False, "pytest": []})


@contextmanager
def _beating(store: Store, run: int, claim: str, progress: Progress) -> Iterator[None]:
    """Say every few seconds that a run is executed and which cells run. If the claim is lost, interrupt this process."""
    own = and_(SUBMISSION.c.run_id == run, SUBMISSION.c.claim == claim)
    stopped = and_(RUN.c.id == run, RUN.c.state != "running")

    def beat(over: threading.Event) -> None:
        while not over.is_set():
            values: dict[str, Any] = {"seen": datetime.now(timezone.utc), "running": json.dumps(_running(progress))}
            values |= {"tries": 0, "reason": ""} if progress.counts else {}
            with suppress(MatrixError):  # the database is away
                with store.writing() as connection:
                    claimed = connection.execute(update(SUBMISSION).where(own).values(values)).rowcount
                    if claimed:  # the service that had the run before may have interrupted it
                        connection.execute(update(RUN).where(stopped).values(state="running", finished=None))
                if not claimed:
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
            over.wait(_BEAT)

    with beside(beat, "beat", daemon=True):
        yield


def _running(progress: Progress) -> dict[str, str]:
    """The running cells and their beginnings, as text."""
    now, clock = datetime.now(timezone.utc), time.monotonic()
    return {
        cell.name: (now - timedelta(seconds=clock - since)).isoformat() for cell, since in [*progress.running.items()]
    }
