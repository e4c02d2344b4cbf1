"""The service as a process, which executes the runs of a small project."""

from __future__ import annotations

import dataclasses
import platform
import re
import signal
import socket
import sys
from collections import Counter
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

import psutil
import pytest
import requests
from network import WAITS, Network, ended
from postgresql import Postgres
from small import TAG, Small
from sqlalchemy import create_engine, literal, select, text
from stored import axes_of
from waiting import LONG, until

from compat_matrix.cells import parse
from compat_matrix.results import CellResult
from compat_matrix.service import executing
from compat_matrix.service.site import Site
from compat_matrix.service.submission import Submission
from compat_matrix.store import Store, database, submissions
from compat_matrix.store.models import Utc

MINORS = ("5.0", "5.1", "5.2", "5.3")

#: The release of transformers decides whether the tests pass, fail or are skipped.
TESTS = """
    import os, time
    import pytest
    LAYER = os.environ["PYTHONPATH"].split(os.pathsep)[0]

    def test_fine(): print("fine")

    def test_of_one():
        if "tf5.1" in LAYER and not os.path.exists("mended"):
            print("äöü \\x1b[31mred\\x1b[0m")
            assert {"a": 1} == {"a": 2}
        if "tf5.2" in LAYER:
            pytest.skip("not this one")
"""


@pytest.fixture
def network(small: Small) -> Network:
    small.axes(MINORS)
    return Network(small)


def name(minor: str) -> str:
    return f"{TAG}-tf{minor}-torch2.11"


def plain(found: CellResult) -> CellResult:
    """The result without times, addresses and temporary names, which differ between runs."""
    log = re.sub(r"\d+\.\d\ds|0x[0-9a-f]+|kernel-compat-matrix-\w+", "", found.log)
    tests = tuple(dataclasses.replace(one, seconds=0.0) for one in found.tests)
    return dataclasses.replace(
        found, started=datetime.min.replace(tzinfo=timezone.utc), seconds=0.0, tests=tests, log=log
    )


def test_a_service_gives_what_a_run_gives(network: Network) -> None:
    small = network.small
    small.write("test_it.py", TESTS)
    small.wheel("transformers", "5.2.7", {"transformers/__init__.py": ""}, f"{TAG}-tf5.2")
    assert small.run("run", "--all", "--label", "alone").returncode == 1
    service = network.serve("--jobs", "2")
    first, second = network.submit(all=True, label="served"), network.submit(only="transformers==5.0")
    network.finished(second)
    with small.store as store:
        one, other = store.run(first), store.run(second)
        assert one.finished is not None
        assert one.finished < store.result(second, parse(name("5.0"))).started, "runs are executed in order"
        assert (one.revision, other.partial) == (store.run(store.resolve("alone")).revision, False)
        assert axes_of(store, first) == axes_of(store, store.resolve("alone"))
        assert submissions.waiting(store) == []
    assert ended(service) == 0, service.said()
    assert small.processes() == []
    alone, served = small.results("alone"), small.results("served")
    assert {name: plain(one) for name, one in served.items()} == {name: plain(one) for name, one in alone.items()}
    assert Counter(one.verdict for one in served.values()) == {"passed": 3, "failed": 1}


def test_a_killed_service_takes_its_cells_with_it_and_goes_on_after_a_restart(network: Network) -> None:
    small = network.small
    small.write("test_it.py", WAITS)
    service = network.serve("--jobs", "2")
    run, waiting = network.submit(), network.submit(cells=[name("5.0")])
    until(lambda: sum(network.began().values()) == 2, "two beginnings")
    service.kill()
    service.wait()
    until(lambda: small.processes() == [], "an end of the children")
    assert network.state(run) == "running"
    network.go()
    service = network.serve("--jobs", "2")
    network.finished(run)
    network.finished(waiting)
    assert ended(service) == 0, service.said()
    histories = {cell: len(small.results(run)) for cell in small.results(run)}
    assert histories == {name(minor): 4 for minor in MINORS}
    with small.store as store:
        assert {one.attempt for one in store.summary(run).values()} == {1}


def test_the_log_of_a_cell_is_shown_while_it_runs(network: Network) -> None:
    network.small.write("test_it.py", WAITS.replace("while not", "print('so', 'far', flush=True)\n        while not"))
    network.small.axes(MINORS, command=["pytest", "-s", "test_it.py"])
    service = network.serve("--jobs", "2")
    run = network.submit(only="transformers<5.2")
    until(lambda: [one.log[-6:] for one in network.running()] == ["so far"] * 2, "the ends of two logs")
    page = requests.get(f"{network.url}/runs/{run}", timeout=LONG).text
    assert page.count("so far</pre>") == 2
    assert f"on {platform.node()}, since" in page
    page = requests.get(f"{network.url}/submit?all=yes", timeout=LONG).text
    assert "<strong>4 cells</strong> would run" in page
    network.go()
    network.finished(run)
    page = requests.get(f"{network.url}/submit?all=yes", timeout=LONG).text
    assert re.search(r"</strong> would run, in about [^,]+, 2 at a time", page)
    assert ended(service) == 0


