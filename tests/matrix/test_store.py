from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from forked import Forked
from sqlalchemy import create_engine, event, func, make_url, select, text
from sqlalchemy.engine import Engine
from stored import axes_of, cells, failed, not_run, passed, released, stored, unfinished
from waiting import LONG, until

from compat_matrix.cells import Cell
from compat_matrix.commands import runs
from compat_matrix.errors import MatrixError
from compat_matrix.results import CellResult, Figure, Test
from compat_matrix.service import tokens
from compat_matrix.store import Store, database, inserts, removal, submissions
from compat_matrix.store.models import metadata
from compat_matrix.views import diff

CELLS = cells()
ODD = "\x1b[31mred\x1b[0m <b> \x00 \udc80 \u202e\n"


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "other.db")) as store:
        yield store


def test_a_result_comes_back_as_it_was(store: Store) -> None:
    results = [passed(CELLS[0]), failed(CELLS[1]), not_run(CELLS[2])]
    run = stored(store, results)
    assert [store.result(run, one.cell) for one in results] == results


def test_a_summary_has_every_planned_cell_in_one_query(store: Store) -> None:
    run = store.new_run(CELLS[:3], excluded={CELLS[3]: "no such wheel"})
    store.add(run, failed(CELLS[1], "seam", "f is gone"))
    store.add(run, passed(CELLS[0]))
    asked = []
    listener = lambda *args: asked.append(args[2])  # noqa: E731
    event.listen(Engine, "before_cursor_execute", listener)
    try:
        summary = store.summary(run)
    finally:
        event.remove(Engine, "before_cursor_execute", listener)
    assert len([one for one in asked if one != "BEGIN"]) == 1
    assert "content" not in asked[-1]  # neither log nor message nor environment is read
    assert [*summary] == CELLS[:4]
    assert [one.state for one in summary.values()] == ["passed", "failed", "unfinished", "excluded"]
    broken = summary[CELLS[1]]
    assert (broken.kind, broken.reason, broken.seconds, broken.attempt) == ("seam", "f is gone", 12.5, 1)
    assert {outcome: count for outcome, count in broken.counts.items() if count} == {"failed": 1, "skipped": 1}
    assert summary[CELLS[3]].reason == "no such wheel"
    assert unfinished(store, run) == [CELLS[2]]


def test_the_same_attempt_counts_once(store: Store) -> None:
    run = store.new_run(CELLS)
    store.add(run, failed(CELLS[0]))
    store.add(run, passed(CELLS[0]))
    assert store.summary(run)[CELLS[0]].state == "failed"
    assert len(store.history(CELLS[0])) == 1


@pytest.mark.parametrize("order", [(1, 2, 10), (10, 1, 2)])
def test_the_latest_attempt_is_the_result(store: Store, order: tuple[int, ...]) -> None:
    run = store.new_run(CELLS)
    for attempt in order:
        store.add(run, passed(CELLS[0], attempt=10) if attempt == 10 else failed(CELLS[0], attempt=attempt))
    assert store.summary(run)[CELLS[0]].state == "passed"
    assert store.result(run, CELLS[0]) == passed(CELLS[0], attempt=10)
    assert store.result(run, CELLS[0], attempt=1) == failed(CELLS[0])
    assert [past.summary.attempt for past in store.history(CELLS[0])] == [10, 2, 1]
    assert store.totals([run])[run] == {"passed": 1, "unfinished": len(CELLS) - 1}


def test_a_cell_that_was_not_planned_joins(store: Store) -> None:
    run = store.new_run(CELLS[:1], excluded={CELLS[2]: "excluded"})
    store.add(run, passed(CELLS[1]))
    store.add(run, passed(CELLS[2]))
    assert {one: summary.state for one, summary in store.summary(run).items()} == {
        CELLS[0]: "unfinished",
        CELLS[2]: "passed",
        CELLS[1]: "passed",
    }


def test_a_run_of_no_cells(store: Store) -> None:
    run = store.new_run([])
    assert store.summary(run) == {}
    assert store.runs()[0].state == "running"
    store.finish(run, "finished")
    assert store.run(run).state == "finished"
    assert store.run(run).finished is not None
    store.finish(run, "running")
    assert store.run(run).finished is None


