"""The service and its workers as processes, over a small project."""

from __future__ import annotations

import dataclasses
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

import pytest
import requests
from network import WAITS, Network, ended, until
from small import TAG, Small

from compat_matrix.results import CellResult

MINORS = ("5.0", "5.1", "5.2", "5.3")

#: The release of transformers decides whether the tests pass, fail or are skipped.
TESTS = """
    import os, time
    import pytest
    LAYER = os.environ["PYTHONPATH"].split(os.pathsep)[0]

    def test_fine(): print("fine")

    def test_of_one():
        if "tf5.1" in LAYER:
            print("äöü \\x1b[31mred\\x1b[0m")
            assert {"a": 1} == {"a": 2}
        if "tf5.2" in LAYER:
            pytest.skip("not this one")
"""


@pytest.fixture
def network(small: Small) -> Network:
    small.axes(MINORS)
    return Network(small)


def plain(found: CellResult) -> CellResult:
    """The result without times, addresses and temporary names, which differ between runs."""
    log = re.sub(r"\d+\.\d\ds|0x[0-9a-f]+|kernel-compat-matrix-\w+", "", found.log)
    tests = tuple(dataclasses.replace(one, seconds=0.0) for one in found.tests)
    return dataclasses.replace(
        found, started=datetime.min.replace(tzinfo=timezone.utc), seconds=0.0, tests=tests, log=log
    )


def test_two_workers_give_what_a_run_gives(network: Network) -> None:
    small = network.small
    small.write("test_it.py", TESTS)
    small.wheel("transformers", "5.2.7", {"transformers/__init__.py": ""}, f"{TAG}-tf5.2")
    assert small.run("run", "--label", "alone").returncode == 1
    service = network.serve()
    workers = [network.work("--until-empty") for _ in range(2)]
    until(lambda: len(requests.get(f"{network.url}/api/v1/openapi.json", timeout=10).json()["paths"]), "an answer")
    for worker in workers:
        assert worker.wait(60) == 0, worker.said()
    run = network.submit(label="together")
    workers = [network.work() for _ in range(2)]
    until(lambda: network.state(run) == "finished", "an end of the run")
    for worker in workers:
        assert ended(worker) in (0, 1), worker.said()
    assert ended(service) == 0, service.said()
    assert small.processes() == []
    alone, together = small.results("alone"), small.results("together")
    assert [*together] == [*alone]
    assert {name: plain(one) for name, one in together.items()} == {name: plain(one) for name, one in alone.items()}
    assert Counter(one.verdict for one in together.values()) == {"passed": 3, "failed": 1}
    with small.store as store:
        ours = store.run(run)
        assert ours.revision == store.run(store.resolve("alone")).revision
        assert store.axes(run) == store.axes(store.resolve("alone"))


def test_a_killed_worker_gives_its_cell_back(network: Network) -> None:
    small = network.small
    small.write("test_it.py", WAITS)
    service = network.serve("--lease", "2")
    run = network.submit(cells=[f"{TAG}-tf5.0-torch2.11"])
    killed = network.work()
    until(lambda: sum(network.began().values()) == 1, "a beginning")
    killed.kill()
    killed.wait()
    other = network.work()
    until(lambda: sum(network.began().values()) == 2, "another beginning")
    network.go()
    until(lambda: network.state(run) == "finished", "an end of the run")
    assert ended(other) == 0, other.said()
    assert ended(service) == 0
    assert set(network.histories(run).values()) == {1}
    assert small.processes() == []


def test_a_lease_is_renewed_while_its_cell_runs(network: Network) -> None:
    network.small.write("test_it.py", WAITS)
    service = network.serve("--lease", "1")
    run = network.submit(cells=[f"{TAG}-tf5.0-torch2.11"])
    workers = [network.work() for _ in range(2)]
    until(lambda: sum(network.began().values()) == 1, "a beginning")
    time.sleep(3)
    network.go()
    until(lambda: network.state(run) == "finished", "an end of the run")
    for process in (*workers, service):
        assert ended(process) == 0
    assert sum(network.began().values()) == 1