def test_a_service_that_is_stopped_goes_on_later(network: Network) -> None:
    network.small.write("test_it.py", WAITS)
    service = network.serve("--jobs", "1")
    before = datetime.now(timezone.utc)
    run = network.submit(cells=[name("5.0")])
    until(lambda: sum(network.began().values()) == 1, "a beginning")
    until(network.running, "a running cell")
    with network.store as store:
        (cell,) = submissions.running(store, run)
        assert (cell.run, cell.cell.name) == (run, name("5.0"))
        assert before < cell.since < datetime.now(timezone.utc)
    assert ended(service, signal.SIGINT) == 0, service.said()
    assert network.small.processes() == []
    assert network.state(run) == "running"
    assert network.running() == []
    network.go()
    service = network.serve()
    network.finished(run)
    assert ended(service) == 0


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="sessions aren't scheduling groups here")
@pytest.mark.parametrize("how", [(), ("--no-fork",)])
def test_cells_give_way_to_the_readers(network: Network, how: tuple[str, ...]) -> None:
    """Every session is a scheduling group, whose share of the time doesn't depend on the priority of its processes alone."""
    test = "import os\ndef test_it():\n    print(os.nice(0), open('/proc/self/autogroup').read())\n    assert 0"
    network.small.write("test_it.py", test)
    service = network.serve("--jobs", "1", *how)
    run = network.submit(cells=[name("5.0")])
    network.finished(run)
    assert ended(service) == 0, service.said()
    with network.store as store:
        assert re.search(r"^10 /autogroup-\d+ nice 10$", store.result(run, parse(name("5.0"))).log, re.MULTILINE)


def test_cancelling_ends_the_cells_and_retrying_runs_them_and_the_failed_ones(network: Network) -> None:
    small = network.small
    small.write(
        "test_it.py", TESTS + '\n    if "tf5.3" in LAYER:\n        while not os.path.exists("go"): time.sleep(0.05)'
    )
    service = network.serve("--jobs", "1")
    run = network.submit()
    until(lambda: len(small.results(run)) == 3, "three results")
    assert network.ask("DELETE", f"/runs/{run}").status_code == 409
    assert network.ask("POST", f"/runs/{run}/retry").status_code == 409
    assert network.ask("POST", f"/runs/{run}/cancel").status_code == 204
    until(lambda: len(small.processes()) == 2, "an end of the cells")  # the service and the process that executes runs
    assert network.state(run) == "interrupted"
    assert "it has ended" in network.ask("POST", f"/runs/{run}/cancel").json()["detail"].replace("the run " + run, "it")
    (small.folder / "mended").touch()
    network.go()
    found = network.ask("POST", f"/runs/{run}/retry")
    assert (found.status_code, found.json()) == (202, {"run": run, "cells": 2, "excluded": 0})
    network.finished(run)
    with network.store as store:
        attempts = {cell.name: (one.attempt, one.verdict) for cell, one in store.summary(run).items()}
    assert attempts == {name(minor): (1 + (minor == "5.1"), "passed") for minor in MINORS}
    assert network.ask("POST", f"/runs/{run}/retry").status_code == 409
    assert network.ask("DELETE", f"/runs/{run}").status_code == 204
    assert network.ask("DELETE", f"/runs/{run}").status_code == 404
    assert ended(service) == 0, service.said()


def test_a_retry_that_is_killed_repeats_no_cell_twice(network: Network) -> None:
    small = network.small
    small.write("test_it.py", "import time\ndef test_it():\n    time.sleep(0.2)\n    assert 0")
    service = network.serve("--jobs", "1")
    run = network.submit()
    network.finished(run)
    assert network.ask("POST", f"/runs/{run}/retry").status_code == 202

    def repeated() -> int:
        with network.store as store:
            return sum(one.attempt == 2 for one in store.summary(run).values())

    until(lambda: repeated() > 0, "a second attempt")
    service.kill()
    service.wait()
    service = network.serve()
    network.finished(run)
    with network.store as store:
        assert [one.attempt for one in store.summary(run).values()] == [2] * 4
    assert ended(service) == 0


