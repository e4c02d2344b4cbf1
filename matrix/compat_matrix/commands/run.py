"""``kernel-compat-matrix run``: run cells and store their results."""

from __future__ import annotations

import argparse
import os
import platform
import shlex

from rich.console import Console

from .. import gpus, runner
from ..axes import Axes
from ..cells import Cell, many, one_and_more
from ..errors import MatrixError
from ..options import add_selection, add_store, add_working, axes_of, cells_of, jobs_of, partial, positive, revision
from ..progress import Progress
from ..store import Store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add_selection(parser)
    add_store(parser)
    add_working(parser)
    parser.add_argument("-j", "--jobs", type=positive, help="cells to run at a time (default: the number of cores)")
    parser.add_argument("--label", default="", help="a name for the run")
    parser.add_argument(
        "--resume", nargs="?", const="latest", metavar="RUN", help="continue a run (default: the latest whole run)"
    )
    parser.add_argument("--failed", action="store_true", help="with --resume: repeat the cells that failed")
    parser.add_argument(
        "--executor",
        choices=["local", "ray"],
        default="local",
        help="run on this machine, or on the Ray cluster at $RAY_ADDRESS",
    )
    parser.add_argument(
        "--no-fork", action="store_true", help="start a new process for every cell, which imports torch itself"
    )


def run(options: argparse.Namespace) -> int:
    """Run the cells of a new run, or the remaining ones of an earlier run; returns the exit code."""
    axes = axes_of(options)
    if options.failed and options.resume is None:
        raise MatrixError("--failed needs --resume: a new run runs all its cells")
    if options.resume is not None and (options.cells or options.only or options.pairwise or options.shard):
        raise MatrixError(
            "--resume continues with the cells of that run, and can't be combined with a selection of cells"
        )
    console = Console()
    new = options.resume is None
    if new:  # nothing is stored before the input is valid
        cells = cells_of(options, axes)
        work = jobs_of(options, axes, cells, {})
        executor = _executor(options)
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
            cells, attempts = _left(store, run, axes, options.failed)
            if not cells:
                print(f"no cell is left to run in {run}")
                return _code(store, run)
            work = jobs_of(options, axes, cells, attempts)
            executor = _executor(options)
            store.finish(run, "running")
        console.print(f"run {run}: {many(len(cells), 'cell')}, {executor.jobs} at a time", highlight=False)
        with Progress(len(cells), executor.jobs, console) as progress:
            counts = runner.execute(run, work, store, executor, progress)
        summary_line = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        console.print(f"run {run}: {summary_line}", highlight=False)
        return _code(store, run)


def _code(store: Store, run: str) -> int:
    """0 if all cells of a run passed, including those of an interrupted earlier command; else 1."""
    return 0 if {summary.state for summary in store.summary(run).values()} <= {"passed", "excluded"} else 1


def _executor(options: argparse.Namespace) -> runner.Executor:
    if options.executor == "ray":
        from ..ray_executor import RayExecutor

        return RayExecutor(options.jobs, options.cache, fork=not options.no_fork)
    return runner.Local(options.jobs or os.cpu_count() or 1, gpus.visible(), not options.no_fork)


def _left(store: Store, run: str, axes: Axes, failed: bool) -> tuple[list[Cell], dict[Cell, int]]:
    """The unfinished cells of a run, with `failed` also the failed ones, and the number of their earlier attempts."""
    summary = store.summary(run)
    again = [cell for cell, found in summary.items() if failed and found.verdict in ("failed", "not run")]
    cells = [*store.unfinished(run), *again]
    if gone := [cell.name for cell in cells if cell not in axes.all_cells]:
        raise MatrixError(
            f"{axes.path} has no {one_and_more(gone)} any more, which {run} planned: continue with the axes file that it was started with"
        )
    return cells, {cell: summary[cell].attempt for cell in again}
