"""Kill a service, the processes that execute its runs, and its database at random; every cell must have one result that passed.

Run by hand: python benchmarks/service_faults.py [sqlite] [postgresql] [--kills 50] [--cells 60] [--seed 1]. It needs
kernel-compat-matrix[service,postgres] and Debian's postgresql. A killed service is started again, as by a supervisor.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from sqlalchemy import func, select

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from network import Network, ended, until
from postgresql import Postgres
from small import Small

from compat_matrix.errors import MatrixError
from compat_matrix.store import submissions
from compat_matrix.store.models import RESULT

TESTS = """
    import time

    def test_it():
        time.sleep(0.5)
"""


#: Of the service.
OPTIONS = ("--jobs", "2", "--workers", "2")


class Faults:
    """A service whose processes and database are killed."""

    def __init__(self, network: Network, seed: int, database: Postgres | None) -> None:
        self.network, self.database, self.random = network, database, random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.service = network.serve(*OPTIONS)

    def _begin_again(self) -> None:
        words = ("serve", *OPTIONS, "--port", str(self.network.port), "--store", self.network.stored)
        self.service = self.network.small.fork(*words)

    def kill(self) -> None:
        """Kill one with SIGKILL; what doesn't run now can't be killed."""
        who = self.random.choice(["service", "runner", "cell", *(["database"] if self.database else [])])
        if who == "service":
            self.service.kill()
            self.service.wait()
            time.sleep(self.random.uniform(0, 0.5))
            self._begin_again()
        elif who == "database":
            assert self.database is not None
            self.database.kill()
            time.sleep(self.random.uniform(0, 0.5))
            self.database.start()
        else:
            word = "--part-of" if who == "runner" else "kernel_compat_host.py"
            found = [one for one in self.network.small.processes() if word in " ".join(one.cmdline())]
            found = [one for one in found if "--socket" not in one.cmdline()]
            if not found:
                return
            self.network.small.kill([self.random.choice(found)])
        self.kills[who] += 1

    def state(self, run: str) -> str:
        """The state of the run; unknown while the database is away. A service that ended with it is started again."""
        if self.service.poll() is not None:
            self._begin_again()
        try:
            return self.network.state(run)
        except MatrixError:
            return "unknown"


def measure(kind: str, kills: int, cells: int, seed: int) -> bool:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        database = stack.enter_context(Postgres.running()) if kind == "postgresql" else None
        small = Small.make(folder / "small", folder / "uv")
        small.write("test_it.py", TESTS)
        small.axes([f"5.{number}" for number in range(cells)])
        network = Network(small, database.url if database else "matrix.sqlite")
        assert (
            small.run("run", "--all", "--store", str(folder / "first.sqlite")).returncode == 0
        )  # makes the environments
        faults = Faults(network, seed, database)
        began = time.monotonic()
        run = network.submit()
        for _ in range(kills):
            if faults.state(run) == "finished":
                break
            time.sleep(faults.random.uniform(0.0, 10.0))  # a run is given up that never gets as far as a result
            faults.kill()
        end = time.monotonic() + 1200
        while (state := faults.state(run)) != "finished":
            assert state != "interrupted", faults.service.said()
            assert time.monotonic() < end, faults.service.said()
            time.sleep(0.5)
        took = time.monotonic() - began
        ended(faults.service)
        until(lambda: not small.processes(), "an end of all processes")
        with network.store as store, store.reading() as connection:
            per_cell = Counter(connection.scalars(select(func.count()).select_from(RESULT).group_by(RESULT.c.cell_id)))
            verdicts = Counter(connection.scalars(select(RESULT.c.verdict)))
            left = len(submissions.waiting(store))
        killed = ", ".join(f"{name} {count}" for name, count in sorted(faults.kills.items()))
        print(f"{kind}, seed {seed}: {cells} cells, {took:.0f} s; killed: {killed}")
        print(f"    results a cell: {dict(per_cell)}; verdicts: {dict(verdicts)}; runs left: {left}", flush=True)
        return per_cell == {1: cells} and not left and (verdicts["passed"] == cells or bool(faults.kills["cell"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("databases", nargs="*", metavar="DATABASE", help="sqlite, postgresql (both)")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--cells", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    good = [
        measure(kind, options.kills, options.cells, options.seed)
        for kind in options.databases or ["sqlite", "postgresql"]
    ]
    print("every cell has one result" if all(good) else "NOT every cell has one result")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