def test_a_run_whose_execution_fails_is_tried_again_and_one_that_can_not_be_run_is_interrupted(
    network: Network,
) -> None:
    small = network.small
    small.write("test_it.py", WAITS)
    service = network.serve("--jobs", "1")
    run = network.submit(cells=[name("5.0")])
    until(network.running, "a running cell")
    (runner,) = (one for one in small.processes() if "--part-of" in one.cmdline())
    runner.kill()
    until(lambda: "has ended early" in service.said(), "a word of the service")
    network.go()
    network.finished(run)
    (small.folder / "go").unlink()
    changed = network.submit(cells=[name("5.1")])
    until(network.running, "a running cell")
    waits = network.submit(cells=[name("5.2")])
    small.write("other.py", "changed = True")
    network.go()
    until(lambda: network.state(waits) == "interrupted", "an end of the run")
    assert network.state(changed) == "finished"
    until(lambda: f"has changed since {waits} was submitted" in service.said(), "the reason")
    assert ended(service) == 0


def test_what_can_not_be_run_is_refused_at_once(network: Network) -> None:
    small = network.small
    small.write("test_it.py", TESTS)
    service = network.serve()

    def refused(**wanted: object) -> str:
        found = network.ask("POST", "/runs", json=wanted)
        assert found.status_code == 422, found.text
        return str(found.json()["detail"])

    assert '"all": true selects every one that axes.toml has (4)' in refused()
    assert '"all": true selects' in refused(cells=[])
    assert '"all": true selects' in refused(all=True, cells=[name("5.0")])
    assert "there is no cell" in refused(cells=[f"{TAG}-tf9.9-torch2.11"])
    assert "not 'other'" in refused(suite="other", all=True)
    (small.folder / "matrix" / "pins" / f"{TAG}-tf5.0.txt").unlink()
    assert f"{TAG}-tf5.0" in refused(all=True)
    assert ended(service) == 0
    service = network.serve("--no-run")
    assert "runs no cells" in refused(all=True)
    assert ended(service) == 0
    with small.store as store:
        assert store.runs() == []


def test_runs_of_other_machines_are_uploaded(network: Network, tmp_path: Path) -> None:
    small = network.small
    small.write("test_it.py", TESTS)
    for shard in ("1/2", "2/2"):
        export = str(tmp_path / f"{shard[0]}.sqlite")
        done = small.run("run", "--shard", shard, "--store", str(tmp_path / "there.db"), "--export", export)
        assert done.returncode in (0, 1), done
        assert "it exists" in small.run("run", "--all", "--export", export).stderr
    service = network.serve("--no-run")
    kind = {"content-type": "application/vnd.sqlite3"}
    merged = []
    for shard in ("1", "2"):
        content = (tmp_path / f"{shard}.sqlite").read_bytes()
        found = network.ask("POST", "/runs", data=content, headers=kind)
        assert found.status_code == 201, service.said()
        merged += found.json()["merged"]
        assert network.ask("POST", "/runs", data=content, headers=kind).json() == {"merged": []}
    with network.store as store, Store.open(str(tmp_path / "there.db")) as there:
        assert sorted(merged) == sorted(one.id for one in there.runs()) == sorted(one.id for one in store.runs())
        assert {cell.name for run in merged for cell in store.summary(run)} == {name(minor) for minor in MINORS}
    for content in (b"", b"no database", b"SQLite format 3\0" + bytes(5000)):
        found = network.ask("POST", "/runs", data=content, headers=kind)
        assert found.status_code == 422, found.text
        assert "/tmp" not in found.text
    assert ended(service) == 0, service.said()


# Claims.


def taken(store: Store, claim: str) -> str | None:
    row = executing.take(store, claim)
    return None if row is None else str(row.name)


