"""Runs: executing cells and storing each result in a transaction of its own as soon as it arrives."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
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


#: The most of a log that is shown while its cell runs: bytes and lines.
_LOG_END, _LOG_LINES = 2_000, 12


class Local:
    """Runs a number of jobs at a time on this machine, each in a process of its own."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="cell")
        self._hosts = Hosts()

    def submit(self, job: Job, started: Callable[[Cell], object]) -> Future[CellResult]:
        """Run a job; `started` is called when its cell starts."""
        return self._pool.submit(work.run, job, started, self._hosts)

    def log_end(self, cell: Cell) -> str:
        """The last lines of the log of a cell that runs; empty before its process has started."""
        try:
            with self._hosts.logs[cell].open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_END))
                text = file.read(_LOG_END).decode(errors="replace")
        except (KeyError, OSError):
            return ""
        return "\n".join(text.splitlines()[-_LOG_LINES:])

    def cancel(self) -> None:
        """End running jobs; their futures raise `work.Cancelled`."""
        self._hosts.cancelled.set()
        self.close()

    def close(self) -> None:
        """Free resources, after all jobs have ended."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._hosts.close()


def failed(store: Store, run: str) -> dict[Cell, int]:
    """The cells of a run that failed or couldn't run, with the number of their attempts."""
    return {cell: found.attempt for cell, found in store.summary(run).items() if found.verdict in ("failed", "not run")}


def left(store: Store, run: str, axes: Axes, again: Mapping[Cell, int]) -> tuple[list[Cell], dict[Cell, int]]:
    """The cells of a run that must still be run, unfinished ones and those in `again`; and the earlier attempts at the latter.

    Args:
        again: cells with their attempts so far; one that has a later attempt by now is left out.

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

    An error and Ctrl-C end running cells and leave the run ``interrupted``: finished cells are stored, the others are unfinished.

    Args:
        patience: the seconds for which storing a result is tried again, for a database that is restarted.
        finish: set the state of the run at the end; else the caller does so.
    """

    def store_result(result: CellResult, patience: float) -> None:
        if result.verdict == "not run" and result.attempt > 1:
            return  # it would hide the cell's earlier result
        end = time.monotonic() + patience
        while True:
            try:
                return store.add(run, result)
            except MatrixError:
                if time.monotonic() >= end:
                    raise
                time.sleep(1)

    left: set[Future[CellResult]] = set()
    try:
        for job in jobs:
            left.add(executor.submit(job, progress.started))
        for future in as_completed(left):
            result = future.result()
            store_result(result, patience)
            left.remove(future)
            progress.ended(result)
        executor.close()
    except BaseException:
        executor.cancel()
        with suppress(MatrixError):  # the same error again
            for future in left:
                if future.done() and not future.cancelled() and future.exception() is None:
                    store_result(future.result(), 0)
        if finish:
            store.finish(run, "interrupted")
        raise
    if finish:
        store.finish(run, "finished")
    return progress.counts
