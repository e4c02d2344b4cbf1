"""Runs: executing cells and storing each result in a transaction of its own as soon as it arrives."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING

from . import work
from .axes import Axes
from .cells import Cell, one_and_more
from .errors import MatrixError
from .processes import Hosts
from .progress import Progress
from .results import CellResult
from .store import Store
from .work import Job

if TYPE_CHECKING:
    from .ray_executor import RayExecutor


class Local:
    """Runs jobs on this machine, each in a process of its own with exclusive GPUs.

    Args:
        jobs: the number of cells at a time.
        devices: the GPUs that may be leased.
        fork: fork cells without a GPU from a process that has imported torch, instead of starting each anew.
    """

    def __init__(self, jobs: int, devices: Sequence[str], fork: bool = True) -> None:
        self.jobs = jobs
        self._devices = devices
        self._cancelled = threading.Event()
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="cell")
        self._hosts = Hosts() if fork else None

    def submit(self, job: Job, started: Callable[[Cell], None]) -> Future[CellResult]:
        """Run a job; `started` is called when its cell starts."""
        begun = partial(started, job.cell)
        return self._pool.submit(work.run, job, self._devices, begun, self._cancelled, self._hosts)

    def cancel(self) -> None:
        """End running jobs; their futures raise `work.Cancelled`."""
        self._cancelled.set()
        self.close()

    def close(self) -> None:
        """Free resources, after all jobs have ended."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._hosts is not None:
            self._hosts.close()


def failed(store: Store, run: str) -> dict[Cell, int]:
    """The cells of a run that failed or couldn't run, with the number of their attempts."""
    return {cell: found.attempt for cell, found in store.summary(run).items() if found.verdict in ("failed", "not run")}


def left(store: Store, run: str, axes: Axes, again: Mapping[Cell, int]) -> tuple[list[Cell], dict[Cell, int]]:
    """The cells of a run that must still be run: the unfinished ones and `again`; and the earlier attempts at the latter.

    Args:
        again: the cells to repeat, with their attempts so far; one that has a later attempt by now is left out.

    Raises:
        MatrixError: the axes don't have one of these cells.
    """
    summary = store.summary(run)
    repeated = {cell: attempts for cell, attempts in again.items() if summary[cell].attempt == attempts}
    cells = [*(cell for cell, one in summary.items() if one.state == "unfinished"), *repeated]
    if gone := [cell.name for cell in cells if cell not in axes.all_cells]:
        raise MatrixError(
            f"{axes.path} has no {one_and_more(gone)} any more, which {run} planned: continue with the axes file that it was started with"
        )
    return cells, repeated


def execute(
    run: str,
    jobs: Sequence[Job],
    store: Store,
    executor: Local | RayExecutor,
    progress: Progress,
    *,
    patience: float = 0.0,
    finish: bool = True,
) -> Counter[str]:
    """Run the jobs and store each result; returns the number of cells with each verdict.

    Ctrl-C ends running cells and leaves the run ``interrupted``: finished cells are stored, the others are unfinished.

    Args:
        patience: the seconds for which storing a result is tried again, for a database that is restarted.
        finish: set the state of the run at the end; else the caller does so.

    Raises:
        MatrixError: a result can't be stored; earlier results stay stored.
        KeyboardInterrupt: after the store is in order.
    """
    pending: set[Future[CellResult]] = set()
    try:
        for job in jobs:
            pending.add(executor.submit(job, progress.started))
        while pending:
            done, _ = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in sorted(
                done, key=lambda one: one.exception() is not None
            ):  # an error ends the run: it comes last
                result = future.result()
                if result.verdict != "not run" or result.attempt == 1:  # it would hide the cell's earlier result
                    _add(store, run, result, patience)
                pending.remove(future)
                progress.ended(result)
        executor.close()
    except BaseException as error:
        executor.cancel()
        for future in pending if isinstance(error, KeyboardInterrupt) else ():
            if future.done() and not future.cancelled() and future.exception() is None:
                store.add(run, future.result())
        if finish:
            store.finish(run, "interrupted")
        raise
    if finish:
        store.finish(run, "finished")
    return progress.counts


def _add(store: Store, run: str, result: CellResult, patience: float) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            return store.add(run, result)
        except MatrixError:
            if time.monotonic() >= end:
                raise
            time.sleep(1)
