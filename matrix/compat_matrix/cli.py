"""The command ``kernel-compat-matrix``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from . import __version__, gpus, pins, runner
from .axes import OWN, Axes, load
from .cells import Cell, shard
from .environments import Environments
from .errors import MatrixError
from .progress import Progress
from .store import Store
from .work import Job

#: Commands in modules of their own: each has `add_arguments` and `run`.
_ELSEWHERE = {
    "show": ("views.show", "the results of a run as a grid"),
    "explain": ("views.explain", "all that is known of one cell"),
    "diff": ("views.diff", "what broke and what was mended between two runs"),
    "report": ("views.report", "a static site"),
    "compatibility": ("views.compatibility", "a document of what works, from the store"),
    "merge": ("views.merge", "take over runs of other stores"),
    "export": ("views.export", "write runs into a store of their own"),
    "atlas": ("atlas.command", "when the seams appeared, changed and vanished upstream"),
    "emit": ("emit", "the matrix for a CI service"),
    "bisect": ("bisect", "the first release that broke a test or a shim"),
}
_AXES = Path("matrix") / "axes.toml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code: 0 all is well, 1 something failed, 2 bad input, 130 interrupted."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        code: int = options.do(options)
        return code
    except MatrixError as error:
        print(f"kernel-compat-matrix: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; `kernel-compat-matrix run --resume` goes on", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kernel-compat-matrix", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    listing = commands.add_parser("list", help="the cells")
    _selecting(listing)
    listing.add_argument("--excluded", action="store_true", help="those that can't be, and why")
    listing.add_argument("--json", action="store_true")
    listing.set_defaults(do=_list)

    pin = commands.add_parser("pin", help="resolve the cells and write their pins")
    _selecting(pin)
    pin.add_argument("--pins", type=Path, metavar="DIR", help="where they are (pins, beside the axes file)")
    pin.add_argument("--latest", action="store_true", help="whatever `exclude_newer` says")
    pin.set_defaults(do=_pin)

    fetching = commands.add_parser("fetch", help="write a folder from which `run --offline` installs without a network")
    _selecting(fetching)
    fetching.add_argument("folder", type=Path, metavar="DIR", help="what is there already isn't fetched again")
    fetching.add_argument("--pins", type=Path, metavar="DIR", help="where the pins are (pins, beside the axes file)")
    fetching.add_argument("--latest", action="store_true", help="the newest releases that fit, instead of the pins")
    fetching.add_argument(
        "--without-torch", action="store_true", help="for machines with their own: `run --base-python`"
    )
    fetching.add_argument("--with-runner", action="store_true", help="this command itself too")
    fetching.set_defaults(do=_fetch)

    run = commands.add_parser("run", help="run cells and store what they give")
    _selecting(run)
    _storing(run)
    _working(run)
    run.add_argument("-j", "--jobs", type=_positive, help="cells at a time (as many as there are cores)")
    run.add_argument("--label", default="", help="a name for the run")
    run.add_argument("--resume", nargs="?", const="latest", metavar="RUN", help="go on with a run (the latest)")
    run.add_argument("--failed", action="store_true", help="with --resume: run once more what failed")
    run.add_argument(
        "--executor", choices=["local", "ray"], default="local", help="where: this machine, or $RAY_ADDRESS"
    )
    run.add_argument("--no-fork", action="store_true", help="start every cell afresh, with its own import of torch")
    run.set_defaults(do=_run)

    for name, (module, text) in _ELSEWHERE.items():
        command = commands.add_parser(name, help=text)
        implementation = importlib.import_module(f".{module}", __package__)
        if module.startswith("views"):
            _storing(command)
        implementation.add_arguments(command)
        command.set_defaults(do=implementation.run)
    return parser


def _selecting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cells", nargs="*", metavar="CELL", help="by name; all of them if none is given")
    parser.add_argument("--axes", type=Path, metavar="FILE", help=f"the axes file ({_AXES})")
    parser.add_argument("--only", metavar="EXPRESSION", help='such as "transformers>=5.4 and torch==2.11"')
    parser.add_argument("--pairwise", action="store_true", help="so few that every two values still meet")
    parser.add_argument("--shard", metavar="N/OF", help="this part of them, such as 3/8")


def _working(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default="default", help="which tests (default)")
    parser.add_argument("--pins", type=Path, metavar="DIR", help="where the pins are (pins, beside the axes file)")
    parser.add_argument("--latest", action="store_true", help="the newest releases that fit, instead of the pins")
    parser.add_argument(
        "--offline", type=Path, metavar="DIR", help="install from what `fetch` wrote, without a network"
    )
    parser.add_argument("--base-python", type=Path, metavar="PATH", help="stand on the torch of this Python")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where environments are kept")
    parser.add_argument("--pytest", default="", metavar="ARGUMENTS", help="more arguments for pytest, in one string")


def _storing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        default=os.environ.get("KERNEL_COMPAT_MATRIX_STORE", "matrix.sqlite"),
        metavar="URL",
        help="a file, or any SQLAlchemy URL (matrix.sqlite, or $KERNEL_COMPAT_MATRIX_STORE)",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number from 1 on, not {text!r}")
    return int(text)


def _axes(options: argparse.Namespace) -> Axes:
    if options.axes is not None:
        return load(options.axes)
    return load(next((path for path in (_AXES, Path("axes.toml"), OWN) if path.exists()), _AXES))


def _cells(options: argparse.Namespace, axes: Axes) -> list[Cell]:
    cells = axes.select(options.only, options.cells, options.pairwise)
    if options.shard is not None:
        cells = shard(cells, options.shard)
        if not cells:
            raise MatrixError(f"nothing is left for the part {options.shard}")
    return cells


def _list(options: argparse.Namespace) -> int:
    axes = _axes(options)
    if options.excluded:
        refused = {cell.name: because for cell, because in axes.all_cells.items() if because}
        if options.json:
            print(json.dumps(refused, indent=2))
        else:
            for because, count in Counter(refused.values()).most_common():
                print(f"{count} cells: {because}")
        return 0
    cells = _cells(options, axes)
    if options.json:
        print(json.dumps([{"name": cell.name, **vars(cell)} for cell in cells], indent=2))
    else:
        print("\n".join(cell.name for cell in cells))
        print(f"{len(cells)} cells", file=sys.stderr)
    return 0


def _pin(options: argparse.Namespace) -> int:
    axes = _axes(options)
    cells = _cells(options, axes)
    folder = options.pins or axes.path.parent / "pins"
    failed = 0
    changed = []
    parts = pins.resolve_parts(axes, cells, latest=options.latest)
    for name, part in sorted(parts.items()):
        if isinstance(part, pins.ResolutionError):
            failed += 1
            print(f"{name}: {part}", file=sys.stderr)
        elif pins.write(part, folder):
            changed.append(name)
    print(
        f"{len(parts) - failed} parts pinned in {folder}, {len(changed)} of them changed"
        + "".join(f"\n  {n}" for n in changed)
    )
    return 1 if failed else 0


def _fetch(options: argparse.Namespace) -> int:
    from .wheelhouse import fetch

    axes = _axes(options)
    cells = _cells(options, axes)
    wheelhouse = fetch(
        axes,
        cells,
        options.folder,
        pin_folder=options.pins or axes.path.parent / "pins",
        latest=options.latest,
        without_torch=options.without_torch,
        runner=options.with_runner,
        note=lambda text: print(text, file=sys.stderr),
    )
    files = wheelhouse.manifest.files.values()
    size = sum(file.size for file in files) / 1e6
    print(f"{options.folder}: {len(wheelhouse.manifest.cells)} cells, {len(files)} files, {size:.1f} MB")
    return 0


def _run(options: argparse.Namespace) -> int:
    axes = _axes(options)
    if options.failed and options.resume is None:
        raise MatrixError("--failed goes with --resume: a new run runs all its cells")
    if options.resume is not None and (options.cells or options.only or options.pairwise or options.shard):
        raise MatrixError("--resume goes on with the cells of that run, and takes no others")
    console = Console()
    new = options.resume is None
    if new:  # nothing is stored before the input is right
        cells = _cells(options, axes)
        work = _jobs(options, axes, cells, {})
        executor = _executor(options)
    with Store.open(options.store, create=new) as store:
        if new:
            run = store.new_run(
                cells,
                excluded=_refused(axes, options),
                axes=axes.path.read_text(encoding="utf-8"),
                command=shlex.join(sys.argv[1:]),
                label=options.label,
                host=platform.node(),
                revision=_revision(axes.folder),
            )
        else:
            run = store.resolve(options.resume)
            cells, attempts = _left(store, run, axes, options.failed)
            if not cells:
                print(f"nothing is left to do of {run}")
                return 0
            work = _jobs(options, axes, cells, attempts)
            executor = _executor(options)
            store.finish(run, "running")
        console.print(f"run {run}: {len(cells)} cells, {executor.jobs} at a time", highlight=False)
        with Progress(len(cells), executor.jobs, console) as progress:
            counts = runner.execute(run, work, store, executor, progress)
    summary_line = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    console.print(f"run {run}: {summary_line}", highlight=False)
    return 0 if set(counts) <= {"passed"} else 1


def _executor(options: argparse.Namespace) -> runner.Executor:
    if options.executor == "ray":
        from .ray_executor import RayExecutor

        return RayExecutor(options.jobs, options.cache, fork=not options.no_fork)
    return runner.Local(options.jobs or os.cpu_count() or 1, gpus.visible(), not options.no_fork)


def _left(store: Store, run: str, axes: Axes, failed: bool) -> tuple[list[Cell], dict[Cell, int]]:
    """The cells that a run hasn't finished, those that failed too if they are wanted, and how often those have run."""
    summary = store.summary(run)
    again = [cell for cell, found in summary.items() if failed and found.verdict in ("failed", "not run")]
    there = axes.all_cells
    cells = [cell for cell in [*store.unfinished(run), *again] if cell in there]
    return cells, {cell: summary[cell].attempt for cell in again}


