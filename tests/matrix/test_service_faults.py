"""With killed processes, a full disk, a lost database or a wrong clock, every cell has one counted result."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from faults import TESTS, Account, Faults
from network import WAITS, Network, ended, until
from postgresql import Postgres
from small import TAG, Small
from sqlalchemy import create_engine, select, text

from compat_matrix.store import database
from compat_matrix.store.models import LEASE

#: These tests kill processes and fill disks; the queue's and the workers' other tests have no faults.
pytestmark = pytest.mark.slow


@pytest.fixture
def empty(postgres_server: Postgres) -> Postgres:
    engine = create_engine(database.parse(postgres_server.url))
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return postgres_server


def killed(small: Small, cells: int, kills: int, server: Postgres | None) -> Account:
    """Kill processes at random times; benchmarks/service_faults.py does so with more cells."""
    small.write("test_it.py", TESTS.format(seconds=0.2))
    small.axes([f"5.{number}" for number in range(cells)])
    network = Network(small, server.url if server else "matrix.sqlite")
    faults = Faults(network, 3, 3, server)
    try:
        run = network.submit()
        for _ in range(kills):
            time.sleep(faults.random.uniform(0.0, 1.0))
            faults.kill()
        assert sum(faults.kills.values()) == kills
        return faults.finish(run)
    finally:
        faults.stop()


def test_services_and_workers_are_killed_at_random(small: Small) -> None:
    found = killed(small, 6, 12, None)
    assert (found.results, found.verdicts, found.left) == ({1: 6}, {"passed": 6}, {})
    assert found.leases["counted"] == 6


def test_the_database_too(small: Small, empty: Postgres) -> None:
    found = killed(small, 5, 8, empty)
    assert (found.results, found.verdicts, found.left) == ({1: 5}, {"passed": 5}, {})
    assert found.leases["counted"] == 5


def test_no_worker_loses_its_cell_by_a_database_that_is_away_for_longer_than_a_lease(
    small: Small, empty: Postgres
) -> None:
    small.write("test_it.py", WAITS)
    small.axes(["5.0"])
    network = Network(small, empty.url)
    service = network.serve("--lease", "2")
    run = network.submit()
    worker = network.work()
    until(lambda: sum(network.began().values()) == 1, "a beginning")
    empty.kill()
    time.sleep(5)
    empty.start()
    time.sleep(2)  # long enough for a lease to be lost
    network.go()
    until(lambda: network.state(run) == "finished", "an end of the run")
    assert (ended(worker), ended(service)) == (0, 0)
    assert sum(network.began().values()) == 1
    with network.store as store, store.reading() as connection:
        assert connection.execute(select(LEASE.c.how)).scalars().all() == ["counted"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a small disk can't be mounted here: that takes root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Callable[[], None]:
    """Fill the disk; returns a function that frees the space."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (65_536, 512):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return path.unlink


def test_results_wait_while_the_disk_of_the_service_is_full(small: Small, disk: Path) -> None:
    small.write("test_it.py", "def test_it(): print('x' * 100_000)")
    small.axes(["5.0", "5.1"])
    network = Network(small, f"sqlite:///{disk / 'matrix.sqlite'}")
    service = network.serve()
    run = network.submit()
    small.write("wait/README", "")
    worker = network.work("--spool", str(small.folder / "spool"), "--only", "transformers==5.0")
    until(lambda: sum(network.histories(run).values()) == 1, "a first result")
    empty = fill(disk)
    other = network.work("--spool", str(small.folder / "spool"))
    until(lambda: "503: the database doesn't answer" in other.said(), "a word of the disk")
    assert "disk is full" in service.said()
    assert network.state(run) == "running"
    empty()
    until(lambda: network.state(run) == "finished", "an end of the run")
    for process in (worker, other, service):
        assert ended(process) in (0, 1), process.said()
    assert set(network.histories(run).values()) == {1}
    assert "Traceback" not in service.said() + worker.said() + other.said()


def test_a_worker_whose_disk_is_full_ends_and_another_has_its_cell(small: Small, disk: Path) -> None:
    small.write("test_it.py", WAITS)
    small.axes(["5.0"])
    network = Network(small)
    service = network.serve()
    run = network.submit()
    first = network.work("--spool", str(disk / "spool"))
    until(lambda: sum(network.began().values()) == 1, "a beginning")
    fill(disk)
    network.go()
    assert first.wait(60) == 2
    assert f"can't be kept in {disk / 'spool'}: No space left on device" in first.said()
    second = network.work("--until-empty")
    assert second.wait(60) == 0, second.said()
    assert network.state(run) == "finished"
    assert ended(service) == 0
    assert set(network.histories(run).values()) == {1}


#: A worker whose clock is off by the given number of seconds.
SKEWED = """
import datetime, sys, time
off = float(sys.argv.pop(1))
real = time.time

class Skewed(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(real() + off, tz)

time.time = lambda: real() + off
datetime.datetime = Skewed
from compat_matrix.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("off", [3600, -3600])
def test_a_worker_whose_clock_is_an_hour_wrong(small: Small, off: int) -> None:
    small.write("test_it.py", WAITS)
    small.axes(["5.0"])
    network = Network(small)
    service = network.serve("--lease", "2")
    run = network.submit()
    command = [sys.executable, "-c", SKEWED, str(off), "work", network.url, "-j", "1", "--until-empty"]
    environment = small.environment(KERNEL_COMPAT_MATRIX_TOKEN=network.token)
    with subprocess.Popen(command, cwd=small.folder, env=environment, stdout=subprocess.PIPE, text=True) as worker:
        try:
            until(lambda: sum(network.began().values()) == 1, "a beginning")
            time.sleep(3)  # longer than a lease
            network.go()
            assert worker.wait(60) == 0, worker.stdout and worker.stdout.read()
        finally:
            worker.kill()
    assert network.state(run) == "finished"
    assert ended(service, signal.SIGINT) == 0
    assert sum(network.began().values()) == 1
    (found,) = small.results(run).values()
    assert found.cell.name == f"{TAG}-tf5.0-torch2.11"
    assert abs(datetime.now(timezone.utc) - found.started) < timedelta(minutes=2)