def test_what_a_run_was_told(store: Store) -> None:
    run = store.new_run(
        CELLS, axes="[axes]\n", command="run --latest", label="nightly", host="node7", revision="75eada2"
    )
    found = store.run(run)
    assert (found.command, found.label, found.host, found.revision) == ("run --latest", "nightly", "node7", "75eada2")
    assert axes_of(store, run) == "[axes]\n"


def test_runs_are_found_by_what_people_type(store: Store) -> None:
    with pytest.raises(MatrixError, match="has 0 runs"):
        store.resolve("latest")
    first, second, third = (store.new_run(CELLS, label=label) for label in ("nightly", "nightly", ""))
    assert [one.id for one in store.runs()] == [third, second, first]
    assert store.resolve("latest") == store.resolve("latest~0") == store.resolve(third) == third
    assert store.resolve("latest~2") == store.resolve(first) == first
    assert store.resolve("nightly") == second
    assert store.resolve(first[:-1] if first[:-1] not in (second[:-1], third[:-1]) else first) == first
    with pytest.raises(MatrixError, match="3 runs begin with '20'"):
        store.resolve("20")
    with pytest.raises(MatrixError, match=f"no run is called 'abc'; there are {third}"):
        store.resolve("abc")
    with pytest.raises(MatrixError, match="no run is called ''"):
        store.resolve("")
    with pytest.raises(MatrixError, match="there is no latest~3: .* has 3 runs"):
        store.resolve("latest~3")


def test_unknown_runs_and_cells(store: Store) -> None:
    run = store.new_run(CELLS)
    for ask in (store.summary, store.run, store.parts):
        with pytest.raises(MatrixError, match="has no run 'gone'"):
            ask("gone")
    with pytest.raises(MatrixError, match="has no run 'gone'"):
        store.add("gone", passed(CELLS[0]))
    with pytest.raises(MatrixError, match="has no run 'gone'"):
        store.finish("gone", "finished")
    with pytest.raises(MatrixError, match=f"has no result of {CELLS[0]}"):
        store.result(run, CELLS[0])
    with pytest.raises(MatrixError, match="has no run 'gone'"):
        store.result("gone", CELLS[0])
    assert store.history(Cell("3.9", "1.0", "1.0")) == []


def test_any_text_is_kept(store: Store) -> None:
    found = failed(CELLS[0], reason=ODD, tests=[Test(f"test_odd.py::test[{ODD}]", "failed", 0.0, ODD)])
    found = dataclasses.replace(found, log=ODD, pins=ODD, command=(ODD,), environment={"device": ODD})
    run = store.new_run([CELLS[0]], label=ODD, command=ODD, host=ODD, revision=ODD, axes=ODD)
    store.add(run, found)
    back = store.result(run, CELLS[0])
    assert (back.log, back.pins, back.command, back.environment) == (ODD, ODD, (ODD,), {"device": ODD})
    assert back.tests[0].message == ODD
    # In columns whose databases refuse such characters, these are replaced.
    plain = ODD.replace("\0", "\N{REPLACEMENT CHARACTER}").replace("\udc80", "?")
    assert back.reason == store.run(run).label == plain
    assert back.tests[0].nodeid == f"test_odd.py::test[{plain}]"
    assert axes_of(store, run) == ODD


def test_what_many_share_is_stored_once(tmp_path: Path) -> None:
    message = os.urandom(40_000).hex()
    many = cells(
        transformers=[f"5.{minor}" for minor in range(24)],
        torch=["2.10", "2.11", "2.12", "2.13", "2.14", "2.15", "2.16"],
    )
    path = tmp_path / "store.db"
    with Store.open(str(path)) as store:
        tests = [Test(f"tests/test_some.py::test_of_something[{n}]", "passed", n / 7) for n in range(99)]
        tests.append(Test("tests/test_some.py::test_bad", "failed", 0.0, message))
        stored(store, [failed(one, tests=tests) for one in many])
    assert path.stat().st_size < 1_500_000  # 168 cells with 100 tests; the messages alone would take 13 MB


def test_the_newest_verdict_of_each_cell(store: Store) -> None:
    old = stored(store, [passed(CELLS[0]), failed(CELLS[1]), not_run(CELLS[2])])
    new = stored(store, [failed(CELLS[0]), not_run(CELLS[1]), not_run(CELLS[2])])
    running = store.new_run(CELLS, excluded={CELLS[4]: "excluded"})
    found = {one: (past.run.id, past.summary.state) for one, past in store.current().items()}
    assert found == {
        CELLS[0]: (new, "failed"),
        CELLS[1]: (old, "failed"),
        CELLS[2]: (new, "not run"),
        CELLS[3]: (running, "unfinished"),
        CELLS[4]: (running, "excluded"),
        CELLS[5]: (running, "unfinished"),
    }
    assert [*found] == sorted(found)
    assert {one: past.run.id for one, past in store.current([old]).items()} == dict.fromkeys(CELLS[:3], old)
    assert store.current([]) == {}


