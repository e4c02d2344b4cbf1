"""Which runs are parts of one run, what it has then, and the order of runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import update
from stored import cells, failed, not_run, passed, unfinished

from compat_matrix.cells import Cell
from compat_matrix.commands import runs
from compat_matrix.errors import MatrixError
from compat_matrix.results import CellResult, Test
from compat_matrix.store import Store, removal
from compat_matrix.store.models import RUN
from compat_matrix.views import compatibility, diff, explain, show

CELLS = cells()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "other.db")) as store:
        yield store


def part(store: Store, results: Sequence[CellResult], command: str = "run", **given: str) -> str:
    """Store a run of these results at the commit 75eada2, unless another is given."""
    values: dict[str, Any] = {"revision": "75eada2", "axes": "axes", **given}
    is_partial = "--suite" in command or "-k" in command
    run = store.new_run([one.cell for one in results], **{"command": command, "partial": is_partial, **values})
    for one in results:
        store.add(run, one)
    store.finish(run, "finished")
    return run


def states(store: Store, run: str) -> dict[Cell, str]:
    return {cell: summary.state for cell, summary in store.summary(store.resolve(run)).items()}


def test_of_partial_runs_the_result_that_counts_is_shown(store: Store) -> None:
    """A later part in which the machine lacked something doesn't hide the result of the tests."""
    ran = part(store, [passed(CELLS[0]), passed(CELLS[1])], "run --suite figures")
    lacking = part(store, [not_run(CELLS[0])], "run --suite figures")
    assert store.history(CELLS[0])[0].run.id == lacking
    past = explain.past_of(store, CELLS[0])
    assert past is not None
    assert (past.run.id, past.summary.verdict) == (ran, "passed")


def test_shards_of_one_revision_are_one_run(store: Store, other: Store, tmp_path: Path) -> None:
    before = part(store, [passed(one) for one in CELLS], revision="0ld")
    parts = []
    for n, of in enumerate((store, other), 1):
        run = of.new_run(
            CELLS[n - 1 :: 2][:2],
            excluded={CELLS[5]: "excluded"},
            command=f"run --shard {n}/2",
            revision="75eada2",
            host=f"node{n}",
        )
        of.add(run, passed(CELLS[n - 1]))
        of.add(run, failed(CELLS[n + 1]))
        of.finish(run, "finished")
        parts.append(run)
    other.export([parts[1]], tmp_path / "node.db")
    with Store.open(str(tmp_path / "node.db")) as node:
        store.merge(node)
    assert store.resolve("latest") == store.resolve(parts[1]) == parts[0]
    assert [one.id for one in store.parts(parts[1])] == parts
    assert store.resolve("latest~1") == before
    assert states(store, "latest") == {
        CELLS[0]: "passed",
        CELLS[2]: "failed",
        CELLS[5]: "excluded",
        CELLS[1]: "passed",
        CELLS[3]: "failed",
    }
    assert store.result(parts[0], CELLS[3]) == failed(CELLS[3])
    assert store.environment(parts[0], CELLS[3])["python"] == "3.12.1"
    found = diff.compare(store, before, parts[0])
    assert [one.cell for one in found.broke] == [CELLS[2], CELLS[3]]
    with Store.open(str(tmp_path / "all.db")) as copy:
        store.export(parts, tmp_path / "whole.db")
        with Store.open(str(tmp_path / "whole.db")) as whole:
            assert copy.merge(whole) == parts
        assert states(copy, "latest") == states(store, "latest")


def test_shards_that_begin_at_once_are_one_run(store: Store) -> None:
    together = Barrier(len(CELLS))

    def begin(label: str, cell: Cell) -> str:
        together.wait()
        return store.new_run([cell], label=label)

    for label in ("first", "second", "third"):
        with ThreadPoolExecutor(len(CELLS)) as pool:
            found = [*pool.map(partial(begin, label), CELLS)]
        assert len({store.resolve(run) for run in found}) == 1


@pytest.mark.parametrize(
    "values",
    [
        {"revision": "another"},
        {"revision": "75eada2+"},
        {"revision": ""},
        {"label": "nightly"},
        {"axes": "other axes"},
        {"command": "run --suite long"},
        {"command": "run --latest"},
        {"command": "run --pytest '-k generate'"},
    ],
)
def test_runs_that_differ_in_what_they_test_are_apart(store: Store, values: dict[str, str]) -> None:
    first = part(store, [passed(CELLS[0])])
    second = part(store, [passed(CELLS[1])], **values)
    assert (store.resolve(first), store.resolve(second)) == (first, second)
    third = part(store, [passed(CELLS[2])], **values)
    together = values.get("revision") not in ("", "75eada2+")
    assert store.resolve(third) == (second if together else third)


def test_a_label_holds_runs_of_uncommitted_code_together(store: Store) -> None:
    first = part(store, [passed(CELLS[0])], revision="75eada2+", label="job 17")
    assert store.resolve(part(store, [passed(CELLS[1])], revision="75eada2+", label="job 17")) == first
    assert store.resolve("job 17") == first


