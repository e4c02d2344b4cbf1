"""``kernel-compat-matrix run``: run cells and store their results."""

import argparse
import signal

from .. import runner
from ..axes import Axes, load
from ..errors import MatrixError
from ..jobs import execute, executor_of, jobs_of, new_run
from ..results import FINE
from ..store import Store, submissions


def run(options: argparse.Namespace) -> int:
    """Run the cells of a new run, or the remaining ones of an earlier run; returns the exit code.

    SIGTERM, which schedulers send at a time limit, has the effect of Ctrl-C.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    axes = load(options.axes)
    if options.export is not None and options.export.exists():
        raise MatrixError(f"--export {options.export}: it exists")
    if options.export is not None and not options.export.absolute().parent.is_dir():
        raise MatrixError(f"--export {options.export}: there is no such folder")
    selected = bool(options.cells or options.only or options.pairwise or options.shard)
    if options.resume is not None:
        if selected or options.all:
            said = "--resume continues with the cells of that run"
            raise MatrixError(f"{said}, and can't be combined with a selection of cells")
        return _resume(options, axes)
    if options.failed:
        raise MatrixError("--failed needs --resume: a new run runs all its cells")
    if selected and options.all:
        raise MatrixError("--all can't be combined with a selection of cells")
    if not selected and not options.all:
        every = f"--all selects every one that {axes.path.name} has ({len(axes.cells):,})"
        raise MatrixError(f"no cells are selected: {every}")
    cells = axes.select(options.only, options.cells, options.pairwise, options.shard)
    jobs = jobs_of(options, axes, cells, {})
    executor = executor_of(options, options.executor == "ray")
    excluded = {} if options.cells else axes.excluded(options.only)
    with Store.open(options.store) as store:
        run = new_run(options, store, axes, cells, label=options.label, excluded=excluded)
        return int(not execute(run, jobs, store, executor, options.export) <= {*FINE})


def _resume(options: argparse.Namespace, axes: Axes) -> int:
    with Store.open(options.store, create=False) as store:
        run = store.resolve(options.resume)
        if any(one.run == run for one in submissions.waiting(store)):
            raise MatrixError(f"the run {run} waits for a service or is executed by one: cancel it first")
        cells, attempts = runner.left(store, run, axes, runner.failed(store, run) if options.failed else {})
        if cells:
            jobs = jobs_of(options, axes, cells, attempts)
            executor = executor_of(options, options.executor == "ray")
            store.finish(run, "running")
            execute(run, jobs, store, executor, options.export)
        else:
            print(f"no cell is left to run in {run}")
        # Also the cells that an interrupted earlier command ran.
        return int(not {one.state for one in store.summary(run).values()} <= {*FINE, "excluded"})