@pytest.mark.parametrize("seed", range(3))
def test_the_newest_results_are_kept_whatever_happens(url: str, tmp_path: Path, seed: int) -> None:
    """The query over all runs is slower, and right by construction."""
    chance = random.Random(seed)
    with Store.open(url) as store, Store.open(str(tmp_path / "other.db")) as other:
        going: list[str] = []
        for _ in range(60):
            what = chance.random()
            if what < 0.2 or not going:
                some = chance.sample(CELLS, 4)
                excluded = {CELLS[-1]: "can't"} if chance.random() < 0.3 and CELLS[-1] not in some else {}
                going.append(store.new_run(some, excluded=excluded, partial=chance.random() < 0.2))
            elif what < 0.85:
                cell, run = chance.choice(CELLS), chance.choice(going)
                result = chance.choice([passed(cell), failed(cell, "wrong"), failed(cell), not_run(cell)])
                store.add(run, dataclasses.replace(result, attempt=chance.choice([1, 1, 2, 3])))
            elif what < 0.95:
                store.finish(going.pop(chance.randrange(len(going))), "finished")
            else:
                stored(other, [chance.choice([passed, failed, not_run])(chance.choice(CELLS))])
                other.new_run(chance.sample(CELLS, 3))
                if chance.random() < 0.5:
                    store.merge(other)
            assert store.current() == store.current([run.id for run in store.runs() if not run.partial])
        before = store.current()
        with store.writing() as connection:
            inserts.refresh_newest(connection, connection.scalars(text("SELECT id FROM cell")).all())
        assert store.current() == before


def test_a_plan_that_is_merged_is_the_newest_whatever_its_clock(store: Store, other: Store) -> None:
    merged = other.new_run(CELLS[:2])
    store.new_run(CELLS[:1])
    store.merge(other)
    assert store.current() == store.current([run.id for run in store.runs()])
    assert store.current()[CELLS[0]].run.id == merged