def test_a_killed_service_goes_on_where_it_was(network: Network) -> None:
    """If its worker is killed too before the service is back, the result waits in the upload queue."""
    small = network.small
    small.write("test_it.py", WAITS)
    service = network.serve("--lease", "5")
    run = network.submit()
    worker = network.work("-j", "2")
    until(lambda: sum(network.began().values()) == 2, "two beginnings")
    service.kill()
    service.wait()
    network.go()
    spool = small.folder / "cache" / "spool"
    until(lambda: len([*spool.glob("*/*.json")]) == 2, "two results in the spool")
    assert worker.poll() is None, worker.said()
    worker.kill()
    worker.wait()
    service = network.serve("--lease", "5")
    worker = network.work("--until-empty")
    assert worker.wait(60) == 0, worker.said()
    assert network.state(run) == "finished"
    assert ended(service) == 0
    assert sorted(network.began().values()) == [1, 1, 1, 1]
    assert set(network.histories(run).values()) == {1}
    assert [*spool.glob("*/*")] == []


def test_sigterm_gives_the_leases_back_at_once(network: Network) -> None:
    network.small.write("test_it.py", WAITS)
    service = network.serve("--lease", "600")
    run = network.submit(cells=[f"{TAG}-tf5.0-torch2.11"])
    first = network.work()
    until(lambda: sum(network.began().values()) == 1, "a beginning")
    assert ended(first) == 0, first.said()
    assert "no cell was run" in first.said()
    second = network.work()
    until(lambda: sum(network.began().values()) == 2, "another beginning")
    assert ended(second, signal.SIGINT) == 130
    assert second.said().endswith("interrupted\n")
    network.go()
    third = network.work("--until-empty")
    assert third.wait(60) == 0
    assert network.state(run) == "finished"
    assert ended(service, signal.SIGINT) == 0
    assert network.small.processes() == []


def test_one_process_is_a_service_that_runs_cells(network: Network) -> None:
    small = network.small
    small.write("test_it.py", TESTS)
    service = network.serve("--local", "2")
    run = network.submit(only="transformers<5.2")
    until(lambda: network.state(run) == "finished", "an end of the run")
    assert {one.verdict for one in small.results(run).values()} == {"passed", "failed"}
    assert ended(service) == 0, service.said()
    assert small.processes() == []


def test_a_local_cell_is_given_back_when_the_service_ends(network: Network) -> None:
    network.small.write("test_it.py", WAITS)
    service = network.serve("--local", "1", "--lease", "600")
    run = network.submit(cells=[f"{TAG}-tf5.0-torch2.11"])
    until(lambda: sum(network.began().values()) == 1, "a beginning")
    assert ended(service) == 0, service.said()
    assert network.small.processes() == []
    assert network.state(run) == "running"
    network.go()
    service = network.serve("--local", "1")
    until(lambda: network.state(run) == "finished", "an end of the run")
    assert ended(service) == 0


def test_runs_go_to_ray(network: Network) -> None:
    pytest.importorskip("ray", reason="Ray isn't installed")
    network.small.write("test_it.py", TESTS)
    service = network.serve("--executor", "ray")
    run = network.submit(only="transformers<5.2")
    until(lambda: network.state(run) == "finished", "an end of the run")
    assert {one.verdict for one in network.small.results(run).values()} == {"passed", "failed"}
    assert ended(service) == 0, service.said()


def test_a_worker_waits_for_its_service(network: Network) -> None:
    network.small.write("test_it.py", TESTS)
    worker = network.work("--until-empty")
    until(lambda: "doesn't answer: Connection refused; once more in" in worker.said(), "a word")
    service = network.serve()
    assert worker.wait(60) == 0, worker.said()
    assert ended(service) == 0


