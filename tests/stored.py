"""Cells and results for the tests of the store and its views."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path

from sqlalchemy import create_engine, select

from compat_matrix.cells import Cell
from compat_matrix.results import CellResult, Kind, Test, Verdict
from compat_matrix.store import Store, database
from compat_matrix.store.models import RUN, TEXT

START = datetime(2026, 11, 20, 8, 30, tzinfo=timezone.utc)

SHIMS = {
    "tf5": {"state": "applied", "reason": "transformers 5", "seams": ["transformers.masking_utils.f(config)"]},
    "torch2_11": {"state": "not needed", "reason": "needs torch 2.11", "seams": []},
}


def cells(
    transformers: Iterable[str] = ("4.57", "5.0", "5.23"),
    torch: Iterable[str] = ("2.10", "2.11"),
    python: Iterable[str] = ("3.12",),
    flash_attention: str = "none",
    device: str = "cpu",
) -> list[Cell]:
    torch = [*torch]
    return [Cell(p, tf, t, flash_attention, device) for p in python for tf in transformers for t in torch]


def passed(cell: Cell, *, attempt: int = 1, tests: Iterable[Test] | None = None) -> CellResult:
    if tests is None:
        tests = [
            Test("tests/test_names.py::test_fine", "passed", 0.25),
            Test("tests/test_gpu.py::test_gpu", "skipped", 0.0, "no GPU"),
        ]
    return _result(cell, "passed", None, "", attempt, tests)


def failed(
    cell: Cell,
    kind: Kind = "test",
    reason: str = "1 test failed",
    *,
    attempt: int = 1,
    tests: Iterable[Test] | None = None,
) -> CellResult:
    if tests is None:
        tests = [
            Test("tests/test_names.py::test_fine", "failed", 0.5, "assert 1 == 2\nwhere 1 is one"),
            Test("tests/test_gpu.py::test_gpu", "skipped", 0.0, "no GPU"),
        ]
    return _result(cell, "failed", kind, reason, attempt, tests)


def not_run(cell: Cell) -> CellResult:
    return _result(cell, "not run", "hardware", "no CUDA device", 1, ())


def stored(store: Store, results: Iterable[CellResult], label: str = "", state: str = "finished") -> str:
    """Store a run with exactly these results."""
    results = [*results]
    run = store.new_run([*dict.fromkeys(one.cell for one in results)], label=label, command="kernel-compat-matrix run")
    for one in results:
        store.add(run, one)
    store.finish(run, state)
    return run


def unfinished(store: Store, run: str) -> list[Cell]:
    """The planned cells without a result, in the order planned."""
    return [cell for cell, summary in store.summary(run).items() if summary.state == "unfinished"]


def axes_of(store: Store, run: str) -> str:
    """The text of the axes file of a run."""
    return str(store.rows(select(TEXT.c.content).join(RUN).where(RUN.c.name == run))[0].content)


def released(path: Path) -> None:
    """Make a SQLite store one as 0.2.0 wrote it."""
    old = path.with_suffix(".old")
    with create_engine(f"sqlite:///{old}").begin() as connection:
        database.upgrade(connection, "0004")
    tables = "SELECT name FROM sqlite_master WHERE type = 'table'"
    with closing(sqlite3.connect(old)) as to, to:
        to.execute("ATTACH ? AS new", (str(path),))
        both = f"{tables} AND name IN ({tables.replace('sqlite', 'new.sqlite')}) AND name != '{database.VERSIONS}'"
        for (table,) in to.execute(both).fetchall():
            columns = ", ".join(row[1] for row in to.execute(f"PRAGMA table_info({table})"))
            to.execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM new.{table}")
    old.replace(path)


def _result(
    cell: Cell, verdict: Verdict, kind: Kind | None, reason: str, attempt: int, tests: Iterable[Test]
) -> CellResult:
    return CellResult(
        cell=cell,
        verdict=verdict,
        kind=kind,
        reason=reason,
        started=START + timedelta(minutes=attempt),
        seconds=12.5,
        tests=tuple(tests),
        environment={
            "packages": {"torch": f"{cell.torch}.0", "transformers": f"{cell.transformers}.1"},
            "python": f"{cell.python}.1",
            "device": "cpu",
            "shims": SHIMS if cell.transformers.startswith("5") else {},
        },
        pins=f"torch=={cell.torch}.0\n",
        command=("python", "-m", "pytest", "-q"),
        log=f"collected\n{verdict}\n",
        attempt=attempt,
    )