def test_a_migration_finds_the_newest_results(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    query = text("SELECT * FROM newest ORDER BY cell_id")
    with Store.open(str(path)) as store:
        stored(store, [passed(CELLS[0]), passed(CELLS[1]), not_run(CELLS[2]), failed(CELLS[3])])
        older = store.new_run(CELLS[:2])
        flaky = dataclasses.replace(passed(CELLS[0], attempt=2), verdict="flaky")
        stored(store, [flaky, not_run(CELLS[1]), not_run(CELLS[2])])
        store.add(older, failed(CELLS[0]))  # received last
        store.new_run(CELLS, excluded={CELLS[4]: "can't"})
        store.add(store.new_run(CELLS[:1], partial=True), passed(CELLS[0]))
        with store.reading() as connection:
            before = connection.execute(query).all()
    released(path)
    with Store.open(str(path)) as store:
        with store.reading() as connection:
            assert connection.execute(query).all() == before
        assert store.current()[CELLS[0]].run.id == older


def test_the_newest_result_has_its_exact_versions(store: Store) -> None:
    stored(store, [dataclasses.replace(passed(CELLS[0]), environment={}, pins="transformers==4.57.9\n")])
    with store.reading() as connection:
        assert json.loads(connection.scalar(text("SELECT versions FROM newest"))) == {
            "python": "3.12",
            "torch": "2.10",
            "transformers": "4.57.9",
        }


@pytest.mark.parametrize("content", ["", "[", "[]", "5", '{"torch": 5}', "[" * 100_000])
def test_versions_that_are_none(store: Store, content: str) -> None:
    stored(store, [passed(CELLS[0])])
    with store.writing() as connection:
        connection.execute(text("UPDATE newest SET versions = :content"), {"content": content})
    (found,) = store.newest()
    assert (found.cell, found.versions) == (CELLS[0], {})


def test_two_runs_are_compared(store: Store) -> None:
    old = stored(store, [passed(CELLS[0]), failed(CELLS[1]), failed(CELLS[2]), passed(CELLS[3])])
    new = stored(
        store, [passed(CELLS[0]), failed(CELLS[1]), passed(CELLS[2], attempt=2), failed(CELLS[2]), passed(CELLS[4])]
    )
    found = diff.compare(store, old, new)
    states = {one.cell: (one.old and one.old.state, one.new and one.new.state) for one in found.mended + found.gone}
    assert states == {CELLS[2]: ("failed", "passed"), CELLS[3]: ("passed", None)}
    assert [(one.cell, one.old, one.new and one.new.state) for one in found.appeared] == [(CELLS[4], None, "passed")]
    assert found.broke == found.changed == []
    with pytest.raises(MatrixError, match="has no run 'gone'"):
        diff.compare(store, old, "gone")


def test_environments(store: Store) -> None:
    run = stored(store, [passed(CELLS[0]), failed(CELLS[1]), not_run(CELLS[2])])
    assert store.environment(run, CELLS[2])["shims"]["tf5"]["state"] == "applied"
    assert store.environment(run, CELLS[3]) == {}


# Merging and exporting.


def test_merge_takes_what_is_missing_and_nothing_twice(store: Store, other: Store) -> None:
    ours = stored(store, [passed(CELLS[0])])
    theirs = other.new_run(CELLS[:3], excluded={CELLS[3]: "excluded"}, axes="axes", label="node")
    other.add(theirs, failed(CELLS[0]))
    assert store.merge(other) == [theirs]
    assert store.merge(other) == []
    assert store.summary(theirs) == other.summary(theirs)
    assert store.run(theirs) == other.run(theirs)
    assert axes_of(store, theirs) == "axes"

    other.add(theirs, passed(CELLS[0], attempt=2))
    other.add(theirs, passed(CELLS[4]))
    other.finish(theirs, "finished")
    assert store.merge(other) == [theirs]
    assert store.merge(other) == []
    assert store.summary(theirs) == other.summary(theirs)
    assert store.history(CELLS[0])[:2] == other.history(CELLS[0])
    assert store.result(theirs, CELLS[0]) == other.result(theirs, CELLS[0])
    assert store.run(theirs) == other.run(theirs)
    assert [one.id for one in store.runs()] == [theirs, ours]
    assert store.merge(store) == []
    assert other.merge(store) == [ours]


def test_export_writes_one_file_with_just_these(store: Store, tmp_path: Path) -> None:
    first = stored(store, [passed(CELLS[0])])
    second = stored(store, [failed(CELLS[0])])
    target = tmp_path / "exports" / "node.db"
    with pytest.raises(MatrixError, match="no run 'gone'"):
        store.export(["gone"], target)
    store.export([second], target)
    assert [one.name for one in target.parent.iterdir()] == ["node.db"]
    # Opened read-only, as from a read-only medium.
    with Store.open(f"sqlite:///file:{target}?mode=ro&uri=true", create=False) as exported:
        assert [one.id for one in exported.runs()] == [second]
        assert exported.result(second, CELLS[0]) == store.result(second, CELLS[0])
    with pytest.raises(MatrixError, match="exists"):
        store.export([first], target)


def with_figures(cell: Cell, *figures: Figure) -> CellResult:
    return passed(cell, tests=[Test("t.py::test_a", "passed", 0.1), Test("t.py::test_b", "flaky", 0.1, "", figures)])


def test_figures_come_back_and_are_merged_and_exported(store: Store, other: Store, tmp_path: Path) -> None:
    step, error = Figure("step time", 12.5, "ms", "lower"), Figure("error", 1e-300, "")
    found = with_figures(CELLS[0], error, step)
    run = stored(other, [found, passed(CELLS[1])])
    assert other.result(run, CELLS[0]) == found
    assert other.figures(run) == {CELLS[0]: [error, step]}
    assert store.merge(other) == [run]
    assert store.result(run, CELLS[0]) == found
    later = store.new_run([CELLS[0]])
    store.add(later, with_figures(CELLS[0], dataclasses.replace(step, value=13.0)))
    store.add(later, dataclasses.replace(with_figures(CELLS[0], step), attempt=2, environment={}))
    assert store.figures(later) == {CELLS[0]: [step]}  # the latest attempt
    measured = store.series(CELLS[0])
    assert [(one.run.id, one.figure.name, one.figure.value, one.device) for one in measured] == [
        (run, "error", 1e-300, "cpu"),
        (run, "step time", 12.5, "cpu"),
        (later, "step time", 13.0, "cpu"),
        (later, "step time", 12.5, ""),
    ]
    assert {cell: len(some) for cell, some in store.measured([run]).items()} == {CELLS[0]: 2}
    assert store.series(CELLS[1]) == []
    store.export([run], tmp_path / "one.db")
    with Store.open(str(tmp_path / "one.db")) as exported:
        assert exported.result(run, CELLS[0]) == found


def test_of_a_cell_the_figures_of_its_last_runs_are_read(store: Store) -> None:
    for value in range(102):
        stored(store, [with_figures(CELLS[0], Figure("size", float(value), ""), Figure("error", 0.0, ""))])
        stored(store, [passed(CELLS[0]), with_figures(CELLS[1], Figure("size", 0.0, ""))])
    found = [one.figure.value for one in store.series(CELLS[0]) if one.figure.name == "size"]
    assert found == [float(value) for value in range(2, 102)]


# Several processes.


def _forked(folder: Path, code: str, *arguments: str) -> Forked:
    """Run this code in the folder, in another process."""
    output = folder / f"process-{len([*folder.glob('process-*')])}"
    return Forked("-c", code, *arguments, folder=folder, output=output)


WRITER = """
import sys, time
from pathlib import Path
from stored import Store, Test, cells, failed
url, number = sys.argv[1], int(sys.argv[2])
with Store.open(url) as store:
    print("ready", flush=True)
    while not Path("run").exists():
        time.sleep(0.01)
    run = Path("run").read_text()
    for attempt in range(1, 9):
        tests = [Test(f"t_{attempt}.py::test[{n}]", "failed", 0.0, f"message {attempt} {n}") for n in range(40)]
        store.add(run, failed(cells()[0], attempt=attempt, tests=tests))  # as all the others
        store.add(run, failed(cells()[number], attempt=attempt, tests=tests))
"""


def test_processes_that_make_a_store_and_write_at_once(url: str, tmp_path: Path) -> None:
    writers = [_forked(tmp_path, WRITER, url, str(number)) for number in (1, 2)]
    until(lambda: all(writer.said() for writer in writers), "two writers")
    with Store.open(url, create=False) as store:
        run = store.new_run(CELLS[:1])
    (tmp_path / "told").write_text(run)
    (tmp_path / "told").rename(tmp_path / "run")
    assert [writer.wait(LONG) for writer in writers] == [0, 0], [writer.said() for writer in writers]
    with Store.open(url) as store:
        assert [len(store.history(one)) for one in CELLS[:3]] == [8, 8, 8]
        assert len(store.result(run, CELLS[0], attempt=3).tests) == 40


def test_a_killed_writer_loses_nothing_it_has_stored(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    script = """
import sys
from stored import Store, cells, failed
with Store.open(sys.argv[1]) as store:
    run = store.new_run(cells())
    print(run, flush=True)
    for attempt in range(1, 100_000):
        store.add(run, failed(cells()[0], attempt=attempt))
        print(attempt, flush=True)
"""
    writer = _forked(tmp_path, script, str(path))
    until(lambda: writer.said().count("\n") > 20, "twenty results")
    writer.kill()
    assert writer.wait(LONG) == -signal.SIGKILL
    run, *said = writer.said().splitlines(keepends=True)
    run = run.strip()
    last = max(int(line) for line in said if line.endswith("\n"))
    with Store.open(str(path)) as store:
        attempts = [past.summary.attempt for past in store.history(CELLS[0])]
        assert attempts in ([*range(last, 0, -1)], [*range(last + 1, 0, -1)])
        assert store.result(run, CELLS[0], attempt=last) == failed(CELLS[0], attempt=last)
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


# Deleting.


def rows(store: Store) -> dict[str, int]:
    with store.reading() as connection:
        return {
            table.name: connection.scalar(select(func.count()).select_from(table)) or 0
            for table in metadata.tables.values()
        }


def test_a_deleted_run_leaves_nothing_and_takes_nothing_of_others(store: Store) -> None:
    shared = [failed(CELLS[0]), passed(CELLS[1])]
    kept = store.new_run(CELLS[:2], axes="the same")
    for one in shared:
        store.add(kept, one)
    store.finish(kept, "finished")
    before = rows(store)
    gone = store.new_run(CELLS[:2], axes="the same")
    own = [
        dataclasses.replace(
            failed(CELLS[0], tests=[Test("test_own.py::test", "failed", 1.0, "its message")]),
            pins="own==1",
            log="its log",
        ),
        failed(CELLS[0], attempt=2),
        shared[1],
    ]
    for one in own:
        store.add(gone, one)
    store.finish(gone, "interrupted")
    assert rows(store)["nodeid"] == before["nodeid"] + 1
    assert rows(store)["shared_text"] > before["shared_text"]
    removal.delete_runs(store, [gone])
    assert rows(store) == before
    assert [store.result(kept, one.cell) for one in shared] == shared
    with pytest.raises(MatrixError, match="no run"):
        removal.delete_runs(store, [gone])
    removal.delete_runs(store, [kept])
    assert set(rows(store).values()) == {0}


def test_the_newest_result_is_an_earlier_one_again_after_its_run_was_deleted(store: Store) -> None:
    kept = stored(store, [passed(CELLS[0])])
    planned = store.new_run(CELLS[:2])
    gone = stored(store, [failed(CELLS[0]), failed(CELLS[1]), failed(CELLS[2])])
    assert {past.run.id for past in store.current().values()} == {gone}
    removal.delete_runs(store, [gone])
    current = store.current()
    assert {cell: past.run.id for cell, past in current.items()} == {CELLS[0]: kept, CELLS[1]: planned}
    assert current == store.current([kept, planned])
    store.finish(planned, "interrupted")
    removal.delete_runs(store, [planned, kept])
    assert store.current() == {}


def test_a_run_that_goes_on_is_never_deleted(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    ended, running = store.new_run(CELLS), store.new_run(CELLS)
    store.finish(ended, "finished")
    with pytest.raises(submissions.StateError, match=f"{running} hasn't ended: cancel it first"):
        removal.delete_runs(store, [ended, running])
    assert {one.id for one in store.runs()} == {ended, running}
    for days, found in ((1, []), (0, [ended])):
        assert runs.prune(argparse.Namespace(store=store.url, keep=days, dry_run=True)) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:-1]] == found
    submissions.cancel(store, running)
    with pytest.raises(submissions.StateError, match="has ended"):
        submissions.cancel(store, running)
    with store.writing() as connection:  # another service has it, and the one that lost it has interrupted it
        inserts.submit(connection, inserts.key(connection, running), "default", "", {})
    with pytest.raises(submissions.StateError, match="hasn't ended"):
        removal.delete_runs(store, [running])
    with store.writing() as connection:
        submissions.remove(connection, inserts.key(connection, running))
    removal.delete_runs(store, [running])


# Schemas.


def test_databases_have_the_schema_of_the_models(url: str) -> None:
    """The models are read from SQLite; PostgreSQL's schema is made from the same statements."""
    Store.open(url).close()
    engine = create_engine(database.parse(url))
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": database.VERSIONS, "compare_type": True}
        )
        assert compare_metadata(context, metadata) == []
    engine.dispose()
    revisions = ScriptDirectory(str(Path(database.__file__).with_name("migrations"))).walk_revisions()
    assert [script.revision for script in revisions] == [*reversed(database.REVISIONS)]


