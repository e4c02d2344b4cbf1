"""Measure how long the matrix' store takes to write, show and compare runs, and its size.

Run by hand: python benchmarks/matrix_store.py. It needs no torch, 2 GB of disk in the temporary folder and some minutes, most of
them to fill the stores. Times are medians of 3 of the whole command without Python's start and imports; CPU time depends least on other
work of the machine.
"""

from __future__ import annotations

import gc
import io
import random
import sqlite3
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from datetime import datetime, timezone
from pathlib import Path

from sqlalchemy import Table, select

from compat_matrix.cells import Cell
from compat_matrix.results import CellResult, Test
from compat_matrix.store import Store, inserts
from compat_matrix.store.models import CELL, RESULT, TEST
from compat_matrix.views import diff, show

PINS = "\n".join(f"package-{n}==1.{n} --hash=sha256:{random.Random(n).randbytes(32).hex()}" for n in range(300))
LOG = "\n".join(f"tests/integration/test_{n}.py ........ [{n}%]" for n in range(100))


def cells(python: int, transformers: int, torch: int) -> list[Cell]:
    return [
        Cell(f"3.{p}", f"5.{tf}", f"2.{t}") for p in range(python) for tf in range(transformers) for t in range(torch)
    ]


def result(cell: Cell, tests: int, *, fail: bool, seed: int) -> CellResult:
    chosen = random.Random(f"{cell}{seed}").sample(range(tests), 5) if fail else []
    outcomes = [
        Test(
            f"tests/integration/test_{n % 20}.py::test_{n % 7}[model-{n}]",
            "failed",
            0.1,
            f"E  assert {n} == {seed}\n" * 20,
        )
        if n in chosen
        else Test(f"tests/integration/test_{n % 20}.py::test_{n % 7}[model-{n}]", "passed", n / 997)
        for n in range(tests)
    ]
    environment = {
        "packages": {f"package-{n}": f"1.{n}" for n in range(80)},
        "python": cell.python,
        "device": cell.torch,
    }
    return CellResult(
        cell,
        "failed" if fail else "passed",
        "test" if fail else None,
        "5 tests failed" if fail else "",
        datetime.now(timezone.utc),
        60.0,
        tuple(outcomes),
        environment,
        PINS + cell.torch,
        ("python", "-m", "pytest"),
        LOG + cell.name,
    )


def fill(store: Store, planned: Sequence[Cell], tests: int, seed: int) -> float:
    """Store a run in which every tenth cell fails; returns the seconds."""
    results = [result(cell, tests, fail=n % 10 == 0, seed=seed) for n, cell in enumerate(planned)]
    began = time.perf_counter()
    run = store.new_run(planned)
    for one in results:
        store.add(run, one)
    store.finish(run, "finished")
    return time.perf_counter() - began


def copy_runs(path: Path, times: int) -> None:
    """Copy the newest two runs of a store within it, which is faster than storing new ones."""
    shared = _columns(RESULT, "id", "run_id", "cell_id")
    with sqlite3.connect(path) as connection:
        ids = [key for (key,) in connection.execute("SELECT id FROM run ORDER BY id DESC LIMIT 2")]
        (results,) = connection.execute("SELECT max(id) FROM result").fetchone()
        for n in range(1, times + 1):
            for key in ids:
                new = key + n * len(ids)
                connection.execute(
                    "INSERT INTO run SELECT ?, name || ?, started, finished, state, label, command, host,"
                    " revision, axes_id, partial, name || ? FROM run WHERE id = ?",
                    (new, f"-{n}", f"-{n}", key),
                )
                connection.execute(
                    "INSERT INTO planned SELECT ?, cell_id, position, excluded FROM planned WHERE run_id = ?",
                    (new, key),
                )
                connection.execute(
                    f"INSERT INTO result (id, run_id, cell_id, {shared})"
                    f" SELECT id + ?, ?, cell_id, {shared} FROM result WHERE run_id = ?",
                    (n * results, new, key),
                )
            for table, columns in (("test", "position, nodeid_id, outcome, seconds, message_id"), ("log", "content")):
                connection.execute(
                    f"INSERT INTO {table} SELECT result_id + ?, {columns} FROM {table} WHERE result_id <= ?",
                    (n * results, results),
                )
    with Store.open(str(path)) as store, store.writing() as connection:
        inserts.refresh_newest(connection, connection.scalars(select(CELL.c.id)).all())


