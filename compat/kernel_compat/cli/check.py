"""``kernel-compat check``: run every attention name and compare it with a reference."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..diagnostics.numerics import CaseResult, CheckReport, NameResult, run
from .arguments import add_json
from .tables import print_environment, print_shims, print_table, print_text, reasons_text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["add_arguments", "as_json", "find", "show"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json(parser)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these attention names")
    parser.add_argument(
        "--torch-flash-backend",
        choices=("FA3", "FA4"),
        help="the FlashAttention that flash_attention_torch and sdpa run on during the check",
    )


def find(arguments: argparse.Namespace) -> CheckReport:
    """Run the check, with a progress bar if stderr is a terminal."""
    names, backend = arguments.names or None, arguments.torch_flash_backend
    if arguments.json or not sys.stderr.isatty():
        return run(names, torch_flash_backend=backend)
    return _with_progress(names, backend)


def _with_progress(names: Sequence[str] | None, backend: Literal["FA3", "FA4"] | None) -> CheckReport:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("importing torch and transformers", total=None)

        def progress(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total, refresh=True)

        return run(names, progress, backend)


def as_json(report: CheckReport) -> dict[str, Any]:
    """The report as a document."""
    return {
        "ok": report.ok,
        "environment": report.environment,
        "shims": report.installation.shims,
        "attention": report.installation.attention,
        "names": report.names,
        "problems": report.problems,
        "missing": report.missing,
        "torch_flash_backend": report.torch_flash_backend,
    }


def show(console: Console | None, report: CheckReport) -> None:
    """Print the report as tables."""
    print_environment(console, report.environment, report.torch_flash_backend)
    print_shims(console, [shim for shim in report.installation.shims if shim.state != "not needed"])
    _print_cases(console, report.names)
    rows = [
        (
            result.name,
            result.verdict,
            f"{result.device} {result.dtype}".strip(),
            reasons_text(result.reasons, result.install) or _count(result.cases),
        )
        for result in report.names
    ]
    print_table(console, "Attention names", ("name", "verdict", "on", "details"), rows)
    for problem in report.problems:
        print_text(console, f"Problem: {problem}", "bold red")
    for advice in report.missing:
        print_text(console, f"Missing: {advice}", "yellow")
    right = sum(result.verdict == "right" for result in report.names)
    if report.ok:
        print_text(console, f"Everything usable is right ({right} of {len(report.names)} names).", "green")
    else:
        print_text(console, "Something is WRONG or failed: see above.", "bold red")


def _print_cases(console: Console | None, results: Iterable[NameResult]) -> None:
    rows = []
    for result in results:
        for case in result.cases:
            gradients = [error for name, error in case.errors.items() if name != "output"]
            rows.append(
                (
                    result.name,
                    case.case,
                    case.verdict,
                    _number(case.errors.get("output")),
                    _number(_worst(gradients)),
                    _number(case.max_abs),
                    _number(case.tolerance),
                    case.reason,
                )
            )
    heads = ("name", "case", "verdict", "output", "gradients", "max abs", "tolerance", "")
    title = "Cases (relative errors against float64)"
    if console is None:
        if rows:
            print_table(console, title, heads, rows)
        return
    for name in dict.fromkeys(
        row[0] for row in rows
    ):  # 80 columns are too few for names and reasons beside the numbers
        chosen = [row for row in rows if row[0] == name]
        print_table(console, f"{title}: {name}", heads[1:-1], [row[1:-1] for row in chosen])
        for row in chosen:
            if row[-1]:
                print_text(console, f"  {row[1]}: {row[-1]}")


def _count(cases: Sequence[CaseResult]) -> str:
    verdicts = [case.verdict for case in cases]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts)]
    return f"cases: {', '.join(counts)}"


def _worst(errors: Sequence[float]) -> float | None:
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error, default=None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
