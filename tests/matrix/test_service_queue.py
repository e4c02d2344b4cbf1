from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked import Forked
from hypothesis import given
from hypothesis import strategies as st
from network import until
from sqlalchemy import select
from stored import failed, passed

from compat_matrix.axes import Axes, load
from compat_matrix.cells import parse
from compat_matrix.errors import MatrixError
from compat_matrix.results import CellResult, Test
from compat_matrix.service import tokens
from compat_matrix.service.client import Direct, Unreachable
from compat_matrix.service.logs import Ends
from compat_matrix.service.protocol import REPORT_BYTES, Gpu, Leased, Machine, Report, Result, Submission, Wanted
from compat_matrix.service.queue import CAPABILITIES, Differs, NoLease, Over, Queue
from compat_matrix.service.settings import Settings
from compat_matrix.service.upload_queue import UploadQueue
from compat_matrix.service.worker import Worker
from compat_matrix.store import Store
from compat_matrix.store.models import LEASE, TOKEN, pack

PRINT = "a" * 64
START = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)

AXES = """
version = 1
[axes]
python = ["3.11", "3.12"]
transformers = ["5.0", "5.1"]
torch = ["2.11"]
flash_attention = ["none", "fa3"]
device = ["cpu", "cuda"]
[[exclude]]
when = "device==cpu and flash_attention!=none"
because = "for CUDA alone"
[[exclude]]
when = "device==cuda and flash_attention==none"
because = "no difference"
[[tests]]
when = "device==cpu and transformers==5.1"
command = ["pytest"]
memory = 16
[[tests]]
when = "device==cpu"
command = ["pytest"]
[[tests]]
when = "python==3.11"
command = ["pytest"]
gpus = 2
labels = ["nvlink"]
[[tests]]
when = "device==cuda"
command = ["pytest"]
gpus = 1
"""
CPU = ["py311-tf5.0-torch2.11", "py311-tf5.1-torch2.11", "py312-tf5.0-torch2.11", "py312-tf5.1-torch2.11"]


class Clock:
    def __init__(self) -> None:
        self.time = START

    def __call__(self) -> datetime:
        return self.time

    def pass_(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)


