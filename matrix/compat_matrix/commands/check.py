"""``kernel-compat-matrix check``: ask a matrix service for its verdict on this environment; runs nothing."""

from __future__ import annotations

import argparse
import json

from kernel_compat.cli import tables

from .. import matrix_client
from ..arguments import Arguments, flag, option


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"seconds up to 3600, not {text!r}")
    return seconds


ARGUMENTS: Arguments = {
    "service": option("the address of the service", metavar="URL"),
    "--timeout": option(
        f"time limit of an answer (default: {matrix_client.TIMEOUT:.0f})",
        type=_seconds,
        default=matrix_client.TIMEOUT,
        metavar="SECONDS",
    ),
    "--json": flag("print JSON on stdout, and nothing else"),
}


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 1 if the environment is known to be bad, else 0.

    Raises:
        ServiceError: the service gives no usable answer.
    """
    report = matrix_client.ask(arguments.service, timeout=arguments.timeout)
    if arguments.json:
        print(json.dumps(tables.plain({"ok": report.ok, **tables.fields_of(report)}), indent=2, allow_nan=False))
    else:
        console = tables.console()
        tables.print_environment(console, report.environment)
        for answer in report.answers:
            style = "bold red" if answer.bad else "green" if answer.verdict == "passed" else "yellow"
            verdict, *evidence = matrix_client.describe(answer)
            tables.print_text(console, f"\n{verdict}", style)
            for line in [*evidence, *matrix_client.shims_of(answer)]:
                tables.print_text(console, line)
        if not report.ok:
            tables.print_text(console, "This environment is known to be bad: see above.", "bold red")
    return 0 if report.ok else 1
