"""A worker: leases cells, runs them, and reports what they gave, whatever becomes of the service meanwhile."""

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

#: Seconds between two questions for a cell where there was none, at most.
_IDLE = 5.0
#: Seconds between two attempts to reach a service that doesn't answer, at most.
_PATIENCE = 30.0
#: Seconds for results that are still to be sent when a worker is told to end; the rest stays in the upload queue.
_LAST = 10.0


class Pause:
    """How long to wait, longer each time, and never as long as others do."""

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self._next = first

    def again(self, least: float | None = None) -> float:
        seconds = self._next * random.uniform(0.5, 1.0)
        self._next = min(self._next * 2, self._most)
        return max(seconds, least or 0.0)

    def reset(self) -> None:
        self._next = self._first


class Worker:
    """
    Args:
        service: where cells are from.
        machine: what this one is; its fingerprint is what `fingerprint` gives.
        executor: what runs them.
        job: what a lease says, as there is to run here.
        uploads: where results wait until the service has them.
        only: an expression; such cells alone are leased.
        fingerprint: of the project as it is now. One that changes ends the worker.
        note: for lines about what happens.
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
        #: What is leased and not reported: until when, by our clock, the lease is to be renewed.
        self._renewals: dict[str, float] = {}
        self._running: dict[Future[CellResult], tuple[Leased, Job]] = {}
        self._error: MatrixError | None = None
        #: What the next lease is called; another one once an answer was heard.
        self._next = secrets.token_urlsafe(24)
        self.counts: Counter[str] = Counter()

    def stop(self) -> None:
        """Give back what runs, and end. From a signal handler too."""
        self._stop.set()

    def work(self, *, until_empty: bool = False) -> None:
        """Run cells until `stop`.

        Args:
            until_empty: or until there is nothing more for this machine.

        Raises:
            MatrixError: this machine can't go on, or the service won't have it.
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
        """Take a cell, and begin with it; whether there was one."""
        if self._fingerprint() != self._machine.fingerprint:
            raise MatrixError("the project or its axes file has changed since this worker began: start it again")
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
        """Keep the results that are there."""
        for future in [one for one in self._running if one.done()]:
            leased, _ = self._running.pop(future)
            try:
                self._keep(leased, future.result())
            except (work.Cancelled, CancelledError):
                self._give_back(leased)
            except MatrixError as error:  # of this machine, and so of every cell
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
        with suppress(Unreachable, MatrixError):  # it ends by itself
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
        """Of a thread of its own: lease by lease, when a third of its time is over."""
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
        """Of a thread of its own: sends the results in the queue, also those of an earlier worker."""
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
                    self._note(f"a result isn't taken: {error}")
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