@pytest.fixture
def axes(tmp_path: Path) -> Axes:
    path = tmp_path / "axes.toml"
    path.write_text(AXES)
    return load(path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(store: Store, axes: Axes, clock: Clock) -> Queue:
    return Queue(store, axes, Settings(lease_seconds=60, tries=3), fingerprint=PRINT, revision="abc", now=clock)


def machine(**more: Any) -> Machine:
    return Machine(**{"name": "one", "version": "0.1.0", "fingerprint": PRINT, "memory": 64.0, **more})


def wanted(name: str = "one", **more: Any) -> Wanted:
    asked = {key: more.pop(key, None) for key in ("only", "lease")}
    found = machine(name=name, **more)
    return Wanted(machine=found, free_gpus=len(found.gpus), free_memory=found.memory, **asked)


def report(found: CellResult, now: datetime = START) -> Report:
    return Report(result=Result.of(found), now=now.timestamp())


def cpu(queue: Queue) -> str:
    return queue.submit(Submission(only="device==cpu")).run


# Runs and leases.


def test_a_run_has_the_cells_of_the_axes_and_those_that_can_not_be(queue: Queue) -> None:
    found = queue.submit(Submission(only="python==3.12", label="a label"))
    assert (found.cells, found.excluded) == (4, 4)
    run = queue.store.run(found.run)
    assert (run.label, run.state, run.partial, run.revision) == ("a label", "running", False, "abc")
    assert run.command == "run --only=python==3.12"
    states = Counter(one.state for one in queue.store.summary(found.run).values())
    assert states == {"unfinished": 4, "excluded": 4}
    assert queue.counts() == {"queued": 4}
    named = queue.submit(Submission(cells=CPU[:2]))
    assert [cell.name for cell in queue.store.summary(named.run)] == CPU[:2]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"cells": ["py310-tf5.0-torch2.11"]}, "there is no cell"),
        ({"cells": ["py312-tf5.0-torch2.11-fa3"]}, "is excluded: for CUDA alone"),
        ({"only": "import os"}, "import os"),
        ({"only": "torch==1.0"}, "no cell of axes.toml matches"),
        ({"suite": "other"}, "has the suites default, not 'other'"),
    ],
)
def test_only_cells_of_the_axes_can_be_run(queue: Queue, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(MatrixError, match=said):
        queue.submit(Submission(**wrong))
    assert queue.store.runs() == []
    assert queue.counts() == {}


def test_a_machine_gets_what_it_can_run(queue: Queue) -> None:
    queue.submit(Submission())

    def got(**more: Any) -> list[str]:
        found, leases = [], []
        while (leased := queue.lease(wanted(**more), "token")) is not None:
            found.append(leased.cell)
            leases.append(leased.lease)
        for lease in leases:
            queue.give_back(lease)
        return sorted(found)

    hopper, blackwell = Gpu(name="H200", capability="9.0"), Gpu(name="B200", capability="10.0")
    assert got() == CPU
    assert got(memory=8.0) == [CPU[0], CPU[2]]
    assert got(pythons=["3.12"]) == CPU[2:]
    assert got(only="torch==2.11 and transformers==5.0") == [CPU[0], CPU[2]]
    assert got(memory=1.0) == []
    one = ["py312-tf5.0-torch2.11-fa3-cuda", "py312-tf5.1-torch2.11-fa3-cuda"]
    assert got(gpus=[hopper]) == sorted(CPU + one)
    assert got(gpus=[blackwell]) == CPU  # FlashAttention-3 has no kernels for Blackwell
    assert got(gpus=[hopper, blackwell]) == CPU
    assert got(gpus=[hopper, hopper], labels=["other"]) == sorted(CPU + one)
    both = [f"py311-tf5.{n}-torch2.11-fa3-cuda" for n in (0, 1)]
    assert got(gpus=[hopper, hopper], labels=["other", "nvlink"]) == sorted(CPU + one + both)
    # Cells that other workers can't run are leased first to a worker that can.
    first = queue.lease(wanted(gpus=[hopper, hopper], labels=["nvlink"]), "token")
    assert first is not None
    assert first.cell in both
    busy = Wanted(machine=machine(gpus=[hopper, hopper]), free_gpus=0, free_memory=5.0)
    second = queue.lease(busy, "token")
    assert second is not None
    assert second.cell in (CPU[0], CPU[2])


def test_capabilities_are_those_of_the_librarys_kernels() -> None:
    from kernel_compat.kernels.catalog import CATALOG

    for name, number in {"fa2": "2", "fa3": "3", "fa4": "4", "torch": "torch"}.items():
        low, high = CAPABILITIES[name]
        for package in CATALOG[f"flash_attention_{number}"]:
            assert package.features.min_capability == (low // 10, 0)
            assert (package.features.max_capability is not None) == (high != 999)


def test_another_checkout_is_refused(queue: Queue) -> None:
    cpu(queue)
    with pytest.raises(
        Differs, match="the project and the axes file of one .* started with, at abc: update both to the same commit"
    ):
        queue.lease(wanted(fingerprint="b" * 64), "token")
    assert queue.running() == []


# Results.


def test_results_are_what_a_run_stores_and_end_it(queue: Queue, clock: Clock) -> None:
    run = cpu(queue)
    there = {}
    for make in (passed, failed, passed, failed):
        leased = queue.lease(wanted(), "token")
        assert leased is not None
        assert (leased.run, leased.attempt, leased.seconds, leased.suite) == (run, 1, 60, "default")
        assert [one.cell.name for one in queue.running(run)] == [leased.cell]
        found = dataclasses.replace(make(parse(leased.cell)), started=START)
        queue.upload(leased.lease, pack(found.log))
        assert queue.report(leased.lease, report(found))
        there[leased.cell] = found
        assert queue.running() == []
    assert queue.lease(wanted(), "token") is None
    assert {cell.name: queue.store.result(run, cell) for cell in map(parse, CPU)} == there
    assert queue.store.run(run).state == "finished"
    assert queue.store.run(run).finished is not None
    assert queue.counts() == {}


def test_a_result_that_comes_twice_counts_once(queue: Queue) -> None:
    run = cpu(queue)
    leased = queue.lease(wanted(), "token")
    assert leased is not None
    cell = parse(leased.cell)
    assert queue.report(leased.lease, report(passed(cell)))
    assert queue.report(leased.lease, report(failed(cell)))  # has the same answer and no effect
    assert [past.summary.verdict for past in queue.store.history(cell)] == ["passed"]
    with pytest.raises(Over):
        queue.upload(leased.lease, pack("more"))
    assert queue.late(cell, run) == []
    for of_none in (queue.renew, queue.give_back, lambda lease: queue.report(lease, report(passed(cell)))):
        with pytest.raises(NoLease):
            of_none("x" * 32)


def test_a_lost_worker_gives_its_cell_back_when_the_lease_ends(queue: Queue, clock: Clock) -> None:
    run = queue.submit(Submission(cells=CPU[:1])).run
    first = queue.lease(wanted("one"), "token")
    assert first is not None
    clock.pass_(59)
    assert queue.lease(wanted("two"), "token") is None
    assert queue.renew(first.lease) == 60
    clock.pass_(59)
    assert queue.lease(wanted("two"), "token") is None
    clock.pass_(2)
    second = queue.lease(wanted("two"), "token")
    assert second is not None
    assert (second.cell, second.lease == first.lease) == (CPU[0], False)
    with pytest.raises(Over):
        queue.renew(first.lease)

    # A late result is kept.
    cell = parse(CPU[0])
    late = dataclasses.replace(failed(cell), started=START)
    queue.upload(first.lease, pack(late.log))
    assert not queue.report(first.lease, report(late, clock.time))
    assert not queue.report(first.lease, report(late, clock.time))
    assert queue.store.history(cell) == []
    assert queue.report(second.lease, report(passed(cell)))
    (past,) = queue.store.history(cell)
    assert past.summary.verdict == "passed"
    (kept,) = queue.late(cell)
    assert (kept.run, kept.worker, kept.received, kept.result) == (run, "one", clock.time, late)
    assert queue.store.run(run).state == "finished"


def test_a_result_at_the_end_of_its_lease_is_late_also_while_nobody_else_has_the_cell(
    queue: Queue, clock: Clock
) -> None:
    run = queue.submit(Submission(cells=CPU[:1])).run
    first = queue.lease(wanted("one"), "token")
    assert first is not None
    clock.pass_(61)
    assert not queue.report(first.lease, report(passed(parse(CPU[0])), clock.time))
    assert queue.store.run(run).state == "running"
    second = queue.lease(wanted("one"), "token")
    assert second is not None
    assert queue.report(second.lease, report(passed(parse(CPU[0])), clock.time))
    assert len(queue.late(parse(CPU[0]))) == 1


def test_a_cell_that_kills_its_workers_fails(queue: Queue, clock: Clock) -> None:
    run = queue.submit(Submission(cells=CPU[:1])).run
    for name in ("one", "two", "two"):
        assert queue.lease(wanted(name), "token") is not None
        clock.pass_(61)
        queue.sweep()
        queue.sweep()
    assert queue.lease(wanted("one"), "token") is None
    found = queue.store.result(run, parse(CPU[0]))
    assert (found.verdict, found.kind, found.reason) == ("failed", "crash", "its worker was lost 3 times: one, two")
    assert queue.store.run(run).state == "finished"


def test_who_did_not_hear_of_its_lease_gets_the_same_once_more(queue: Queue, clock: Clock) -> None:
    cpu(queue)
    name = "x" * 32
    first = queue.lease(wanted(lease=name), "token")
    assert first is not None
    assert (first.lease, first.seconds) == (name, 60)
    clock.pass_(20)
    assert queue.lease(wanted(lease=name), "token") == first.model_copy(update={"seconds": 40.0})
    others = [queue.lease(wanted(**of, lease=name), token) for of, token in (({"name": "two"}, "token"), ({}, "other"))]
    others.append(queue.lease(wanted(lease="y" * 32), "token"))
    assert len({one.cell for one in [first, *others] if one}) == 4
    assert queue.lease(wanted(), "token") is None
    assert queue.lease(wanted(lease=name), "token") is not None  # even if no other cell is left
    assert queue.report(name, report(passed(parse(first.cell))))
    assert queue.lease(wanted(lease=name), "token") is None
    assert others[-1] is not None
    queue.give_back(others[-1].lease)
    again = queue.lease(wanted(lease=name), "token")
    assert again is not None
    assert again.lease != name


def test_a_question_that_is_asked_again_before_its_answer_gets_the_same_lease(store: Store, axes: Axes) -> None:
    queue = Queue(store, axes, Settings(), fingerprint=PRINT)
    cpu(queue)
    got: list[Leased | None] = []

    def ask() -> None:
        got.append(queue.lease(wanted(lease="x" * 32), "token"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one and one.cell for one in got} == {queue.running()[0].cell.name}
    assert len(queue.running()) == 1


class Done:
    """An executor whose jobs pass at once."""

    jobs = 1

    def submit(self, job: Any, started: Any) -> Future[CellResult]:
        future: Future[CellResult] = Future()
        future.set_result(passed(job.cell))
        return future

    def cancel(self) -> None:
        pass

    close = cancel


def test_an_answer_that_a_worker_did_not_hear_is_no_lost_try(store: Store, axes: Axes, tmp_path: Path) -> None:
    queue = Queue(store, axes, Settings(), fingerprint=PRINT)
    run = cpu(queue)

    class Unlucky(Direct):
        lost = 0

        def lease(self, wanted: Wanted) -> Leased | None:
            found = super().lease(wanted)
            if found is not None and self.lost < 2:
                self.lost += 1
                raise Unreachable("the connection broke")
            return found

    def job(leased: Leased) -> Any:
        return SimpleNamespace(cell=parse(leased.cell), tests=SimpleNamespace(gpus=0, memory=0.0))

    service, spool = Unlucky(queue, "token"), UploadQueue(tmp_path / "spool")
    worker = Worker(service, machine(), Done(), job, spool, fingerprint=lambda: PRINT, note=lambda _: None)
    worker.work(until_empty=True)
    assert service.lost == 2
    assert store.run(run).state == "finished"
    with store.reading() as connection:
        assert connection.scalars(select(LEASE.c.how)).all() == ["counted"] * 4


def test_where_workers_are_lost_by_chance_no_cell_is_said_to_kill_them(queue: Queue, clock: Clock) -> None:
    """In the end only the cell that loses every worker is blamed; one other cell gets a result every fourth round."""
    run, rounds = cpu(queue), 0
    while leased := [one for name in "abcd" if (one := queue.lease(wanted(name), "token"))]:
        rounds += 1
        lucky = next((one for one in leased if one.cell != CPU[0]), None)
        if lucky and rounds % 4 == 0:
            assert queue.report(lucky.lease, report(passed(parse(lucky.cell)), clock.time))
        clock.pass_(61)
        queue.sweep()
    assert rounds == 30
    ends = {cell.name: one.verdict for cell, one in queue.store.summary(run).items() if one.verdict}
    assert ends == {name: "failed" if name == CPU[0] else "passed" for name in CPU}
    assert queue.store.result(run, parse(CPU[0])).reason.startswith("its worker was lost 30 times: ")


def test_one_cell_of_many_that_kills_its_workers_fails(queue: Queue, clock: Clock) -> None:
    run = cpu(queue)
    while (leased := queue.lease(wanted(), "token")) is not None:
        if leased.cell == CPU[-1]:
            clock.pass_(61)
            queue.sweep()
        else:
            assert queue.report(leased.lease, report(passed(parse(leased.cell)), clock.time))
    assert queue.store.result(run, parse(CPU[-1])).reason == "its worker was lost 3 times: one"


def test_what_is_given_back_is_no_try(queue: Queue, clock: Clock) -> None:
    queue.submit(Submission(cells=CPU[:1]))
    for _ in range(5):
        leased = queue.lease(wanted(), "token")
        assert leased is not None
        queue.give_back(leased.lease)
        queue.give_back(leased.lease)
    assert queue.counts() == {"queued": 1}


def test_a_service_that_was_away_takes_no_cell_from_its_worker(store: Store, axes: Axes, clock: Clock) -> None:
    settings = Settings(lease_seconds=60)
    before = Queue(store, axes, settings, fingerprint=PRINT, now=clock)
    run = before.submit(Submission(cells=CPU[:2])).run
    leased = before.lease(wanted(), "token")
    assert leased is not None
    clock.pass_(3600)
    after = Queue(store, axes, settings, fingerprint=PRINT, now=clock)
    after.start()
    assert after.report(leased.lease, report(passed(parse(leased.cell)), clock.time))

    # A service restarted with another commit has no workers for the remaining cells.
    newer = Queue(store, axes, settings, fingerprint="b" * 64, now=clock)
    newer.start()
    assert newer.counts() == {}
    assert store.run(run).state == "interrupted"
    assert sorted(one.state for one in store.summary(run).values()) == ["passed", "unfinished"]


def test_a_run_that_nobody_ended_is_ended_later(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    run = queue.submit(Submission(cells=CPU[:1])).run
    leased = queue.lease(wanted(), "token")
    assert leased is not None
    with monkeypatch.context() as killed:  # killed between the report and the end of the run
        killed.setattr(Queue, "_finish", lambda *_: None)
        queue.report(leased.lease, report(passed(parse(CPU[0]))))
    assert queue.store.run(run).state == "running"
    queue.start()
    assert queue.store.run(run).state == "finished"


@pytest.mark.parametrize("ahead", [3600, -3600])
def test_a_workers_clock_is_corrected(queue: Queue, clock: Clock, ahead: float) -> None:
    run = queue.submit(Submission(cells=CPU[:1])).run
    leased = queue.lease(wanted(), "token")
    assert leased is not None
    clock.pass_(30)
    theirs = timedelta(seconds=ahead)
    found = dataclasses.replace(passed(parse(CPU[0])), started=START + theirs)
    assert queue.report(leased.lease, report(found, clock.time + theirs))
    assert queue.store.result(run, parse(CPU[0])).started == START


# Many workers at once.


def test_threads_never_get_the_same_cell(store: Store, axes: Axes) -> None:
    queue = Queue(store, axes, Settings(), fingerprint=PRINT)
    runs = [cpu(queue) for _ in range(25)]
    got: list[tuple[str, str]] = []

    def work(number: int) -> None:
        while (leased := queue.lease(wanted(f"w{number}"), "token")) is not None:
            got.append((leased.run, leased.cell))
            assert queue.report(leased.lease, report(passed(parse(leased.cell))))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(got) == Counter({(run, cell): 1 for run in runs for cell in CPU})
    assert {one.state for one in store.runs()} == {"finished"}


PROCESS = """
import sys, time
from pathlib import Path
from compat_matrix.axes import load
from compat_matrix.cells import parse
from compat_matrix.service.protocol import Report, Result, Wanted
from compat_matrix.service.queue import Queue
from compat_matrix.service.settings import Settings
from compat_matrix.store import Store
from stored import START, passed
wanted = Wanted.model_validate_json(sys.argv[3])
with Store.open(sys.argv[1]) as store:
    queue = Queue(store, load(Path(sys.argv[2])), Settings(), fingerprint=wanted.machine.fingerprint)
    print("ready", flush=True)
    while not Path("go").exists():
        time.sleep(0.01)
    while (leased := queue.lease(wanted, "token")) is not None:
        report = Report(result=Result.of(passed(parse(leased.cell))), now=START.timestamp())
        print(leased.run, leased.cell, queue.report(leased.lease, report), flush=True)
"""


def test_services_of_one_database_never_give_the_same_cell(store: Store, url: str, axes: Axes, tmp_path: Path) -> None:
    queue = Queue(store, axes, Settings(), fingerprint=PRINT)
    runs = [cpu(queue) for _ in range(10)]
    processes = [
        Forked(
            *("-c", PROCESS, url, str(axes.path), wanted(f"w{number}").model_dump_json()),
            folder=tmp_path,
            output=tmp_path / f"process-{number}",
        )
        for number in range(3)
    ]
    until(lambda: all(process.said() for process in processes), "three processes")
    (tmp_path / "go").touch()
    assert [process.wait(60) for process in processes] == [0, 0, 0], [process.said() for process in processes]
    said = [line for process in processes for line in process.said().splitlines()[1:]]
    assert Counter(said) == Counter({f"{run} {cell} True": 1 for run in runs for cell in CPU})
    assert {one.state for one in store.runs()} == {"finished"}


def test_one_report_sent_by_many_at_once_is_stored_once(store: Store, axes: Axes) -> None:
    queue = Queue(store, axes, Settings(), fingerprint=PRINT)
    queue.submit(Submission(cells=CPU[:1]))
    leased = queue.lease(wanted(), "token")
    assert leased is not None
    answers: list[bool] = []
    gate = threading.Barrier(6)

    def send() -> None:
        gate.wait()
        answers.append(queue.report(leased.lease, report(passed(parse(CPU[0])))))

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 6
    assert len(store.history(parse(CPU[0]))) == 1
    assert queue.late(parse(CPU[0])) == []


# Workers.


def test_workers_are_known_by_what_they_last_said(queue: Queue, clock: Clock) -> None:
    run = cpu(queue)
    queue.lease(wanted("one", labels=["a"]), "token")
    clock.pass_(1)
    queue.lease(wanted("two"), "other")
    clock.pass_(20)
    queue.lease(wanted("one", labels=["b"]), "token")
    one, two = queue.workers()
    assert (one.name, one.token, one.began, one.seen) == ("one", "token", START, clock.time)
    assert one.machine["labels"] == ["b"]
    assert (len(one.cells), two.name, len(two.cells)) == (2, "two", 1)
    assert {name for name, _ in one.cells} == {run}
    clock.pass_(8 * 24 * 3600)
    queue.tidy()
    assert queue.workers() == []


# Tokens.


def test_a_token_is_kept_as_a_digest_and_found_until_it_ends(store: Store) -> None:
    secret = tokens.add(store, "ci", ["submit"], days=1)
    with store.reading() as connection:
        (row,) = connection.execute(TOKEN.select()).mappings()
        assert secret not in str(dict(row))
    found = tokens.find(store, secret)
    assert found is not None
    assert (found.name, found.scopes) == ("ci", frozenset({"submit"}))
    (listed,) = tokens.every(store)
    assert listed.used is not None
    for wrong in ("", secret[:-1], secret.lower(), row["digest"], "' OR 1=1 --", "\0", "\udc80"):
        assert tokens.find(store, wrong) is None
    with pytest.raises(MatrixError, match="a token named 'ci' exists or existed"):
        tokens.add(store, "ci", ["work"])
    with pytest.raises(MatrixError, match="a token's name consists of"):
        tokens.add(store, "a b", ["work"])
    expired = tokens.add(store, "old", ["work"], days=0)
    assert tokens.find(store, expired) is None
    tokens.revoke(store, "ci")
    tokens.revoke(store, "ci")
    assert tokens.find(store, secret) is None
    with pytest.raises(MatrixError, match="there is no token 'gone'"):
        tokens.revoke(store, "gone")


# Serialization.


def through(found: CellResult) -> CellResult:
    text = Result.of(found).model_dump_json(exclude_unset=True)
    return Result.model_validate_json(text).result(found.cell, found.attempt, 0.0, found.log)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.floats(0, 1e6))
def test_a_result_travels_as_it_is(text: str, seconds: float) -> None:
    tests = [Test(f"t.py::test[{text}]", "failed", seconds, text), Test("t.py::skipped", "skipped", 0.0, text)]
    found = failed(parse(CPU[0]), reason=text, tests=tests)
    found = dataclasses.replace(found, pins=text, command=(text,), seconds=seconds)
    assert through(found) == found


def test_what_json_can_not_carry_is_replaced() -> None:
    found = through(failed(parse(CPU[0]), reason="a\udc80b", tests=[Test("t\udc80", "failed", -1.0, "\udfff")]))
    assert (found.reason, found.tests[0]) == ("a?b", Test("t?", "failed", 0.0, "?"))
    odd = through(dataclasses.replace(passed(parse(CPU[0])), environment={"packages": 3}))
    assert odd.environment == {}


def test_a_result_that_is_too_large_loses_the_middle_of_its_messages() -> None:
    tests = [Test(f"t{n}", "failed", 0.0, f"begin{'x' * 40_000}end") for n in range(1_000)]
    found = Result.of(failed(parse(CPU[0]), tests=tests))
    assert len(found.model_dump_json()) < REPORT_BYTES
    assert len(found.tests) == 1_000
    assert found.tests[0].message.startswith("begin")
    assert found.tests[0].message.endswith("end")
    assert "characters ..." in found.tests[0].message


@given(st.binary(max_size=400), st.integers(1, 60), st.integers(2, 200))
def test_the_ends_of_a_log_are_kept(content: bytes, chunk: int, most: int) -> None:
    ends = Ends(most)
    for start in range(0, len(content), chunk):
        ends.add(content[start : start + chunk])
    text = ends.text()
    if len(content) <= most // 2 * 2:
        assert "bytes of this log" not in text
        assert text == content.decode("utf-8", "surrogatepass" if _whole(content) else "replace")
    else:
        assert f"[... {len(content) - most // 2 * 2} bytes of this log were not kept ...]" in text
        assert len(text.encode("utf-8", "surrogatepass")) < 3 * most + 100


def _whole(content: bytes) -> bool:
    try:
        content.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


def test_a_log_is_not_cut_in_a_character() -> None:
    ends = Ends(10)
    ends.add("äöüäöüäöü".encode())
    head, _, tail = ends.text().partition("\n\n[... 8 bytes of this log were not kept ...]\n\n")
    assert (head, tail) == ("äö", "öü")


def test_a_spool_has_whole_results_alone(tmp_path: Path) -> None:
    spool = UploadQueue(tmp_path / "spool")
    lease, found = "l" * 32, failed(parse(CPU[0]))
    spool.put(lease, dataclasses.replace(found, log="log \udc80"))
    (tmp_path / "spool" / f"{'m' * 32}.log").write_text("of one that was killed")
    (tmp_path / "spool" / f"{'m' * 32}.part").write_text("{")
    assert UploadQueue(tmp_path / "spool").leases() == [lease]
    assert spool.get(lease) == Result.of(found)
    assert spool.log(lease).read_bytes() == b"log \xed\xb2\x80"
    spool.drop(lease)
    assert (spool.leases(), spool.get(lease)) == ([], None)
    (tmp_path / "spool" / f"{lease}.json").write_text("{}")
    with pytest.raises(MatrixError, match="isn't a result"):
        spool.get(lease)
    spool.set_aside(lease)
    assert spool.leases() == []


@pytest.mark.parametrize(
    "change",
    [
        lambda sent: sent["result"].update(verdict="fine"),
        lambda sent: sent["result"].update(kind="test"),
        lambda sent: sent["result"].update(started=float("nan")),
        lambda sent: sent["result"].update(seconds=-1),
        lambda sent: sent["result"].update(cell="py312-tf5.0-torch2.11"),
        lambda sent: sent["result"]["environment"].update(shims={"a": "x"}),
        lambda sent: sent["result"]["tests"][0].update(outcome="odd"),
        lambda sent: sent["result"].update(command=["x"] * 1001),
        lambda sent: sent.update(now=1e300),
    ],
)
def test_nothing_else_is_taken(change: Callable[[dict[str, Any]], None]) -> None:
    sent = report(passed(parse(CPU[0]))).model_dump()
    Report.model_validate(sent)
    change(sent)
    with pytest.raises(ValueError, match="validation error"):
        Report.model_validate(sent)
