"""Runs from options: the jobs of cells, the executor, and the run in the store."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from . import pins, runner
from .axes import Axes
from .base_python import BasePython
from .cells import Cell
from .environments import Environments
from .errors import MatrixError
from .progress import Progress
from .store import Store
from .views import lost
from .wheelhouse import Wheelhouse
from .words import plural
from .work import Job

if TYPE_CHECKING:
    from .ray_executor import RayExecutor

#: Options of pytest that change neither the tests nor their outcomes.
_HARMLESS = re.compile(r"(?<!\S)(?:(?:-n|--numprocesses|--dist|--durations|--tb|-r)[= ]?\S+|-[vqs]+)(?!\S)")


def executor_of(options: argparse.Namespace, ray: bool) -> runner.Local | RayExecutor:
    """The executor for ``--jobs``: this machine, or the Ray cluster at RAY_ADDRESS."""
    if ray:
        from .ray_executor import RayExecutor

        return RayExecutor(options.jobs)
    return runner.Local(options.jobs or os.cpu_count() or 1)


def jobs_of(options: argparse.Namespace, axes: Axes, cells: Sequence[Cell], attempts: Mapping[Cell, int]) -> list[Job]:
    """The jobs for cells, with the source that their packages are installed from; `attempts` has the number of earlier ones.

    Raises:
        MatrixError: pins are missing or invalid, a cell has no tests, or the source doesn't fit the cells.
    """
    wheelhouse = below = None
    if options.offline is not None:
        if options.latest:
            raise MatrixError("--offline uses the pins that were fetched: --latest is an option of `fetch`")
        wheelhouse = Wheelhouse.open(options.offline)
        wheelhouse.check(cells, axes)
    if options.base_python is not None:
        below = BasePython.inspect(options.base_python)
        below.check(cells)
    parts = pins.of_cells(axes, cells, wheelhouse.folder / "pins" if wheelhouse else axes.pins, options.latest)
    if below is not None:
        if wheelhouse is None:
            needless = pins.torch_alone(axes, cells, parts)
        else:
            needless = {name: frozenset(part["torch_alone"]) for name, part in wheelhouse.parts.items()}
        parts |= below.without_installed(parts, needless)
    if wheelhouse is not None:
        parts |= wheelhouse.take(parts, cells)
    cache, members = options.cache and options.cache.absolute(), tuple(axes.project.members)
    environments = Environments(cache, axes.folder, wheelhouse, below, members)
    try:
        environments.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MatrixError(f"environments can't be kept in {environments.root}: {error.strerror}") from None
    how = {"retry": getattr(options, "retry_failed", False), "fork": not getattr(options, "no_fork", True)}
    jobs = []
    for cell in cells:
        tests = axes.tests_of(cell, options.suite)
        if tests is None:
            raise MatrixError(f"{axes.path.name} has no tests for {cell} in the suite {options.suite!r}")
        both, attempt = (parts[cell.base], parts[cell.layer]), attempts.get(cell, 0) + 1
        known = tuple(one for one in axes.known if one.holds(cell))
        jobs.append(Job(cell, both, tests, environments, attempt, tuple(options.pytest), known, **how))
    return jobs


def new_run(options: argparse.Namespace, store: Store, axes: Axes, cells: Sequence[Cell], /, **more: Any) -> str:
    """Create a run of cells in a store; returns its id."""
    store.claim(axes.project_name)
    given = {
        "axes": axes.path.read_text(encoding="utf-8"),
        "command": shlex.join(options.words),
        "host": platform.node(),
        "revision": revision(axes.folder),
        # Cells run anything other than their whole default suite.
        "partial": options.suite != "default" or bool(_HARMLESS.sub("", " ".join(options.pytest)).strip()),
    }
    return store.new_run(cells, **{**given, **more})


def execute(
    run: str, jobs: Sequence[Job], store: Store, executor: runner.Local | RayExecutor, export: Path | None = None
) -> set[str]:
    """Run the jobs of a run, and show the progress; returns the verdicts. In the end `export` gets a copy of the run."""
    console = Console(highlight=False)
    console.print(f"run {run}: {plural(len(jobs), 'cell')}, {executor.jobs} at a time")
    try:
        with Progress(len(jobs), executor.jobs, console) as progress:
            counts = runner.execute(run, jobs, store, executor, progress)
    finally:  # also what an interrupted run has
        if export is not None:
            store.export([run], export)
    for line in lost.lines(lost.tests(store, run)):
        console.print(line, soft_wrap=True)
    console.print(f"run {run}: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}")
    return {*counts}


def revision(folder: Path) -> str:
    """The tested commit, with a plus sign if files differ from it; empty outside of git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
