"""``kernel-compat check``: run every attention name and compare it with a reference."""

from __future__ import annotations

import argparse
import math
from typing import Any

from ..diagnostics.numerics import CaseResult, CheckReport, run
from .arguments import add_json
from .printing import print_environment, print_progress, print_shims, print_table, print_text, reasons_text

__all__ = ["HELP", "add_arguments", "as_json", "find", "show"]

HELP = "run every attention name on tiny problems and compare it with a reference"


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
    """Run the check; on a terminal, stderr shows the name that runs."""
    print_progress("importing torch and transformers")
    try:
        return run(
            arguments.names or None,
            lambda name, number, total: print_progress(f"{number} of {total}: {name}"),
            arguments.torch_flash_backend,
        )
    finally:
        print_progress("")


def as_json(report: CheckReport) -> dict[str, Any]:
    """The report as a document."""
    return {
        "ok": report.ok,
        "environment": report.installation.environment,
        "shims": report.installation.shims,
        "attention": report.installation.attention,
        "names": report.names,
        "problems": report.problems,
        "missing": report.missing,
        "torch_flash_backend": report.torch_flash_backend,
    }


def show(report: CheckReport) -> None:
    """Print the report as tables."""
    print_environment(report.installation.environment, report.torch_flash_backend)
    print_shims([shim for shim in report.installation.shims if shim.state != "not needed"])
    for result in report.names:
        if result.cases:
            limit = _number(next((case.tolerance for case in result.cases if case.tolerance), None))
            title = f"{result.name}: relative errors against float64; wrong if greater than {limit}"
            heads = ("case", "verdict", "output", "gradients", "max abs", "")
            print_table(title, heads, map(_row, result.cases))
    rows = []
    for result in report.names:
        verdicts = [case.verdict for case in result.cases]
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
        details = reasons_text(result.reasons, result.install) or f"cases: {counts}"
        rows.append((result.name, result.verdict, f"{result.device} {result.dtype}".strip(), details))
    print_table("Attention names", ("name", "verdict", "on", "details"), rows)
    for problem in report.problems:
        print_text(f"Problem: {problem}", "bold red")
    for advice in report.missing:
        print_text(f"Missing: {advice}", "yellow")
    right = sum(result.verdict == "right" for result in report.names)
    if report.ok:
        print_text(f"Everything usable is right ({right} of {len(report.names)} names).", "green")
    else:
        print_text("Something is WRONG or failed: see above.", "bold red")


def _row(case: CaseResult) -> tuple[str, ...]:
    gradients = [error for name, error in case.errors.items() if name != "output"]
    worst = max(gradients, key=lambda error: math.inf if math.isnan(error) else error, default=None)
    numbers = map(_number, (case.errors.get("output"), worst, case.max_abs))
    return (case.case, case.verdict, *numbers, case.reason)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