def test_a_store_of_a_released_version_is_migrated_with_its_results(url: str) -> None:
    engine = database.connect(database.parse(url), create=True)
    with database.writing(engine).begin() as connection:
        database.upgrade(connection, "0004")
        began = "'2025-01-01 00:00:00'"
        for statement in (
            "INSERT INTO run (name, started, state, label, command, host, revision)"
            f" VALUES ('20250101-000000-0000', {began}, 'running', 'old', '', '', '')",
            "INSERT INTO cell (name, python, transformers, torch, flash_attention, device)"
            " VALUES ('py312-tf4.57-torch2.10', '3.12', '4.57', '2.10', 'none', 'cpu')",
            "INSERT INTO planned VALUES (1, 1, 0, NULL)",
            "INSERT INTO nodeid (digest, name) VALUES ('d1', 'test_old.py::test')",
            "INSERT INTO result (run_id, cell_id, attempt, verdict, kind, reason, started, seconds,"
            " passed, failed, error, skipped, xfailed, xpassed)"
            f" VALUES (1, 1, 1, 'failed', 'test', 'old reason', {began}, 2.5, 0, 1, 0, 0, 0, 0)",
            "INSERT INTO test VALUES (1, 0, 1, 'failed', 1.5, NULL)",
        ):
            connection.execute(text(statement))
    engine.dispose()
    with Store.open(url, create=False) as store:
        found = store.result(store.resolve("old"), CELLS[0])
        assert found.reason == "old reason"
        assert found.tests == (Test("test_old.py::test", "failed", 1.5),)
        summary = store.summary(store.resolve("latest"))[CELLS[0]]
        assert (summary.failed, summary.flaky, summary.known) == (1, 0, 0)
        assert not store.run(store.resolve("old")).partial
        assert store.current()[CELLS[0]].summary.reason == "old reason"
        store.add(store.resolve("old"), passed(CELLS[0], attempt=2))