def test_a_repeated_job_counts_by_its_newest_results(store: Store) -> None:
    first = part(store, [failed(CELLS[0]), failed(CELLS[1])])
    part(store, [failed(CELLS[2]), passed(CELLS[3])])
    again = [passed(CELLS[0]), failed(CELLS[1], "seam", "f is gone", tests=[Test("t", "failed", 0)]), not_run(CELLS[3])]
    part(store, again)
    store.new_run([CELLS[2]], revision="75eada2", axes="axes", command="run")
    assert states(store, first) == dict(zip(CELLS, ["passed", "failed", "failed", "passed"], strict=False))
    assert store.result(first, CELLS[1]).reason == "f is gone"
    assert unfinished(store, first) == []
    assert store.result(first, CELLS[3]).verdict == "passed"  # and not what a machine without a GPU says of it
    new = part(store, [passed(one) for one in CELLS], revision="another")
    assert [one.cell for one in diff.compare(store, first, new).mended] == [CELLS[1], CELLS[2]]
    newer = part(store, [failed(CELLS[1]), failed(CELLS[2], tests=[Test("t", "failed", 0)])], revision="newer")
    found = diff.compare(store, newer, first)  # with the tests of the results that count
    assert (found.tests_broke, found.tests_mended) == ({}, {})
    assert [one.cell for one in found.changed] == [CELLS[1]]


def test_a_run_of_all_cells_again_is_a_new_run(store: Store) -> None:
    first = part(store, [passed(CELLS[0]), passed(CELLS[1])])
    second = part(store, [failed(CELLS[0]), passed(CELLS[1])])
    assert store.resolve("latest~1") == first
    assert store.resolve(part(store, [passed(CELLS[2])])) == second


def test_runs_lists_the_parts(store: Store, capsys: pytest.CaptureFixture[str], url: str) -> None:
    alone = part(store, [passed(CELLS[5])], label="alone")
    first = part(store, [passed(CELLS[0]), failed(CELLS[1])])
    second = part(store, [passed(CELLS[1])])
    assert runs.runs(argparse.Namespace(store=url, json=False)) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{first}  finished  2 passed",
        f"    part {first}  finished  1 passed, 1 failed",
        f"    part {second}  finished  1 passed",
        f"{alone} (alone)  finished  1 passed",
    ]
    assert runs.runs(argparse.Namespace(store=url, json=True)) == 0
    assert {one["id"]: one["whole"] for one in json.loads(capsys.readouterr().out)} == {
        alone: alone,
        first: first,
        second: first,
    }
    assert show.run(argparse.Namespace(store=url, json=False, figure=None, chosen="latest")) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"run {first}, finished, in 2 parts, begun ")
    assert "\n2 cells: 2 passed\n" in shown
    store.finish(second, "interrupted")
    assert show.run(argparse.Namespace(store=url, json=True, chosen=second)) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"]["state"], [one["id"] for one in found["parts"]]) == ("interrupted", [first, second])


def test_the_others_are_one_run_after_the_first_part_was_deleted(store: Store) -> None:
    first, *others = [part(store, [passed(one)]) for one in CELLS[:3]]
    removal.delete_runs(store, [first])
    assert [one.id for one in store.parts(others[1])] == others
    assert store.resolve("latest") == others[0]
    assert states(store, others[0]) == dict.fromkeys(CELLS[1:3], "passed")
    later = part(store, [passed(CELLS[3])])
    assert [one.whole for one in store.parts(later)] == [others[0]] * 3


def test_a_part_is_deleted_and_cancelled_by_its_id_and_a_run_by_its_other_names(store: Store, url: str) -> None:
    one, two, three = (part(store, [passed(cell)], label="gpu") for cell in CELLS[:3])
    going = store.new_run(CELLS[3:4], label="gpu", command="run", revision="75eada2", axes="axes")
    assert [part.id for part in store.parts(one)] == [one, two, three, going]

    def order(command: Any, *names: str) -> None:
        assert command(argparse.Namespace(store=url, runs=names)) == 0

    order(runs.delete, two)
    assert {run.id for run in store.runs()} == {one, three, going}
    order(runs.cancel, "gpu")  # of its parts only one goes on
    assert store.run(going).state == "interrupted"
    order(runs.delete, "latest", three)
    assert store.runs() == []


def test_the_document_counts_parts_as_one_run(store: Store) -> None:
    part(store, [passed(CELLS[0])], host="node1")
    part(store, [passed(CELLS[1])], host="node2")
    part(store, [passed(CELLS[2])], host="node2", revision="another")
    rows = compatibility.document(store, store.current()).splitlines()
    assert [row.split("|")[-2].strip() for row in rows if "| works |" in row] == ["1", "2"]
    assert [row.split("|")[-3].strip() for row in rows[-2:]] == ["node1 and 1 more", "node2"]
    assert [*store.current([store.resolve("latest~1")])] == CELLS[:2]


def test_suites_are_not_compared(store: Store) -> None:
    default = part(store, [passed(CELLS[0])])
    long, next_long = (
        part(store, [failed(CELLS[0])], command=command) for command in ("run --suite long", "run --suite=long -j 3")
    )
    with pytest.raises(MatrixError, match=rf"{default} \(suite default\) and {long} \(suite long\) .*compared"):
        diff.compare(store, default, long)
    assert diff.compare(store, long, next_long).broke == []


def test_a_clock_that_is_wrong_hides_nothing(store: Store, other: Store) -> None:
    future = part(other, [failed(CELLS[0])], revision="future", label="x")
    with other.writing() as connection:
        connection.execute(update(RUN).values(started=store.run(part(store, [])).started.replace(year=2099)))
    store.merge(other)
    new = part(store, [passed(CELLS[0])], label="x")
    assert [one.id for one in store.runs()][:2] == [new, future]
    assert store.resolve("latest") == store.resolve("x") == new
    assert store.current()[CELLS[0]].run.id == new
    assert [past.run.id for past in store.history(CELLS[0])] == [new, future]