def test_two_services_never_execute_the_same_run(url: str, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime(2026, 11, 20, 8, 30, tzinfo=timezone.utc)

    def later(seconds: int) -> None:
        """Let time pass, by the clock of the database."""
        nonlocal now
        now += timedelta(seconds=seconds)
        monkeypatch.setattr(executing, "_NOW", select(literal(now, Utc())))

    later(0)
    with Store.open(url) as store:
        site = Site(store, small.axes(MINORS))
        run = site.submit(Submission(all=True)).run
        assert taken(store, "one") == run
        assert taken(store, "other") is None
        assert taken(store, "one") == run, "its own claim, after its process has died"
        second = site.submit(Submission(only="transformers==5.0")).run
        assert taken(store, "other") == second
        later(29)
        assert taken(store, "third") is None
        assert taken(store, "one") == run  # a sign of life
        assert taken(store, "other") == second
        later(29)
        assert taken(store, "third") is None
        later(2)
        assert taken(store, "third") == run, "a service that is silent for 30 seconds is gone"
        assert [waiting.run for waiting in submissions.waiting(store)] == [run, second]


def test_a_run_that_ends_its_service_each_time_is_given_up(
    store: Store, small: Small, caplog: pytest.LogCaptureFixture
) -> None:
    run = Site(store, small.axes(MINORS)).submit(Submission(all=True)).run
    assert [taken(store, "one") for _ in range(11)] == [run] * 10 + [None]
    assert store.run(run).state == "interrupted"
    assert "its execution began 10 times without a result" in caplog.text


@pytest.mark.slow
def test_a_database_that_is_restarted_costs_no_result(small: Small, postgres_server: Postgres) -> None:
    engine = create_engine(database.parse(postgres_server.url))
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    small.write("test_it.py", WAITS)
    small.axes(MINORS[:1])
    network = Network(small, postgres_server.url)
    service = network.serve()
    run = network.submit()
    until(lambda: sum(network.began().values()) == 1, "a beginning")
    until(network.pids, "the process of the cell")
    (cell,) = network.pids()
    postgres_server.kill()
    network.go()
    until(lambda: not psutil.pid_exists(cell), "an end of the cell")
    postgres_server.start()
    network.finished(run)
    assert ended(service) == 0, service.said()
    assert sum(network.began().values()) == 1


# The command.


def test_a_service_says_what_is_wrong_and_what_is_next(small: Small) -> None:
    small.axes()
    listening = socket.create_server(("127.0.0.1", 0))
    port = str(listening.getsockname()[1])
    done = small.run("serve", "--port", port)
    listening.close()
    assert done.returncode == 2
    assert re.match(rf"kernel-compat-matrix: 127\.0\.0\.1:{port}: .*Address already in use.*\n$", done.stderr)
    process = small.start("serve", "--port", "0")
    assert process.stdout is not None
    first, second = process.stdout.readline(), process.stdout.readline()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+ serves matrix\.sqlite\n", first)
    assert "`kernel-compat-matrix token add NAME --scope submit` creates a token for writing" in second
    process.terminate()
    assert process.wait(LONG) == 0
    assert (small.folder / "matrix.sqlite").exists()
    (small.folder / "matrix" / "axes.toml").write_text("version = 2\n")
    done = small.run("serve", "--port", "0")
    assert (done.returncode, "axes.toml" in done.stderr) == (2, True), (
        "a file that can't be read isn't a file that isn't there"
    )
    small.axes()
    done = small.run("serve", "--root-path", "matrix")
    assert (done.returncode, "--root-path takes a path such as /matrix" in done.stderr) == (2, True)
    below = small.fork("serve", "--port", "0", "--root-path", "/below/")
    until(below.said, "a word of the service")
    assert 'href="/below/runs"' in requests.get(below.said().split()[0], timeout=LONG).text
    assert ended(below) == 0


def test_several_processes_answer(network: Network) -> None:
    service = network.serve("--workers", "2", "--no-run")
    me = psutil.Process(service.pid)

    def worker() -> psutil.Process | None:
        for one in me.children():
            with suppress(psutil.Error):  # it may end at any time
                if "--socket" in one.cmdline():
                    return one
        return None

    def tag() -> str:
        return requests.get(f"{network.url}/runs", timeout=LONG).headers["etag"]

    until(worker, "a second process")
    first = worker()
    assert first is not None
    me.suspend()
    by_worker = tag()  # which nothing else can answer
    me.resume()
    first.suspend()
    try:
        assert tag() == by_worker
    finally:
        first.kill()
    assert tag() == by_worker
    until(lambda: (found := worker()) is not None and found != first, "another process in its place")
    second = worker()
    assert second is not None
    assert "a process that answers requests has ended early (-9)" in service.said()
    service.kill()
    second.wait(LONG)
    assert ended(network.serve("--workers", "2")) == 0, "the address is free again"


def test_the_server_is_an_extra(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("fastapi", "uvicorn"):
        with monkeypatch.context() as lacking:
            lacking.setitem(sys.modules, package, None)
            lacking.delitem(sys.modules, "compat_matrix.service.app", raising=False)
            done = small.run("serve", "--port", "0")
        assert (done.returncode, done.stderr) == (
            2,
            f"kernel-compat-matrix: {package} is missing: install kernel-compat-matrix[service]\n",
        )


def test_tokens_by_the_command(small: Small) -> None:
    done = small.run("token", "add", "ci", "--scope", "submit", "--days", "3")
    assert done.returncode == 0
    secret = done.stdout.strip()
    assert len(secret) == 43
    small.run("token", "add", "reader", "--scope", "read")
    assert small.run("token", "revoke", "reader").returncode == 0
    listed = small.run("token", "list").stdout
    assert secret not in listed
    assert re.search(r"ci +submit +valid until \d{4}-\d\d-\d\d ", listed)
    assert re.search(r"reader +read +revoked \d{4}-\d\d-\d\d ", listed)
    assert "there is no token 'gone'" in small.run("token", "revoke", "gone").stderr
    assert small.run("token", "add", "x", "--scope", "all").returncode == 2
    assert secret.encode() not in (small.folder / "matrix.sqlite").read_bytes()
