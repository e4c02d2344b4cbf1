"""``kernel-compat-matrix watch``: find new releases, scan them for the atlas, run the cells they affect, and report."""

from __future__ import annotations

import argparse
import os
import sys
import time

from rich.console import Console

from ..atlas.index import Index
from ..axes import Axes, cover
from ..cells import Cell
from ..errors import MatrixError
from ..expressions import Expression
from ..options import axes_of, execute, executor_of, jobs_of, new_run, token_of
from ..service import watch
from ..store import Store
from ..store.documents import NEWS, keep


def run(options: argparse.Namespace) -> int:
    """Look for new releases once, or at an interval for ever; returns the exit code."""
    if options.index is not None:
        os.environ["UV_DEFAULT_INDEX"] = options.index  # also for installers
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
        only = Expression(options.only) if options.only is not None else None
        touched = [cell for cell in extended.cells if touches(cell) and (only is None or only(cell))]
        plan = [(options.suite, cover(touched) if options.pairwise else touched)]
        plan += [one for one in watch.suites(extended, touched, new).items() if one[0] != options.suite]
        if options.dry_run:
            for suite, cells in plan:
                for cell in cells:
                    print(cell if suite == options.suite else f"{cell} --suite {suite}")
            return 0
        scan = watch.read_atlas(store, index, new)
        reports = []
        releases = {name: [*map(str, versions)] for name, versions in new.items()}
        for suite, cells in plan:
            report = watch.Report(
                **dict(scan), releases=releases, suite=suite, cells=len(cells), submitted=options.submit
            )
            if cells and options.submit is not None:
                report.run = watch.submit(options.submit, token, cells, suite, f"watch {watch.named(new)}")
            elif cells:
                before = watch.newest(store, suite)
                report.run = _run(options, extended, cells, suite, store, new, touches, console)
                report.failed = watch.failures(store, report.run, new, before)
                report.passed = sum(one.state == "passed" for one in store.summary(report.run).values())
            reports.append(report)
            scan = watch.Scan()  # reported once
        for report in reports:
            keep(store, NEWS, report.model_dump_json())
        watch.remember(store, index, new)
    for report in reports:
        note(report.text)
        if options.webhook is not None and (failure := watch.call(options.webhook, report)):
            print(f"kernel-compat-matrix: {failure}", file=sys.stderr)
    return 0 if all(report.ok for report in reports) else 1


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
    arguments = options.pytest if suite == options.suite else []
    # Not the command as typed: addresses may contain secrets, and this is public.
    words = ["watch", *(["--only", options.only] if options.only else [])]
    words += ["--suite", suite] if suite != "default" else []
    changed = {"latest": True, "suite": suite, "pytest": arguments, "no_fork": False, "words": words}
    options = argparse.Namespace(**{**vars(options), **changed})
    jobs = jobs_of(options, axes, cells, {})
    run = new_run(
        options,
        store,
        axes,
        cells,
        excluded={cell: why for cell, why in axes.excluded(options.only).items() if touches(cell)},
        axes=f"# With {watch.named(new)}.\n{axes.path.read_text(encoding='utf-8')}",
        label=f"watch {watch.named(new)}",
        partial=suite != "default" or bool(options.pytest),
    )
    execute(run, jobs, store, executor_of(options, ray=False), console)
    return run
