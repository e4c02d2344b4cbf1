"""Kill services, workers and databases at random, and check the invariants that must hold anyway."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from typing import NamedTuple

from forked import Forked
from network import Network, ended, until
from postgresql import Postgres
from sqlalchemy import func, select, text

from compat_matrix.store.models import LATE, LEASE, RESULT, RUN, TASK, UPLOAD

#: The test of a cell: slow enough that some kills happen during it.
TESTS = """
    import time

    def test_it():
        time.sleep({seconds})
"""


class Account(NamedTuple):
    """The contents of a run's store at the end.

    Attributes:
        results: counts by number of results per cell.
        verdicts: counts by verdict.
        leases: counts by the way in which they ended.
        late: results that arrived after the end of their lease.
        left: faults: unfinished tasks, open leases, logs without a result, files in spools, processes.
    """

    results: Counter[int]
    verdicts: Counter[str]
    leases: Counter[str | None]
    late: int
    left: Counter[str]


class Faults:
    """A service and two workers; each is restarted after it is killed, as by a supervisor.

    Args:
        database: also killed, if it is a server.
    """

    def __init__(self, network: Network, seed: int, lease: int, database: Postgres | None = None) -> None:
        self.network, self.lease, self.database = network, lease, database
        self.random = random.Random(seed)
        self.kills: Counter[str] = Counter()
        self._service = network.serve("--lease", str(lease))
        self._workers = [self._work(number) for number in range(2)]

    def _work(self, number: int) -> Forked:
        return self.network.work("--spool", str(self.network.small.folder / f"spool-{number}"))

    def _serve(self) -> None:
        words = ("serve", "--port", str(self.network.port), "--store", self.network.stored, "--lease", str(self.lease))
        self._service = self.network.small.fork(*words)

    def watch(self) -> None:
        """Restart the service if it ended because its database was down. Workers never end by themselves."""
        if self._service.poll() is not None:
            assert self.database is not None, self._service.said()
            self._serve()
        for worker in self._workers:
            assert worker.poll() is None, worker.said()

    def kill(self) -> None:
        """Kill a random process with SIGKILL."""
        self.watch()
        who = self.random.choice(["service", "worker 1", "worker 2", *(["database"] if self.database else [])])
        self.kills[who.split()[0]] += 1
        if who == "service":
            self._service.kill()
            self._service.wait()
            time.sleep(self.random.uniform(0, 0.5))
            self._serve()
        elif who == "database":
            assert self.database is not None
            self.database.kill()
            time.sleep(self.random.uniform(0, 0.5))
            self.database.start()
        else:
            number = int(who[-1]) - 1
            self._workers[number].kill()
            self._workers[number].wait()
            self._workers[number] = self._work(number)

    def finish(self, run: str) -> Account:
        """Wait for the end of a run, stop every process in order, and count the store's contents."""

        def over() -> bool:
            self.watch()
            return self.network.state(run) == "finished"

        until(over, "an end of the run")
        until(lambda: not self._spooled(), "an empty spool")
        for process in (*self._workers, self._service):
            code = ended(process)
            assert code in (0, 1), process.said()
        return self._account(run)

    def stop(self) -> None:
        for process in (*self._workers, self._service):
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()

    def _spooled(self) -> int:
        return len([*self.network.small.folder.glob("spool-*/*")])

    def _account(self, run: str) -> Account:
        results = self.network.histories(run)
        with self.network.store as store, store.reading() as connection:
            if store.dialect == "sqlite":
                assert connection.scalar(text("PRAGMA integrity_check")) == "ok"
            own = select(RESULT.c.verdict).join(RUN, RUN.c.id == RESULT.c.run_id).where(RUN.c.name == run)
            verdicts = Counter(connection.execute(own).scalars())
            leases = Counter(connection.execute(select(LEASE.c.how)).scalars())
            late = connection.scalar(select(func.count()).select_from(LATE))
            left = {
                "tasks": connection.scalar(select(func.count()).where(TASK.c.state != "done")),
                "leases": leases[None],
                "logs": connection.scalar(select(func.count()).select_from(UPLOAD)),
                "spooled": self._spooled(),
                "processes": len(self.network.small.processes()),
            }
        return Account(Counter(results.values()), verdicts, leases, late or 0, +Counter(left))
