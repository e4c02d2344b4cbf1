"""Whether the service holds 50 readers on 2 cores, with 100,000 results in its store.

Run by hand: python benchmarks/service_load.py [sqlite] [postgresql] [--seconds 60] [--think 1.0]. It needs
kernel-compat-matrix[service,postgres], aiohttp, Debian's postgresql and 1 GB of disk in the temporary folder. The service is one
process with nothing configured. Each reader asks for the first page, answers of the form, cells, runs and the API in turn, with a
pause of `--think` seconds, while a result a second is stored. This process takes its part of the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import aiohttp
import psutil
from matrix_store import cells, copy_runs, fill, result
from sqlalchemy import select, text

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from postgresql import Postgres

from compat_matrix.cells import Cell
from compat_matrix.store import Store, models

READERS = 50
#: Seconds at the beginning that don't count.
WARM = 10
#: With this many copies of two runs of 168 cells there are 100,128 results.
COPIES = 297

PAGES = [
    *[("first page", "/"), ("form", "/?tf={tf}.{patch}&pt={torch}.0&fa=none"), ("cell", "/cells/{cell}")] * 3,
    *[("first page, live", "/?live=x"), ("runs", "/runs"), ("status", "/status"), ("diff", "/diff")],
    ("/compat", "/api/v1/compat?transformers={tf}&torch={torch}&device=cpu"),
    ("/cells", "/api/v1/cells?transformers={tf}"),
    ("/runs", "/api/v1/runs"),
]


def copied(path: Path, url: str) -> None:
    """Copy a SQLite store into an empty PostgreSQL database."""
    with Store.open(str(path)) as source, Store.open(url) as target:
        for table in models.metadata.sorted_tables:
            names = ", ".join(column.name for column in table.c)
            with source.reading() as reading, target.writing() as writing:
                raw = writing.connection.dbapi_connection.cursor()
                with raw.copy(f"COPY {table.name} ({names}) FROM STDIN") as copy:
                    for row in reading.execution_options(yield_per=1000).execute(select(table)):
                        copy.write_row(
                            [
                                models.pack(value) if isinstance(column.type, models.Packed) else value
                                for column, value in zip(table.c, row, strict=True)
                            ]
                        )
                if "id" in table.c and table.name != "lease":
                    newest = f"(SELECT coalesce(max(id), 1) FROM {table.name})"
                    writing.execute(text(f"SELECT setval(pg_get_serial_sequence('{table.name}', 'id'), {newest})"))
        with target._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("ANALYZE"))


class Load:
    def __init__(self, url: str, known: Sequence[Cell], seconds: float, think: float) -> None:
        self.url, self.seconds, self.think = url, seconds, think
        self.cells = known
        self.took: dict[str, list[float]] = defaultdict(list)
        self.answers: Counter[tuple[str, int]] = Counter()

    async def reader(self, number: int, end: float) -> None:
        async with aiohttp.ClientSession() as session:
            await asyncio.sleep(random.random() * max(self.think, 0.1))
            step = number
            while time.monotonic() < end:
                what, path = PAGES[step % len(PAGES)]
                step += 1
                cell = random.choice(self.cells)
                path = path.format(cell=cell, tf=cell.transformers, torch=cell.torch, patch=random.randrange(20))
                began = time.perf_counter()
                async with session.get(self.url + path) as answer:
                    await answer.read()
                if time.monotonic() > end - self.seconds:  # else the service is still getting warm
                    self.took[what].append(time.perf_counter() - began)
                    self.answers[what, answer.status] += 1
                await asyncio.sleep(random.uniform(0.5, 1.5) * self.think)

    async def run(self) -> None:
        end = time.monotonic() + self.seconds + WARM
        await asyncio.gather(*(self.reader(number, end) for number in range(READERS)))

    def show(self) -> None:
        self.took["all"] = [one for took in self.took.values() for one in took]
        for what, took in self.took.items():
            took.sort()
            p50, p99 = (took[int(len(took) * part)] * 1000 for part in (0.5, 0.99))
            print(f"    {what:16} {len(took):7} p50 {p50:7.0f} ms, p99 {p99:7.0f} ms, at most {took[-1] * 1000:.0f} ms")
        bad = {f"{what} {status}": count for (what, status), count in self.answers.items() if status >= 400}
        print(f"    errors: {bad or 'none'}")


def write(url: str, known: Sequence[Cell], over: threading.Event) -> None:
    """Store a result a second."""
    with Store.open(url) as store:
        run = store.new_run(known)
        for seed, cell in enumerate(known):
            if over.wait(1.0):
                return
            store.add(run, result(cell, 300, fail=seed % 10 == 0, seed=seed))


def busy(process: psutil.Process) -> float:
    every = [process, *process.children(recursive=True)]
    return sum(times.user + times.system for times in (one.cpu_times() for one in every))


def measure(url: str, known: Sequence[Cell], seconds: float, think: float, server: psutil.Process | None) -> None:
    command = [sys.executable, "-m", "compat_matrix", "serve", "--store", url, "--port", "0"]
    over = threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        writer = threading.Thread(target=write, args=(url, known, over))
        try:
            assert service.stdout is not None
            address = service.stdout.readline().split()[0]
            time.sleep(3)
            writer.start()
            load = Load(address, known, seconds, think)
            processes = {"service": psutil.Process(service.pid)} | ({"database": server} if server else {})
            was = {name: busy(process) for name, process in processes.items()}
            own = resource.getrusage(resource.RUSAGE_SELF)
            began = time.monotonic()
            asyncio.run(load.run())
            took = time.monotonic() - began
            now = resource.getrusage(resource.RUSAGE_SELF)
            load.show()
            shares = {name: busy(process) - was[name] for name, process in processes.items()}
            shares["load"] = now.ru_utime + now.ru_stime - own.ru_utime - own.ru_stime
            of = ", ".join(f"{name} {share / took * 100:.0f} %" for name, share in shares.items())
            print(f"    of a core: {of}; the service's memory: {processes['service'].memory_info().rss / 1e6:.0f} MB")
            print(f"    {sum(load.answers.values()) / seconds:.0f} requests a second", flush=True)
        finally:
            over.set()
            service.send_signal(signal.SIGTERM)
            writer.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("databases", nargs="*", metavar="DATABASE", help="sqlite, postgresql (both)")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--think", type=float, default=1.0)
    options = parser.parse_args()
    known = cells(1, 28, 6)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "store.db")
        with Store.open(str(path)) as store:
            for seed in (1, 2):
                fill(store, known, 6, seed)
        copy_runs(path, COPIES)
        with closing(sqlite3.connect(path)) as connection, connection:  # date the copied runs before the load
            connection.execute("UPDATE run SET started = datetime(started, ?)", (f"-{COPIES + 1} hours",))
        with Store.open(str(path)) as store, store.reading() as connection:
            count = connection.scalar(text("SELECT count(*) FROM result"))
        for kind in options.databases or ["sqlite", "postgresql"]:
            print(f"{kind}: {READERS} readers, {options.seconds:.0f} s, {count:,} results", flush=True)
            if kind == "sqlite":
                copy = Path(name, "copy.db")
                with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
                    source.backup(target)
                measure(str(copy), known, options.seconds, options.think, None)
                copy.unlink()
            else:
                with Postgres.running() as server:
                    copied(path, server.url)
                    measure(server.url, known, options.seconds, options.think, psutil.Process(server.pid))


if __name__ == "__main__":
    main()