def test_runs_that_waited_for_workers_are_migrated_and_can_be_resumed(url: str) -> None:
    engine = database.connect(database.parse(url), create=True)
    with database.writing(engine).begin() as connection:
        database.upgrade(connection, "0004")
        began, lease = "'2026-01-01 00:00:00'", "VALUES ('l1', 1, 'w', 't', '2026-01-01 00:00:00', NULL, NULL)"
        for statement in (
            f"INSERT INTO run VALUES (1, 'waits', {began}, NULL, 'running', '', '', '', '', NULL, false)",
            f"INSERT INTO run VALUES (2, 'alone', {began}, NULL, 'running', '', '', '', '', NULL, false)",
            f"INSERT INTO run VALUES (3, 'ended', {began}, {began}, 'finished', '', '', '', '', NULL, false)",
            "INSERT INTO cell VALUES (1, 'py312-tf4.57-torch2.10', '3.12', '4.57', '2.10', 'none', 'cpu')",
            "INSERT INTO planned VALUES (1, 1, 0, NULL)",
            "INSERT INTO planned VALUES (3, 1, 0, NULL)",
            "INSERT INTO task VALUES (1, 1, 1, 1, 'default', 'f', '3.12', 0, 4, 0, 999, '', 0, 'leased', 0, 'l1', 'w', NULL)",
            "INSERT INTO task VALUES (2, 3, 1, 1, 'default', 'f', '3.12', 0, 4, 0, 999, '', 0, 'done', 0, NULL, NULL, NULL)",
            f"INSERT INTO lease {lease}",
            *(
                f"INSERT INTO token VALUES ({n}, '{name}', '{name}', '{name}', {began}, NULL, NULL, NULL)"
                for n, name in enumerate(("submit work", "work", "submit"), 1)
            ),
        ):
            connection.execute(text(statement))
    engine.dispose()
    with Store.open(url, create=False) as store:
        assert {one.id: one.state for one in store.runs()} == {
            "waits": "interrupted",
            "alone": "running",
            "ended": "finished",
        }
        with store.reading() as connection:
            assert not {"task", "lease"} & {*connection.dialect.get_table_names(connection)}
        assert store.run("waits").finished is not None
        assert unfinished(store, "waits") == [CELLS[0]]
        assert [token.scopes for token in tokens.every(store)] == ["submit", "submit", "read"]


