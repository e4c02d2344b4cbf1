"""What the values of options mean: axes, cells, their jobs, the executor, and the run."""

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

from .axes import OWN, Axes, load
from .cells import Cell, shard
from .errors import MatrixError
from .words import plural

if TYPE_CHECKING:
    from rich.console import Console

    from .ray_executor import RayExecutor
    from .runner import Local
    from .store import Store
    from .work import Job

AXES = Path("matrix") / "axes.toml"


def executor_of(options: argparse.Namespace, ray: bool) -> Local | RayExecutor:
    """The executor for ``--jobs``: this machine, or the Ray cluster at RAY_ADDRESS."""
    from . import gpus
    from .runner import Local

    if ray:
        from .ray_executor import RayExecutor

        return RayExecutor(options.jobs, options.cache)
    return Local(options.jobs or os.cpu_count() or 1, gpus.visible())


def axes_of(options: argparse.Namespace) -> Axes:
    """The axes in ``--axes``, or in the first default file that exists."""
    return load(options.axes or axes_in(Path()) or (OWN if OWN.exists() else AXES))


def axes_in(folder: Path) -> Path | None:
    """The axes file of a project in a folder; None if it has none."""
    return next((path for path in (folder / AXES, folder / AXES.name) if path.is_file()), None)


def cells_of(options: argparse.Namespace, axes: Axes) -> list[Cell]:
    """The selected cells.

    Raises:
        MatrixError: no cell is in the part that ``--shard`` selects.
    """
    cells = axes.select(options.only, options.cells, options.pairwise)
    if options.shard is not None:
        cells = shard(cells, options.shard)
        if not cells:
            raise MatrixError(f"the part {options.shard} has no cells")
    return cells


def pin_folder(options: argparse.Namespace, axes: Axes) -> Path:
    """The folder in ``--pins``, or ``pins`` beside the axes file."""
    return options.pins or axes.path.parent / "pins"


def jobs_of(options: argparse.Namespace, axes: Axes, cells: Sequence[Cell], attempts: Mapping[Cell, int]) -> list[Job]:
    """The jobs for cells, with the source that their packages are installed from.

    Args:
        attempts: the number of earlier attempts, by cell.

    Raises:
        MatrixError: pins are missing or invalid, a cell has no tests, or the source doesn't fit the cells.
    """
    from . import pins
    from .base_python import BasePython
    from .environments import Environments, default_root
    from .wheelhouse import Wheelhouse
    from .work import Job

    if not (axes.folder / "pyproject.toml").is_file():
        raise MatrixError(f"{axes.folder} has no pyproject.toml: no project to test")
    wheelhouse = Wheelhouse.open(options.offline) if options.offline is not None else None
    below = BasePython.inspect(options.base_python) if options.base_python is not None else None
    folder = pin_folder(options, axes)
    if wheelhouse is not None:
        if options.latest or options.pins:
            raise MatrixError("--offline uses the pins that were fetched: --latest and --pins are options of `fetch`")
        wheelhouse.check(cells, axes.folder)
        folder = wheelhouse.folder / "pins"
    if below is not None:
        below.check(cells)
    parts = pins.of_cells(axes, cells, folder, options.latest)
    if below is not None:
        parts |= below.without_installed(
            parts, wheelhouse.torch_alone if wheelhouse else pins.torch_alone(axes, cells, parts)
        )
    if wheelhouse is not None:
        parts |= wheelhouse.take(parts, cells)
    # Absolute: cells run in the project's folder.
    environments = Environments((options.cache or default_root()).absolute(), axes.folder, wheelhouse, below)
    jobs = []
    for cell in cells:
        tests = axes.tests_of(cell, options.suite)
        if tests is None:
            raise MatrixError(f"{axes.path.name} has no tests for {cell} in the suite {options.suite!r}")
        base, layer = parts[cell.base], parts[cell.layer]
        both = (base, layer) if isinstance(base, pins.Part) and isinstance(layer, pins.Part) else None
        reason = str(base if isinstance(base, MatrixError) else layer)
        attempt, known = attempts.get(cell, 0) + 1, axes.known_of(cell)
        more = {"retry": getattr(options, "retry_failed", False), "fork": not getattr(options, "no_fork", True)}
        jobs.append(Job(cell, both or reason, tests, environments, attempt, tuple(options.pytest), known, **more))
    try:
        environments.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MatrixError(f"environments can't be kept in {environments.root}: {error.strerror}") from None
    return jobs


def new_run(options: argparse.Namespace, store: Store, axes: Axes, cells: Sequence[Cell], /, **more: Any) -> str:
    """Create a run of cells in a store; returns its id."""
    given = {
        "axes": axes.path.read_text(encoding="utf-8"),
        "command": shlex.join(options.words),
        "host": platform.node(),
        "revision": revision(axes.folder),
        "partial": partial(options),
    }
    return store.new_run(cells, **{**given, **more})


def execute(run: str, jobs: Sequence[Job], store: Store, executor: Local | RayExecutor, console: Console) -> set[str]:
    """Run the jobs of a run, and show the progress; returns the verdicts."""
    from .progress import Progress
    from .runner import execute

    console.print(f"run {run}: {plural(len(jobs), 'cell')}, {executor.jobs} at a time", highlight=False)
    with Progress(len(jobs), executor.jobs, console) as progress:
        counts = execute(run, jobs, store, executor, progress)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    console.print(f"run {run}: {summary}", highlight=False)
    return {*counts}


#: Options of pytest that change neither the tests nor their outcomes.
_HARMLESS = re.compile(r"(?<!\S)(?:(?:-n|--numprocesses|--dist|--durations|--tb|-r)[= ]?\S+|-[vqs]+)(?!\S)")


def partial(options: argparse.Namespace) -> bool:
    """Whether the options make cells run anything other than their whole default suite."""
    return options.suite != "default" or bool(_HARMLESS.sub("", " ".join(options.pytest)).strip())


def revision(folder: Path) -> str:
    """The tested commit, with a plus sign if files differ from it; empty outside of git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
