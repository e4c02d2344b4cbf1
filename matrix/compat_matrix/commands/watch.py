"""``kernel-compat-matrix watch``: find new releases, scan them for the atlas, run the cells they affect, and report."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import time
from pathlib import Path

from rich.console import Console

from .. import gpus, runner
from ..atlas.index import Index
from ..axes import Axes, cover
from ..cells import Cell
from ..errors import MatrixError
from ..expressions import Expression
from ..options import add_environments, add_store, add_token, axes_of, jobs_of, positive, revision, token_of
from ..progress import Progress
from ..service import watch
from ..store import Store
from ..words import plural


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        f"Asks the package index for releases of {', '.join(watch.DISTRIBUTIONS)} that came out since the last time. Exit codes: "
        "0, nothing is new or all is well; 1, something broke; 2, bad input, or the index can't be reached."
    )
    parser.add_argument("--axes", type=Path, metavar="FILE", help="the axes file (default: matrix/axes.toml)")
    parser.add_argument("--only", metavar="EXPRESSION", help='only affected cells that match, such as "device==cpu"')
    parser.add_argument(
        "--pairwise", action="store_true", help="a small subset of them in which every two values still meet"
    )
    add_store(parser)
    parser.add_argument("--index", metavar="URL", help="the package index (default: the one that pip or uv would use)")
    parser.add_argument("--dry-run", action="store_true", help="list the releases and the cells; store nothing")
    parser.add_argument("--submit", metavar="URL", help="submit the cells to this service, which runs them")
    add_token(parser)
    parser.add_argument("--webhook", metavar="URL", help="POST the report to this address, as JSON")
    parser.add_argument("--every", type=positive, metavar="MINUTES", help="repeat at this interval")
    parser.add_argument("--suite", default="default", help="the suite to run (default: default)")
    parser.add_argument("--pytest", default="", metavar="ARGUMENTS", help="further arguments for pytest, as one string")
    parser.add_argument("-j", "--jobs", type=positive, help="cells to run at a time (default: the number of cores)")
    add_environments(parser)


def run(options: argparse.Namespace) -> int:
    """Look for new releases once, or at an interval for ever; returns the exit code."""
    if options.index is not None:
        os.environ["UV_DEFAULT_INDEX"] = options.index  # also for installers
    if options.webhook is not None:
        watch.checked_url(options.webhook, "--webhook")
    if options.submit is not None:
        watch.checked_url(options.submit, "--submit")
    token = token_of(options, "submit") if options.submit is not None else ""
    axes = axes_of(options)
    if options.only is not None:
        Expression(options.only, axes.own)
    while options.every is not None:
        try:
            _look(options, axes, token)
        except MatrixError as error:  # the index can't be reached now; the next look may succeed
            print(f"kernel-compat-matrix: {error}", file=sys.stderr)
        time.sleep(options.every * 60)
    return _look(options, axes, token)


def _look(options: argparse.Namespace, axes: Axes, token: str) -> int:
    console = Console(highlight=False)

    def note(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    with Store.open(options.store) as store:
        index = Index()
        new = watch.new_releases(store, index, note, learn=not options.dry_run, more=axes.distributions.values())
        if not new:
            note("no release is new")
            return 0
        for distribution, versions in new.items():
            note(f"{distribution}: {', '.join(map(str, versions))} came out")
        extended, touches = watch.touched(axes, new, note)
        touched = _touched(extended, options, touches)
        plan = [(options.suite, cover(touched) if options.pairwise else touched)]
        plan += [one for one in watch.suites(extended, touched, new).items() if one[0] != options.suite]
        if options.dry_run:
            for suite, cells in plan:
                for cell in cells:
                    print(cell if suite == options.suite else f"{cell} --suite {suite}")
            return 0
        scan = watch.read_atlas(store, index, new)
        reports = []
        for suite, cells in plan:
            label = f"watch {', '.join(f'{name} {versions[-1]}' for name, versions in new.items())}"
            if options.submit is not None:
                run = watch.submit(options.submit, token, cells, suite, label) if cells else None
                report = watch.reported(new, scan, suite, run=run, submitted=options.submit, cells=len(cells))
            elif cells:
                before, known = watch.before(store, cells, suite)
                run = _run(options, extended, cells, suite, store, new, touches, console)
                report = watch.judge(new, run, watch.results(store, run), before, known, scan, suite)
            else:
                report = watch.reported(new, scan)
            reports.append(report)
            scan = watch.Scan()  # reported once
        for report in reports:
            watch.publish(store, report)
        watch.remember(store, index, new)
    for report in reports:
        note(report.text)
        if options.webhook is not None and (failure := watch.call(options.webhook, report)):
            print(f"kernel-compat-matrix: {failure}", file=sys.stderr)
    return 0 if all(report.ok for report in reports) else 1


def _touched(axes: Axes, options: argparse.Namespace, touches: watch.Touches) -> list[Cell]:
    only = Expression(options.only) if options.only is not None else None
    return [cell for cell in axes.cells if touches(cell) and (only is None or only(cell))]


def _run(
    options: argparse.Namespace,
    axes: Axes,
    cells: list[Cell],
    suite: str,
    store: Store,
    new: watch.New,
    touches: watch.Touches,
    console: Console,
) -> str:
    arguments = options.pytest if suite == options.suite else ""
    options = argparse.Namespace(**{**vars(options), "latest": True, "suite": suite, "pytest": arguments})
    jobs = jobs_of(options, axes, cells, {})
    executor = runner.Local(options.jobs or os.cpu_count() or 1, gpus.visible())
    releases = ", ".join(f"{name} {version}" for name, versions in new.items() for version in versions)
    words = ["--only", options.only] if options.only else []
    words += ["--suite", suite] if suite != "default" else []
    run = store.new_run(
        cells,
        excluded={cell: why for cell, why in axes.excluded(options.only).items() if touches(cell)},
        axes=f"# With {releases}.\n{axes.path.read_text(encoding='utf-8')}",
        # Not the command as typed: addresses may contain secrets, and this is public.
        command=shlex.join(["watch", *words]),
        label=f"watch {releases}",
        host=platform.node(),
        revision=revision(axes.folder),
        partial=suite != "default" or bool(options.pytest),
    )
    console.print(f"run {run}: {plural(len(cells), 'cell')}, {executor.jobs} at a time", highlight=False)
    with Progress(len(cells), executor.jobs, console) as progress:
        runner.execute(run, jobs, store, executor, progress)
    return run
