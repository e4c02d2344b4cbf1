from __future__ import annotations

import re
from datetime import datetime, timezone
from io import StringIO

from rich.console import Console

from compat_matrix.cells import Cell
from compat_matrix.progress import Progress
from compat_matrix.results import CellResult, Verdict

FIRST, SECOND, THIRD = (Cell("3.12", f"5.{minor}", "2.11") for minor in range(3))


def ended(cell: Cell, verdict: Verdict, seconds: float) -> CellResult:
    kind, reason = (None, "") if verdict == "passed" else ("test", "1 of 2 tests failed")
    return CellResult(cell, verdict, kind, reason, datetime.now(timezone.utc), seconds)  # type: ignore[arg-type]


def followed(console: Console) -> None:
    with Progress(3, 1, console) as progress:
        progress.started(FIRST)
        progress.ended(ended(FIRST, "failed", 61.0))
        progress.started(SECOND)
        progress.started(FIRST)  # a late message about a finished cell
        if console.is_terminal:
            progress.refresh()


def test_a_terminal_shows_a_table() -> None:
    output = StringIO()
    followed(Console(file=output, force_terminal=True, width=120))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
    row = rf"1 of 3 cells: 1 failed +1 running, 1 to go +\d\.\d s so far, 2 min 2 s left *\r?\n +{SECOND} +\d\.\d s"
    assert re.search(row, shown), shown
    assert shown.count(f"{FIRST}") == shown.count(f"✗ 1/3 {FIRST} failed (test) 61.0 s: 1 of 2 tests failed") == 1
    assert "\x1b[?25l" in output.getvalue()  # the cursor is hidden: the table is updated in place


def test_without_a_terminal_there_is_a_line_a_cell() -> None:
    output = StringIO()
    followed(Console(file=output, width=40))
    assert output.getvalue() == f"✗ 1/3 {FIRST} failed (test) 61.0 s: 1 of 2 tests failed\n"
