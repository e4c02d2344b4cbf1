"""Whether the service holds 50 workers and 50 readers on 2 cores, with 100,000 results in its store.

Run by hand: python benchmarks/service_load.py [sqlite] [postgresql] [--seconds 60] [--think 1.0]. It needs
kernel-compat-matrix[service,postgres], aiohttp, Debian's postgresql and 1 GB of disk in the temporary folder. The service is one
process with nothing configured. Each worker leases a cell, has it for a second, and reports 300 tests and 8 KB of log; each reader
asks for the grid, cells, runs and the API in turn, with a pause of `--think` seconds. This process takes its part of the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path

import aiohttp
import psutil
from matrix_store import copy_runs, fill, result
from sqlalchemy import select, text

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from postgresql import Postgres
from small import Small

from compat_matrix.axes import Axes
from compat_matrix.fingerprint import of_axes
from compat_matrix.service import tokens
from compat_matrix.service.protocol import Machine, Result, Wanted
from compat_matrix.store import Store, models

WORKERS = READERS = 50
TESTS = 300
#: With this many copies of two runs of 168 cells there are 100,128 results.
COPIES = 297


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
    def __init__(self, url: str, token: str, axes: Axes, seconds: float, think: float) -> None:
        self.url, self.seconds, self.think = url, seconds, think
        self.cells = [cell.name for cell in axes.cells]
        self.auth = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        self.took: dict[str, list[float]] = defaultdict(list)
        self.answers: Counter[tuple[str, int]] = Counter()
        self.counted: Counter[str] = Counter()
        self.fingerprint = of_axes(axes)
        reports = [Result.of(result(cell, TESTS, fail=n % 10 == 0, seed=n)) for n, cell in enumerate(axes.cells[:20])]
        self.results = [one.model_dump_json(exclude_unset=True) for one in reports]
        self.log = b"".join(b"tests/integration/test_%d.py ........ [%d%%]\n" % (n, n % 100) for n in range(200))

    async def ask(
        self, session: aiohttp.ClientSession, what: str, method: str, path: str, data: bytes | None = None
    ) -> tuple[int, bytes]:
        began = time.perf_counter()
        headers = self.auth if method != "GET" else None
        async with session.request(method, self.url + path, data=data, headers=headers) as answer:
            body = await answer.read()
        self.took[what].append(time.perf_counter() - began)
        self.answers[what, answer.status] += 1
        return answer.status, body

    async def worker(self, number: int, end: float) -> None:
        machine = Machine(name=f"w{number}", version="0.1", fingerprint=self.fingerprint, memory=64.0)
        wanted = Wanted(machine=machine, free_memory=64.0).model_dump_json().encode()
        async with aiohttp.ClientSession() as session:
            await asyncio.sleep(random.random())
            while time.monotonic() < end:
                status, body = await self.ask(session, "lease", "POST", "/api/v1/leases", wanted)
                if status != 200:
                    await asyncio.sleep(random.uniform(0.25, 0.5))
                    continue
                lease = json.loads(body)["lease"]
                await asyncio.sleep(random.uniform(0.8, 1.2))
                if not number % 5:
                    await self.ask(session, "renew", "POST", f"/api/v1/leases/{lease}/renewal")
                await self.ask(session, "log", "PUT", f"/api/v1/leases/{lease}/log", self.log)
                sent = f'{{"now": {time.time()}, "result": {random.choice(self.results)}}}'
                _, body = await self.ask(session, "report", "POST", f"/api/v1/leases/{lease}/result", sent.encode())
                self.counted[body.decode()] += 1

    async def reader(self, number: int, end: float) -> None:
        pages = (
            [("grid", "/"), ("cell page", "/cells/{cell}")] * 3
            + [("grid, live", "/?live=x"), ("runs page", "/runs"), ("status page", "/status")]
            + [("compat, exact", "/api/v1/compat?transformers={tf}&torch={torch}&device=cpu")]
            + [
                (
                    "compat, nearest",
                    "/api/v1/compat?transformers={tf}.{patch}&torch={torch}.0&device=cuda&flash_attn=fa4",
                )
            ]
            + [("api cells", "/api/v1/cells?transformers={tf}"), ("api runs", "/api/v1/runs")]
        )
        async with aiohttp.ClientSession() as session:
            await asyncio.sleep(random.random() * max(self.think, 0.1))
            step = number
            while time.monotonic() < end:
                what, path = pages[step % len(pages)]
                step += 1
                cell = random.choice(self.cells)
                tf, torch = (part.lstrip("tforch") for part in cell.split("-")[1:3])
                path = path.format(cell=cell, tf=tf, torch=torch, patch=random.randrange(20))
                await self.ask(session, what, "GET", path)
                if self.think:
                    await asyncio.sleep(random.uniform(0.5, 1.5) * self.think)

    async def submitter(self, end: float) -> None:
        """Keep the queue filled: two runs ahead."""
        async with aiohttp.ClientSession() as session:
            runs = 0
            while time.monotonic() < end:
                if runs * len(self.cells) - self.answers["lease", 200] < len(self.cells):
                    status, _ = await self.ask(session, "submit", "POST", "/api/v1/runs", b'{"label": "load"}')
                    assert status == 201
                    runs += 1
                await asyncio.sleep(0.1)

    async def run(self) -> None:
        end = time.monotonic() + self.seconds
        workers = [self.worker(number, end) for number in range(WORKERS)]
        await asyncio.gather(self.submitter(end), *workers, *(self.reader(number, end) for number in range(READERS)))

    def show(self) -> None:
        for what, took in self.took.items():
            took.sort()
            p50, p99 = (took[int(len(took) * part)] * 1000 for part in (0.5, 0.99))
            print(f"    {what:16} {len(took):7} p50 {p50:7.0f} ms, p99 {p99:7.0f} ms, at most {took[-1] * 1000:.0f} ms")
        bad = {f"{what} {status}": count for (what, status), count in self.answers.items() if status >= 400}
        late = {said: count for said, count in self.counted.items() if said != '{"counted":true}'}
        print(f"    errors: {bad or 'none'}; not counted: {late or 'none'}")


def busy(process: psutil.Process) -> float:
    every = [process, *process.children(recursive=True)]
    return sum(times.user + times.system for times in (one.cpu_times() for one in every))


def measure(url: str, axes: Axes, seconds: float, think: float, server: psutil.Process | None) -> None:
    with Store.open(url) as store:
        token = tokens.add(store, f"load-{os.getpid()}", ["submit", "work"])
        before = len(store.runs())
    command = [sys.executable, "-m", "compat_matrix", "serve", "--store", url, "--axes", str(axes.path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            address = service.stdout.readline().split()[0]
            time.sleep(3)
            load = Load(address, token, axes, seconds, think)
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
            reported = load.answers["report", 200]
            rate = sum(load.answers.values()) / took
            print(f"    {reported} results in {took:.0f} s; {rate:.0f} requests a second", flush=True)
        finally:
            service.send_signal(signal.SIGTERM)
    with Store.open(url) as store:
        new = store.runs()[: len(store.runs()) - before]
        ended = sum(1 for one in new for summary in store.summary(one.id).values() if summary.verdict)
        print(f"    in the store: {ended} results of these", flush=True)
        assert ended == reported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("databases", nargs="*", metavar="DATABASE", help="sqlite, postgresql (both)")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--think", type=float, default=1.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = Small.make(folder / "small")
        small.write("test_it.py", "def test_it(): pass")
        axes = small.axes([f"5.{n}" for n in range(28)], [f"2.{n}" for n in range(10, 16)])
        path = folder / "store.db"
        with Store.open(str(path)) as store:
            for seed in (1, 2):
                fill(store, axes.cells, 6, seed)
        copy_runs(path, COPIES)
        with closing(sqlite3.connect(path)) as connection, connection:  # date the copied runs before the load
            connection.execute("UPDATE run SET started = datetime(started, ?)", (f"-{COPIES + 1} hours",))
        with Store.open(str(path)) as store, store.reading() as connection:
            count = connection.scalar(text("SELECT count(*) FROM result"))
        for kind in options.databases or ["sqlite", "postgresql"]:
            print(
                f"{kind}: {WORKERS} workers, {READERS} readers, {options.seconds:.0f} s, {count:,} results", flush=True
            )
            if kind == "sqlite":
                copy = folder / "copy.db"
                with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
                    source.backup(target)
                measure(str(copy), axes, options.seconds, options.think, None)
                copy.unlink()
            else:
                with Postgres.running() as server:
                    copied(path, server.url)
                    measure(server.url, axes, options.seconds, options.think, psutil.Process(server.pid))


if __name__ == "__main__":
    main()
