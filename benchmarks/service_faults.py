"""Check that no cell is lost, stuck, doubled or judged wrongly when service, workers and database are killed at random.

Run by hand: python benchmarks/service_faults.py [--kills 200] [--cells 100] [--seed 1] [sqlite] [postgresql]. It needs
kernel-compat-matrix[service,postgres], Debian's postgresql and some minutes. A run of quick cells goes through a service and two
workers. Each kill is a SIGKILL of a random one of these or of PostgreSQL's postmaster; the killed process is started again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults import TESTS, Account, Faults
from network import Network
from postgresql import Postgres
from small import Small


def measure(kind: str, kills: int, cells: int, seed: int, lease: int) -> Account:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults")))
        server = stack.enter_context(Postgres.running()) if kind == "postgresql" else None
        small = Small.make(folder / "small")
        stack.callback(lambda: small.kill(small.processes()))
        small.write("test_it.py", TESTS.format(seconds=0.2))
        small.axes([f"5.{number}" for number in range(cells)])
        network = Network(small, server.url if server else "matrix.sqlite")
        faults = Faults(network, seed, lease, server)
        stack.callback(faults.stop)
        run = network.submit()
        began = time.monotonic()
        within = 0
        for _ in range(kills):
            time.sleep(faults.random.uniform(0.0, 1.0))
            faults.kill()
            within += within == sum(faults.kills.values()) - 1 and network.state(run) == "running"
        found = faults.finish(run)
        killed = ", ".join(f"{name} {count}" for name, count in sorted(faults.kills.items()))
        print(f"{kind}, seed {seed}: {cells} cells, {time.monotonic() - began:.0f} s")
        print(f"    killed: {killed}; {within} of these while the run went on")
        print(f"    results a cell: {dict(found.results)}; verdicts: {dict(found.verdicts)}")
        print(
            f"    leases: {dict(found.leases)}; late results kept: {found.late}; left over: {dict(found.left) or 'nothing'}"
        )
        print(flush=True)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("databases", nargs="*", metavar="DATABASE", help="sqlite, postgresql (both)")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--cells", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lease", type=int, default=3, help="seconds")
    options = parser.parse_args()
    good = True
    for kind in options.databases or ["sqlite", "postgresql"]:
        found = measure(kind, options.kills, options.cells, options.seed, options.lease)
        good &= found.results == {1: options.cells} and found.verdicts == {"passed": options.cells} and not found.left
    print(
        "every cell has one counted result, and passed" if good else "NOT every cell has one counted result that passed"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
