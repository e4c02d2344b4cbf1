"""``kernel-compat-matrix run``: run cells and store their results."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from .. import runner
from ..arguments import ENVIRONMENTS, EXECUTOR, LATEST, SELECTION, STORE, TESTS, Arguments, flag, option
from ..axes import Axes
from ..cells import Cell
from ..errors import MatrixError
from ..options import axes_of, cells_of, check_bounded, execute, executor_of, jobs_of, new_run
from ..results import FINE
from ..store import Store, submissions
from ..work import Job

ARGUMENTS: Arguments = {
    **SELECTION,
    "--all": flag("run every cell: without a selection this is needed"),
    **STORE,
    **TESTS,
    **LATEST,
    **ENVIRONMENTS,
    "--label": option("a name for the run", default=""),
    "--resume": option("continue a run (default: the latest whole run)", nargs="?", const="latest", metavar="RUN"),
    "--failed": flag("with --resume: repeat the cells that failed"),
    "--retry-failed": flag(
        "repeat failed tests once; a test that passes the second time is flaky, and doesn't fail the run"
    ),
    "--executor": option(
        "run on this machine, or on the Ray cluster at $RAY_ADDRESS", choices=["local", "ray"], default="local"
    ),
    **EXECUTOR,
    "--export": option("write the run into a new file at the end, for `merge` elsewhere", type=Path, metavar="FILE"),
}


def run(options: argparse.Namespace) -> int:
    """Run the cells of a new run, or the remaining ones of an earlier run; returns the exit code.

    SIGTERM, which schedulers send at a time limit, has the effect of Ctrl-C.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(options)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: argparse.Namespace) -> int:
    axes = axes_of(options)
    new, ray = options.resume is None, options.executor == "ray"
    if options.failed and new:
        raise MatrixError("--failed needs --resume: a new run runs all its cells")
    if not new and (options.cells or options.only or options.pairwise or options.shard or options.all):
        raise MatrixError(
            "--resume continues with the cells of that run, and can't be combined with a selection of cells"
        )
    if options.export is not None and options.export.exists():
        raise MatrixError(f"--export {options.export}: it exists")
    if options.export is not None and not options.export.absolute().parent.is_dir():
        raise MatrixError(f"--export {options.export}: there is no such folder")
    if new:  # nothing is stored before the input is valid
        check_bounded(options, axes)
        cells = cells_of(options, axes)
        work = _jobs(options, axes, cells, {})
        executor = executor_of(options, ray)
    with Store.open(options.store, create=new) as store:
        if new:
            excluded = {} if options.cells else axes.excluded(options.only)
            run = new_run(options, store, axes, cells, label=options.label, excluded=excluded)
        else:
            run = store.resolve(options.resume)
            if any(one.run == run for one in submissions.waiting(store)):
                raise MatrixError(f"the run {run} waits for a service or is executed by one: cancel it first")
            cells, attempts = runner.left(store, run, axes, runner.failed(store, run) if options.failed else {})
            if not cells:
                print(f"no cell is left to run in {run}")
                return _code(store, run)
            work = _jobs(options, axes, cells, attempts)
            executor = executor_of(options, ray)
            store.finish(run, "running")
        try:
            verdicts = execute(run, work, store, executor, Console())
        finally:  # also what an interrupted run has
            if options.export is not None:
                store.export([run], options.export)
        # Of a new run, whatever the other parts of the run gave.
        return int(not verdicts <= {*FINE}) if new else _code(store, run)


def _jobs(options: argparse.Namespace, axes: Axes, cells: list[Cell], attempts: Mapping[Cell, int]) -> list[Job]:
    return [replace(job, retry=options.retry_failed) for job in jobs_of(options, axes, cells, attempts)]


def _code(store: Store, run: str) -> int:
    """1 if a cell of a run failed or has no result, including those of an interrupted earlier command; else 0."""
    return 0 if {summary.state for summary in store.summary(run).values()} <= {*FINE, "excluded"} else 1