@pytest.mark.parametrize(
    ("revision", "message"),
    [
        ("9999", r"by a newer kernel-compat-matrix \(schema 9999, this one knows 0004 and 0009\): upgrade it"),
        ("0008", r"by a kernel-compat-matrix \(schema 0008, .*\) that was never released, and can't be migrated"),
        ("0001", "never released"),
    ],
)
def test_a_store_of_an_unknown_version_is_left_alone(url: str, revision: str, message: str) -> None:
    Store.open(url).close()
    engine = create_engine(database.parse(url))
    change = text(f"UPDATE {database.VERSIONS} SET version_num = :revision")
    with engine.begin() as connection:
        connection.execute(change, {"revision": revision})
    for foreign in (False, True):
        with pytest.raises(MatrixError, match=message):
            Store.open(url, foreign=foreign)
    with engine.begin() as connection:
        connection.execute(change, {"revision": database.HEAD})
    engine.dispose()
    Store.open(url).close()


def test_somebody_elses_database_is_left_alone(url: str) -> None:
    engine = create_engine(database.parse(url))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE recipes (id INTEGER)"))
    with pytest.raises(MatrixError, match=r"isn't a store of kernel-compat-matrix: it has other tables \(recipes\)"):
        Store.open(url)
    with engine.connect() as connection:
        assert connection.dialect.get_table_names(connection) == ["recipes"]
    engine.dispose()


# What can go wrong.


