"""Runs: executing cells and storing each result in a transaction of its own as soon as it arrives."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

import platformdirs

from . import gpus, pins, work
from .axes import Axes
from .cells import Cell, one_and_more
from .environments import Environments
from .errors import MatrixError
from .locking import ResolutionError
from .processes import Hosts
from .progress import Progress
from .results import CellResult
from .store import Store
from .work import Job


class Executor(Protocol):
    """Runs jobs, several at a time."""

    jobs: int

    def submit(self, job: Job, started: Callable[[Cell], None]) -> Future[CellResult]:
        """Run a job; `started` is called when its cell starts."""
        ...

    def cancel(self) -> None:
        """End running jobs; their futures raise `work.Cancelled`."""
        ...

    def close(self) -> None:
        """Free resources, after all jobs have ended."""
        ...


@dataclass
class Local:
    """Runs jobs on this machine, each in a process of its own with exclusive GPUs.

    Attributes:
        jobs: the number of cells at a time.
        devices: the GPUs that may be leased.
        fork: fork cells without a GPU from a process that has imported torch, instead of starting each anew.
    """

    jobs: int
    devices: Sequence[str]
    fork: bool = True
    cancelled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.jobs, thread_name_prefix="cell")
        self._hosts = Hosts() if self.fork else None

    def submit(self, job: Job, started: Callable[[Cell], None]) -> Future[CellResult]:
        """Run a job; `started` is called when its cell starts."""
        return self._pool.submit(self._run, job, started)

    def cancel(self) -> None:
        """End running jobs; their futures raise `work.Cancelled`."""
        self.cancelled.set()
        self.close()

    def close(self) -> None:
        """Free resources, after all jobs have ended."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._hosts is not None:
            self._hosts.close()

    def _run(self, job: Job, started: Callable[[Cell], None]) -> CellResult:
        if self.cancelled.is_set():
            raise work.Cancelled
        needed = job.tests.gpus if job.cell.device == "cuda" else 0
        if needed > len(self.devices):
            there = {0: "none is", 1: "one is"}.get(len(self.devices), f"{len(self.devices)} are")
            reason = f"it needs {needed} GPU{'s' * (needed != 1)}, and {there} visible"
            return CellResult(
                job.cell, "not run", "hardware", reason, datetime.now(timezone.utc), 0.0, attempt=job.attempt
            )
        with gpus.leased(needed, self.devices, self.cancelled) as held:
            if len(held) < needed:
                raise work.Cancelled
            started(job.cell)
            return work.run(job, held, self.cancelled, self._hosts)


def jobs_of(
    axes: Axes,
    cells: Sequence[Cell],
    environments: Environments,
    *,
    suite: str = "default",
    pin_folder: Path,
    latest: bool = False,
    arguments: Sequence[str] = (),
    attempts: Mapping[Cell, int] | None = None,
) -> list[Job]:
    """The jobs for these cells.

    Args:
        latest: resolve the newest releases instead of using the pins.
        attempts: the number of earlier attempts, by cell.

    Raises:
        MatrixError: pins are missing or invalid, or a cell has no tests.
    """
    if not (environments.project / "pyproject.toml").is_file():
        raise MatrixError(f"{environments.project} has no pyproject.toml: no project to test")
    found = pins.of_cells(axes, cells, pin_folder, latest)
    jobs = []
    for cell in cells:
        tests = axes.tests_of(cell, suite)
        if tests is None:
            raise MatrixError(f"{axes.path.name} has no tests for {cell} in the suite {suite!r}")
        base, layer = found[cell.base], found[cell.layer]
        parts: tuple[pins.Part, pins.Part] | str
        if isinstance(base, ResolutionError):
            parts = str(base)
        elif isinstance(layer, ResolutionError):
            parts = str(layer)
        else:
            parts = (base, layer)
        attempt = (attempts or {}).get(cell, 0) + 1
        jobs.append(Job(cell, parts, tests, environments, attempt, tuple(arguments), axes.known_of(cell)))
    try:
        environments.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MatrixError(f"environments can't be kept in {environments.root}: {error.strerror}") from None
    return jobs


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
    executor: Executor,
    progress: Progress,
    *,
    patience: float = 0.0,
) -> Counter[str]:
    """Run the jobs and store each result; returns the number of cells with each verdict.

    Ctrl-C ends running cells and leaves the run ``interrupted``: finished cells are stored, the others are unfinished.

    Args:
        patience: the seconds for which storing a result is tried again, for a database that is restarted.

    Raises:
        MatrixError: a result can't be stored; earlier results stay stored.
        KeyboardInterrupt: after the store is in order.
    """
    counts: Counter[str] = Counter()
    pending: set[Future[CellResult]] = set()
    with _ended_in_order(run, store, executor, pending):
        for job in jobs:
            pending.add(executor.submit(job, progress.started))
        while pending:
            done, _ = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in done:
                result = future.result()
                if result.verdict != "not run" or result.attempt == 1:  # it would hide the cell's earlier result
                    _add(store, run, result, patience)
                pending.remove(future)
                progress.ended(result)
                counts[result.verdict] += 1
    return counts


def _add(store: Store, run: str, result: CellResult, patience: float) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            store.add(run, result)
        except MatrixError:
            if time.monotonic() >= end:
                raise
            time.sleep(1)
        else:
            return


@contextmanager
def _ended_in_order(
    run: str, store: Store, executor: Executor, pending: Collection[Future[CellResult]]
) -> Iterator[None]:
    try:
        yield
        executor.close()
    except BaseException as error:
        executor.cancel()
        for future in pending if isinstance(error, KeyboardInterrupt) else ():
            if future.done() and not future.cancelled() and future.exception() is None:
                store.add(run, future.result())
        store.finish(run, "interrupted")
        raise
    store.finish(run, "finished")


def default_root() -> Path:
    """The default folder of the environments."""
    named = os.environ.get("KERNEL_COMPAT_MATRIX_CACHE")
    return Path(named) if named else platformdirs.user_cache_path("kernel-compat-matrix")
