"""``kernel-compat-matrix check``: ask a matrix service for its verdict on this environment; runs nothing."""

from __future__ import annotations

import argparse
import json

from kernel_compat.cli import tables

from .. import matrix_client


def run(options: argparse.Namespace) -> int:
    """Returns the exit code: 1 if the environment is known to be bad, else 0."""
    report = matrix_client.ask(options.service)
    if options.json:
        print(json.dumps(tables.plain({"ok": report.ok, **tables.fields_of(report)}), indent=2, allow_nan=False))
        return int(not report.ok)
    console = tables.console()
    tables.print_environment(console, report.environment)
    for answer in report.answers:
        style = "bold red" if answer.bad else "green" if answer.verdict == "passed" else "yellow"
        verdict, *evidence = matrix_client.describe(answer)
        tables.print_text(console, f"\n{verdict}", style)
        for line in evidence:
            tables.print_text(console, line)
    if not report.ok:
        tables.print_text(console, "This environment is known to be bad: see above.", "bold red")
    return int(not report.ok)