def test_what_keeps_a_worker_from_working_is_said(network: Network, tmp_path: Path) -> None:
    small = network.small
    small.write("test_it.py", TESTS)
    service = network.serve()
    run = network.submit(cells=[f"{TAG}-tf5.0-torch2.11"])

    def refused(*words: str, **more: str) -> str:
        done = small.run("work", *words, **more)
        assert done.returncode == 2, done
        return done.stderr

    assert "needs a token with the scope work: --token-file or $KERNEL" in refused(network.url)
    assert "this token is wrong, has expired or was revoked" in refused(network.url, KERNEL_COMPAT_MATRIX_TOKEN="wrong")
    only_submit = small.run("token", "add", "ci", "--scope", "submit").stdout.strip()
    path = tmp_path / "token"
    path.write_text(only_submit)
    assert "a token with the scope work" in refused(network.url, "--token-file", str(path))
    assert "isn't the URL of a service" in refused("localhost:8000", "--token-file", str(path))
    assert "--label 'a b' is invalid" in refused(network.url, "--label", "a b", "--token-file", str(path))
    path.write_text(network.token)
    small.write("test_it.py", TESTS + "\n    # another one")
    assert "update both to the same commit" in refused(network.url, "--token-file", str(path))
    small.write("test_it.py", TESTS)
    (small.folder / "matrix" / "pins" / f"{TAG}-tf5.0.txt").unlink()
    assert "update both to the same commit" in refused(network.url, "--token-file", str(path))
    with small.store as store:
        assert store.run(run).state == "running"
    headers = {"authorization": f"Bearer {network.token}"}
    found = requests.post(f"{network.url}/api/v1/runs", json={}, headers=headers, timeout=30)
    assert (found.status_code, f"{TAG}-tf5.0" in found.json()["detail"]) == (422, True), found.text
    assert ended(service) == 0


def test_a_service_says_what_is_wrong_and_what_is_next(small: Small) -> None:
    small.axes()
    listening = socket.create_server(("127.0.0.1", 0))
    port = str(listening.getsockname()[1])
    done = small.run("serve", "--port", port)
    listening.close()
    assert (done.returncode, done.stderr) == (2, f"kernel-compat-matrix: 127.0.0.1:{port}: Address already in use\n")
    process = small.start("serve", "--port", "0")
    assert process.stdout is not None
    first, second = process.stdout.readline(), process.stdout.readline()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+ serves matrix\.sqlite\n", first)
    assert "`kernel-compat-matrix token add NAME --scope submit --scope work` creates one" in second
    process.terminate()
    assert process.wait(60) == 0
    assert (small.folder / "matrix.sqlite").exists()
    done = small.run("serve", "--root-path", "matrix")
    assert (done.returncode, "--root-path takes a path such as /matrix" in done.stderr) == (2, True)
    below = small.fork("serve", "--port", "0", "--root-path", "/below/")
    until(below.said, "a word of the service")
    assert 'href="/below/runs"' in requests.get(below.said().split()[0], timeout=30).text
    assert ended(below) == 0


def test_the_server_is_an_extra_that_a_worker_does_not_need(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fastapi", "uvicorn"):
        with monkeypatch.context() as lacking:
            lacking.setitem(sys.modules, name, None)
            lacking.delitem(sys.modules, "compat_matrix.service.app", raising=False)
            done = small.run("serve", "--port", "0")
        assert (done.returncode, done.stderr) == (
            2,
            f"kernel-compat-matrix: {name} is missing: install kernel-compat-matrix[service]\n",
        )
    code = (
        "import sys; sys.modules.update(fastapi=None, starlette=None, uvicorn=None); import compat_matrix.commands.{}"
    )
    for command in ("work", "token"):
        subprocess.run(
            [sys.executable, "-c", f"{code.format(command)}; import compat_matrix.service.local_worker"], check=True
        )


def test_tokens_by_the_command(small: Small) -> None:
    done = small.run("token", "add", "ci", "--scope", "submit", "--days", "3")
    assert done.returncode == 0
    secret = done.stdout.strip()
    assert len(secret) == 43
    small.run("token", "add", "gpu", "--scope", "work", "--scope", "submit")
    assert small.run("token", "revoke", "gpu").returncode == 0
    listed = small.run("token", "list").stdout
    assert secret not in listed
    assert re.search(r"ci +submit +valid until \d{4}-\d\d-\d\d ", listed)
    assert re.search(r"gpu +submit work +revoked \d{4}-\d\d-\d\d ", listed)
    assert "there is no token 'gone'" in small.run("token", "revoke", "gone").stderr
    assert small.run("token", "add", "x", "--scope", "all").returncode == 2
    assert secret.encode() not in (small.folder / "matrix.sqlite").read_bytes()
