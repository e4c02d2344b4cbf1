"""A worker: leases cells, runs them and reports their results, also across failures of the service."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import suppress

from .. import work
from ..errors import MatrixError
from ..results import CellResult
from ..runner import Executor
from ..work import Job
from .client import Refused, Service, Unreachable
from .protocol import Leased, Machine, Wanted
from .upload_queue import UploadQueue

#: The largest number of seconds between two requests for a cell while there is none.
_IDLE = 5.0
#: The largest number of seconds between two attempts to reach a service that doesn't respond.
_PATIENCE = 30.0
#: Seconds for sending remaining results when a worker is stopped; the rest stays in the upload queue.
_LAST = 10.0


class Pause:
    """Waiting times that grow and have random jitter."""

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self._next = first

    def again(self, least: float | None = None) -> float:
        """The seconds to wait next, at least `least`."""
        seconds = self._next * random.uniform(0.5, 1.0)
        self._next = min(self._next * 2, self._most)
        return max(seconds, least or 0.0)

    def reset(self) -> None:
        """Start again with the first waiting time."""
        self._next = self._first


class Worker:
    """Leases cells from a service and runs them.

    Args:
        service: the connection to the service.
        machine: the description of this machine; its fingerprint is the value of `fingerprint()`.
        executor: runs the cells.
        job: turns a lease into a job.
        uploads: holds results until the service has them.
        only: an expression; only cells that match it are leased.
        fingerprint: returns the project's current fingerprint. When it changes, the worker ends.
        note: prints a line about the worker's progress.
    """

    def __init__(
        self,
        service: Service,
        machine: Machine,
        executor: Executor,
        job: Callable[[Leased], Job],
        uploads: UploadQueue,
        *,
        only: str | None = None,
        fingerprint: Callable[[], str],
        note: Callable[[str], None],
    ) -> None:
        self._service, self._machine, self._executor, self._job = service, machine, executor, job
        self._uploads, self._only, self._fingerprint, self._note = uploads, only, fingerprint, note
        self._stop = threading.Event()
        self._over = threading.Event()
        self._new = threading.Event()
        self._lock = threading.Lock()
        #: The time, by the local clock, at which each open lease must be renewed.
        self._renewals: dict[str, float] = {}
        self._running: dict[Future[CellResult], tuple[Leased, Job]] = {}
        self._error: MatrixError | None = None
        #: The id of the next lease; replaced after each response.
        self._next = secrets.token_urlsafe(24)
        self.counts: Counter[str] = Counter()

    def stop(self) -> None:
        """Return the leases of running cells and end. May be called from a signal handler."""
        self._stop.set()

    def work(self, *, until_empty: bool = False) -> None:
        """Run cells until `stop`.

        Args:
            until_empty: stop also when there is no cell left for this machine.

        Raises:
            MatrixError: this machine can't continue, or the service refuses it.
        """
        renewer, sender = threads = [threading.Thread(target=one, daemon=True) for one in (self._renew, self._send)]
        renewer.start()
        sender.start()
        try:
            self._loop(until_empty)
        finally:
            self._wind_up(sender)
            self._over.set()
            self._new.set()
            for thread in threads:
                thread.join(_LAST)
        if self._error is not None:
            raise self._error

    def _loop(self, until_empty: bool) -> None:
        idle, patience, ask_at = Pause(0.25, _IDLE), Pause(0.5, _PATIENCE), 0.0
        while not self._stop.is_set():
            self._collect()
            if self._error is not None:
                if not self._running:
                    return
            elif len(self._running) < self._machine.jobs and time.monotonic() >= ask_at:
                try:
                    leased = self._lease()
                except Unreachable as error:
                    seconds = patience.again(error.after)
                    ask_at = time.monotonic() + seconds
                    self._note(f"{error}; once more in {seconds:.0f} s")
                except MatrixError as error:
                    self._error = error
                else:
                    patience.reset()
                    if leased:
                        idle.reset()
                    elif until_empty and not self._running:
                        if not self._uploads.leases():
                            return
                        ask_at = time.monotonic() + 0.1
                    else:
                        ask_at = time.monotonic() + idle.again()
                continue
            if self._running:
                wait(self._running, timeout=0.2, return_when=FIRST_COMPLETED)
            else:
                self._stop.wait(min(max(ask_at - time.monotonic(), 0.0), 0.2))

    def _lease(self) -> bool:
        """Lease a cell and start it; returns whether there was one."""
        if self._fingerprint() != self._machine.fingerprint:
            raise MatrixError("the project or its axes file has changed since this worker was started: restart it")
        tests = [(job.tests, job.cell.device == "cuda") for _, job in self._running.values()]
        wanted = Wanted(
            machine=self._machine,
            free_gpus=max(len(self._machine.gpus) - sum(one.gpus for one, cuda in tests if cuda), 0),
            free_memory=max(self._machine.memory - sum(one.memory for one, _ in tests), 0.0),
            only=self._only,
            lease=self._next,
        )
        asked = time.monotonic()
        leased = self._service.lease(wanted)
        self._next = secrets.token_urlsafe(24)
        if leased is None:
            return False
        with self._lock:
            self._renewals[leased.lease] = asked + leased.seconds / 3
        try:
            job = self._job(leased)
        except BaseException:
            self._give_back(leased)
            raise
        self._running[self._executor.submit(job, lambda _: None)] = (leased, job)
        return True

    def _collect(self) -> None:
        """Store the results of the cells that have ended."""
        for future in [one for one in self._running if one.done()]:
            leased, _ = self._running.pop(future)
            try:
                self._keep(leased, future.result())
            except (work.Cancelled, CancelledError):
                self._give_back(leased)
            except MatrixError as error:  # an error of this machine, which every cell would have
                self._error = error
                self._give_back(leased)
            except BaseException:
                self._give_back(leased)
                raise

    def _keep(self, leased: Leased, result: CellResult) -> None:
        self._uploads.put(leased.lease, result)
        self._new.set()
        self.counts[result.verdict] += 1
        kind = f" ({result.kind})" if result.kind else ""
        reason = f": {result.reason}" if result.reason else ""
        self._note(f"{result.cell} {result.verdict}{kind} {result.seconds:.1f} s{reason}")

    def _give_back(self, leased: Leased) -> None:
        with self._lock:
            self._renewals.pop(leased.lease, None)
        with suppress(Unreachable, MatrixError):  # it ends soon by itself
            self._service.give_back(leased.lease)

    def _wind_up(self, sender: threading.Thread) -> None:
        if self._running:
            self._executor.cancel()
            wait([one for one in self._running if not one.cancelled()], _LAST)
            self._collect()
        else:
            self._executor.close()
        end = time.monotonic() + _LAST
        while self._uploads.leases() and sender.is_alive() and time.monotonic() < end:
            self._new.set()
            time.sleep(0.05)

    def _renew(self) -> None:
        """Renew each lease after a third of its duration. Runs in a thread of its own."""
        while not self._over.wait(0.1):
            with self._lock:
                due = [lease for lease, at in self._renewals.items() if time.monotonic() >= at]
            for lease in due:
                asked = time.monotonic()
                try:
                    again = asked + self._service.renew(lease) / 3
                except Unreachable:
                    again = asked + random.uniform(0.5, 1.5)
                except MatrixError as error:
                    if not isinstance(error, Refused) or error.status != 410:
                        self._note(f"a lease can't be renewed: {error}")
                    with self._lock:
                        self._renewals.pop(lease, None)
                    continue
                with self._lock:
                    if lease in self._renewals:
                        self._renewals[lease] = again

    def _send(self) -> None:
        """Send the results in the upload queue, also those of an earlier worker. Runs in a thread of its own."""
        patience = Pause(0.25, _PATIENCE)
        while True:
            self._new.clear()
            after = _PATIENCE
            for lease in self._uploads.leases():
                try:
                    self._report(lease)
                    patience.reset()
                except Unreachable as error:
                    after = patience.again(error.after)
                    break
                except Refused as error:
                    if error.status in (401, 403):
                        self._error = error
                        return
                    self._note(f"a result was refused: {error}")
                    self._uploads.set_aside(lease)
                except MatrixError as error:
                    self._note(str(error))
                    self._uploads.set_aside(lease)
            if self._over.is_set():
                return
            (self._over if after < _PATIENCE else self._new).wait(after)

    def _report(self, lease: str) -> None:
        result = self._uploads.get(lease)
        if result is not None:
            try:
                if not self._service.report(lease, result, self._uploads.log(lease), time.time()):
                    self._note("a result came after the end of its lease: it is kept, and doesn't count")
            except FileNotFoundError:  # another worker of this queue has just sent it
                pass
            self._uploads.drop(lease)
        with self._lock:
            self._renewals.pop(lease, None)