def test_nothing_is_made_unless_asked(url: str, tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match="it doesn't exist|it is empty"):
        Store.open(url, create=False)
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "empty.db").touch()
    with pytest.raises(MatrixError, match="it is empty"):
        Store.open(str(tmp_path / "empty.db"), create=False)
    Store.open(str(tmp_path / "deep" / "er" / "store.db")).close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nothing://x", "its driver is not installed .*nothing"),
        ("sqlite://", "'sqlite://' has no file: a store can't be in memory"),
        ("sqlite:///:memory:", "a store can't be in memory"),
        ("://", "isn't the URL of a database"),
        ("postgresql://host:port/x", "isn't the URL of a database"),
        ("mysql+pymysql://x/y", "its driver is not installed"),
        (
            "postgresql://me:secret@127.0.0.1:1/x?connect_timeout=2",
            r"postgresql\+psycopg://me:\*\*\*@127.0.0.1:1/x.*refused",
        ),
        ("/dev/null/store.db", "the folder of the store can't be made"),
        ("/dev", "unable to open database file"),
    ],
)
def test_stores_that_cannot_be_reached(url: str, message: str) -> None:
    with pytest.raises(MatrixError, match=message) as caught:
        Store.open(url)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_text("hello, I am a log file\n" * 100)
    with pytest.raises(MatrixError, match="file is not a database"):
        Store.open(str(path))
    assert path.read_text().startswith("hello")


def test_a_corrupt_database(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with Store.open(str(path)) as store:
        run = stored(store, [failed(one) for one in CELLS])
    content = bytearray(path.read_bytes())
    content[8192:] = os.urandom(len(content) - 8192)  # the schema is in the first two pages
    path.write_bytes(content)
    with pytest.raises(MatrixError, match="malformed|corrupt"), Store.open(str(path)) as store:  # noqa: PT012
        store.summary(run)
        store.result(run, CELLS[0])


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with Store.open(str(path)) as store:
        run = store.new_run(CELLS)
    with Store.open(f"sqlite:///file:{path}?mode=ro&uri=true") as store:
        assert unfinished(store, run) == CELLS
        with pytest.raises(MatrixError, match="attempt to write a readonly database"):
            store.add(run, passed(CELLS[0]))
    (tmp_path / "empty.db").touch()
    with pytest.raises(MatrixError, match="attempt to write a readonly database"):
        Store.open(f"sqlite:///file:{tmp_path / 'empty.db'}?mode=ro&uri=true")


# Runs in a subprocess, because the limits can't be undone.
FULL = """
import dataclasses, os, sys
from compat_matrix.errors import MatrixError
from stored import Store, cells, failed
with Store.open(sys.argv[1]) as store:
    run = store.new_run(cells())
    exec(sys.argv[2])
    attempt = 0
    try:
        while attempt < 1000:
            store.add(run, dataclasses.replace(failed(cells()[0], attempt=attempt + 1), log=os.urandom(20_000).hex()))
            attempt += 1
    except MatrixError as error:
        print(error)
    print(run)
    print(attempt)
"""


def _fill(folder: Path, path: Path, limit: str = "") -> tuple[str, str, int]:
    process = _forked(folder, FULL, str(path), limit)
    assert process.wait(LONG) == 0, process.said()
    error, run, attempts = process.said().splitlines()
    return error, run, int(attempts)


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))"
    error, run, attempts = _fill(tmp_path, path, limit)
    assert error.startswith(f"the store {path}: ")
    assert attempts > 5
    with Store.open(str(path)) as store:
        assert len(store.history(CELLS[0])) == attempts
        store.add(run, passed(CELLS[0], attempt=attempts + 1))


def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=False, capture_output=True
    ).returncode:
        pytest.skip("a small disk can't be mounted here: that takes root")
    try:
        error, run, attempts = _fill(tmp_path, disk / "store.db")
        assert "disk is full" in error
        shutil.copytree(disk, tmp_path / "copy")
    finally:
        subprocess.run(["umount", disk], check=True)
    assert attempts > 5
    with Store.open(str(tmp_path / "copy" / "store.db")) as store:
        assert len(store.history(CELLS[0])) == attempts
        store.add(run, passed(CELLS[0], attempt=attempts + 1))


def test_urls() -> None:
    assert database.parse("some/where.db") == make_url("sqlite:///some/where.db")
    assert database.parse("postgresql://host/x").drivername == "postgresql+psycopg"
    assert database.parse("postgresql+psycopg://host/x").drivername == "postgresql+psycopg"
