"""``kernel-compat-matrix run``: run cells and store their results."""

from __future__ import annotations

import argparse
import platform
import shlex
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from .. import runner
from ..axes import Axes
from ..cells import Cell
from ..errors import MatrixError
from ..options import (
    add_executor,
    add_selection,
    add_store,
    add_working,
    axes_of,
    cells_of,
    check_bounded,
    executor_of,
    jobs_of,
    partial,
    revision,
)
from ..progress import Progress
from ..results import FINE
from ..store import Store, submissions
from ..words import plural
from ..work import Job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add_selection(parser)
    parser.add_argument("--all", action="store_true", help="run every cell: without a selection this is needed")
    add_store(parser)
    add_working(parser)
    parser.add_argument("--label", default="", help="a name for the run")
    parser.add_argument(
        "--resume", nargs="?", const="latest", metavar="RUN", help="continue a run (default: the latest whole run)"
    )
    parser.add_argument("--failed", action="store_true", help="with --resume: repeat the cells that failed")
    parser.add_argument(
        "--retry-failed",
        action="store_true",
        help="repeat failed tests once; a test that passes the second time is flaky, and doesn't fail the run",
    )
    parser.add_argument(
        "--executor",
        choices=["local", "ray"],
        default="local",
        help="run on this machine, or on the Ray cluster at $RAY_ADDRESS",
    )
    add_executor(parser)
    parser.add_argument(
        "--export", type=Path, metavar="FILE", help="write the run into a new file at the end, for `merge` elsewhere"
    )


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
    if options.failed and options.resume is None:
        raise MatrixError("--failed needs --resume: a new run runs all its cells")
    if options.resume is not None and (
        options.cells or options.only or options.pairwise or options.shard or options.all
    ):
        raise MatrixError(
            "--resume continues with the cells of that run, and can't be combined with a selection of cells"
        )
    if options.export is not None:
        _check_export(options.export)
    console = Console()
    new = options.resume is None
    ray = options.executor == "ray"
    if new:  # nothing is stored before the input is valid
        check_bounded(options, axes)
        cells = cells_of(options, axes)
        work = _jobs(options, axes, cells, {})
        executor = executor_of(options, ray)
    with Store.open(options.store, create=new) as store:
        if new:
            run = store.new_run(
                cells,
                excluded={} if options.cells else axes.excluded(options.only),
                axes=axes.path.read_text(encoding="utf-8"),
                command=shlex.join(options.words),
                label=options.label,
                host=platform.node(),
                revision=revision(axes.folder),
                partial=partial(options),
            )
        else:
            run = store.resolve(options.resume)
            submissions.check_free(store, run)
            cells, attempts = runner.left(store, run, axes, runner.failed(store, run) if options.failed else {})
            if not cells:
                print(f"no cell is left to run in {run}")
                return _code(store, run)
            work = _jobs(options, axes, cells, attempts)
            executor = executor_of(options, ray)
            store.finish(run, "running")
        console.print(f"run {run}: {plural(len(cells), 'cell')}, {executor.jobs} at a time", highlight=False)
        try:
            with Progress(len(cells), executor.jobs, console) as progress:
                counts = runner.execute(run, work, store, executor, progress)
        finally:  # also what an interrupted run has
            if options.export is not None:
                store.export([run], options.export)
        summary_line = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        console.print(f"run {run}: {summary_line}", highlight=False)
        if new:  # whatever the other parts of the run gave
            return 0 if {*counts} <= {*FINE} else 1
        return _code(store, run)


def _jobs(options: argparse.Namespace, axes: Axes, cells: list[Cell], attempts: Mapping[Cell, int]) -> list[Job]:
    return [replace(job, retry=options.retry_failed) for job in jobs_of(options, axes, cells, attempts)]


def _check_export(path: Path) -> None:
    """Check before a run that its file can be written after it."""
    if path.exists():
        raise MatrixError(f"--export {path}: it exists")
    if not path.absolute().parent.is_dir():
        raise MatrixError(f"--export {path}: there is no such folder")


def _code(store: Store, run: str) -> int:
    """1 if a cell of a run failed or has no result, including those of an interrupted earlier command; else 0."""
    return 0 if {summary.state for summary in store.summary(run).values()} <= {*FINE, "excluded"} else 1