def _jobs(options: argparse.Namespace, axes: Axes, cells: Sequence[Cell], attempts: Mapping[Cell, int]) -> list[Job]:
    """What there is to run, and where it is installed from."""
    from .base_python import BasePython, torch_alone
    from .wheelhouse import Wheelhouse

    wheelhouse = below = None
    if options.offline is not None:
        if options.latest or options.pins:
            raise MatrixError("--offline takes the pins that were fetched: --latest and --pins go with `fetch`")
        wheelhouse = Wheelhouse.open(options.offline)
        wheelhouse.check(cells, axes.folder)
    if options.base_python is not None:
        below = BasePython.inspect(options.base_python)
        below.check(cells)
    environments = Environments(
        options.cache or runner.default_root(),
        axes.folder,
        wheelhouse.folder if wheelhouse else None,
        wheelhouse.project if wheelhouse else None,
        below,
    )
    try:
        arguments = shlex.split(options.pytest)
    except ValueError as error:
        raise MatrixError(f"--pytest {options.pytest!r}: {error}") from None
    jobs = runner.jobs_of(
        axes,
        cells,
        environments,
        suite=options.suite,
        pin_folder=wheelhouse.pins if wheelhouse else options.pins or axes.path.parent / "pins",
        latest=options.latest,
        arguments=arguments,
        attempts=attempts,
    )
    if below is not None:
        resolved = {job.cell: job.parts for job in jobs if not isinstance(job.parts, str)}
        parts = {part.name: part for pair in resolved.values() for part in pair}
        needless = wheelhouse.torch_alone if wheelhouse else torch_alone(axes, list(resolved), parts)
        jobs = below.under(jobs, needless)
    return wheelhouse.take(jobs) if wheelhouse else jobs


def _refused(axes: Axes, options: argparse.Namespace) -> dict[Cell, str]:
    """What belongs to the selection, and can't be."""
    from .expressions import Expression

    if options.cells:
        return {}
    wanted = Expression(options.only) if options.only else None
    return {cell: because for cell, because in axes.all_cells.items() if because and (wanted is None or wanted(cell))}


def _revision(folder: Path) -> str:
    """The commit that is tested, with a plus sign where files differ from it; empty outside of git."""
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