def copy_results(path: Path, runs: int, planned: Sequence[Cell], tests: int) -> None:
    """Store runs of these cells whose results are copies of the results of twenty, which is faster than storing new ones."""
    with Store.open(str(path)) as store:
        fill(store, planned[:20], tests, 0)
        template, names = store.runs()[0].id, [store.new_run(planned, label=f"run {n}") for n in range(runs)]
    result_columns = _columns(RESULT, "id", "run_id", "cell_id")
    test_columns = _columns(TEST, "result_id")
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TEMP TABLE copies (source INTEGER, target INTEGER PRIMARY KEY, run INTEGER, cell INTEGER)"
        )
        connection.execute(
            "INSERT INTO copies SELECT (SELECT min(result.id) FROM result JOIN run ON run.id = run_id WHERE run.name = ?) + position % 20,"
            " (SELECT max(id) FROM result) + row_number() OVER (ORDER BY run_id, position), run_id, cell_id"
            f" FROM planned JOIN run ON run.id = run_id WHERE run.name IN ({', '.join('?' * len(names))})",
            (template, *names),
        )
        connection.execute(
            f"INSERT INTO result (id, run_id, cell_id, {result_columns})"
            f" SELECT target, run, cell, {result_columns} FROM copies JOIN result ON result.id = source"
        )
        connection.execute(
            f"INSERT INTO test (result_id, {test_columns}) SELECT target, {test_columns}"
            " FROM copies JOIN test ON result_id = source"
        )
    with Store.open(str(path)) as store, store.writing() as connection:
        inserts.refresh_newest(connection, connection.scalars(select(CELL.c.id)).all())


def _columns(table: Table, *without: str) -> str:
    return ", ".join(column.name for column in table.c if column.name not in without)


def timed(what: str, action: Callable[[], object]) -> None:
    seconds, busy = [], []
    for _ in range(3):
        began, began_busy = time.perf_counter(), time.process_time()
        action()
        seconds.append(time.perf_counter() - began)
        busy.append(time.process_time() - began_busy)
    print(f"    {what:40} {statistics.median(seconds):7.3f} s, of the CPU {statistics.median(busy):.3f} s", flush=True)


def measure(path: Path, old: str = "latest~1", new: str = "latest") -> None:
    def printed(command: Callable[[Namespace], int], **arguments: object) -> None:
        with redirect_stdout(io.StringIO()):
            command(Namespace(store=str(path), json=False, figure=None, **arguments))

    def ask(question: Callable[[Store], object]) -> None:
        with Store.open(str(path)) as store:
            question(store)

    print(f"    {'size':40} {path.stat().st_size / 1e6:7.1f} MB")
    timed("summary", lambda: ask(lambda store: store.summary(store.resolve(new))))
    timed("show", lambda: printed(show.run, chosen=new))
    timed("diff", lambda: printed(diff.run, old=old, new=new))
    timed("newest result of every cell", lambda: ask(lambda store: store.current()))
    timed("history of a cell", lambda: ask(lambda store: store.history(Cell("3.0", "5.0", "2.0"))))


def main() -> None:
    gc.set_threshold(100_000)  # as the commands do
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "one.db")
        print("two runs of 168 cells with 700 tests, every tenth cell failed", flush=True)
        with Store.open(str(path)) as store:
            seconds = [fill(store, cells(1, 28, 6), 700, seed) for seed in (1, 2)]
        print(f"    {'to store a run':40} {seconds[-1]:7.3f} s, {seconds[-1] / 168 * 1000:.1f} ms a cell")
        measure(path)

        for what, runs, planned, tests in (
            ("100,128 results: 596 runs of 168 cells with 100 tests", 596, cells(1, 28, 6), 100),
            ("100,000 results: two runs of 50,000 cells with 100 tests", 2, cells(10, 100, 50), 100),
            ("one run of 100,000 cells, compared with itself", 1, cells(10, 100, 100), 10),
        ):
            print(what, flush=True)
            path = Path(folder, f"{runs}.db")
            copy_results(path, runs, planned, tests)
            measure(path, old="latest~1" if runs > 1 else "latest")
            path.unlink()


if __name__ == "__main__":
    main()
