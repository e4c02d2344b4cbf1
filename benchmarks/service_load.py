"""Whether the service's readers wait while it executes runs and takes uploads, with 100,000 results in its store, on 2 cores.

Run by hand: python benchmarks/service_load.py [sqlite] [postgresql] [--seconds 60] [--think 1.0]. It needs
kernel-compat-matrix[service,postgres], aiohttp, Debian's postgresql and 1 GB of disk in the temporary folder. Nothing of the service is
configured: two processes answer on two cores. 50 readers ask for the first page, cells, runs and the API in turn, with a pause of `--think` seconds: first
alone, then while the service runs cells of 300 tests, then while stores of 168 such results are uploaded one after the other. This
process takes its part of the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import aiohttp
import requests
from matrix_store import copy_runs, fill
from sqlalchemy import select, text

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from postgresql import Postgres
from small import Small

from compat_matrix.axes import Axes
from compat_matrix.service import tokens
from compat_matrix.store import Store, models, submissions

READERS = 50
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
                                column.type.process_bind_param(value, writing.dialect)
                                if isinstance(column.type, models.Packed)
                                else value
                                for column, value in zip(table.c, row, strict=True)
                            ]
                        )
                if "id" in table.c:
                    newest = f"(SELECT coalesce(max(id), 1) FROM {table.name})"
                    writing.execute(text(f"SELECT setval(pg_get_serial_sequence('{table.name}', 'id'), {newest})"))
        with target.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("ANALYZE"))


class Load:
    def __init__(self, url: str, token: str, axes: Axes, think: float) -> None:
        self.url, self.think = url, think
        self.cells = [cell.name for cell in axes.cells]
        self.auth = {"authorization": f"Bearer {token}"}
        self.took: dict[str, list[float]] = defaultdict(list)
        self.answers: Counter[tuple[str, int]] = Counter()

    async def ask(self, session: aiohttp.ClientSession, what: str, path: str) -> None:
        began = time.perf_counter()
        async with session.get(self.url + path) as answer:
            await answer.read()
        self.took[what].append(time.perf_counter() - began)
        self.answers[what, answer.status] += 1

    async def reader(self, number: int, end: float) -> None:
        pages = (
            [("first page", "/"), ("form's answer", "/?tf={tf}&pt={torch}"), ("cell page", "/cells/{cell}")] * 3
            + [("first page, live", "/?live=x"), ("runs page", "/runs"), ("status page", "/status")]
            + [("diff page", "/diff"), ("feed", "/api/v1/feed.atom")]
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
                await self.ask(session, what, path)
                if self.think:
                    await asyncio.sleep(random.uniform(0.5, 1.5) * self.think)

    async def uploader(self, uploads: Sequence[Path], end: float) -> int:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
            for count, path in enumerate(uploads):
                if time.monotonic() >= end:
                    return count
                headers = {**self.auth, "content-type": "application/vnd.sqlite3"}
                async with session.post(f"{self.url}/api/v1/runs", data=path.read_bytes(), headers=headers) as answer:
                    assert answer.status == 201, await answer.text()
        return len(uploads)

    async def run(self, seconds: float, uploads: Sequence[Path] = ()) -> int:
        end = time.monotonic() + seconds
        self.took.clear()
        readers = (self.reader(number, end) for number in range(READERS))
        done, *_ = await asyncio.gather(self.uploader(uploads, end), *readers)
        return done

    def show(self, what: str) -> None:
        print(f"    {what}:")
        every = sorted(one for took in self.took.values() for one in took)
        for name, took in [*self.took.items(), ("all", every)]:
            took.sort()
            p50, p99 = (took[int(len(took) * part)] * 1000 for part in (0.5, 0.99))
            print(
                f"        {name:16} {len(took):7} p50 {p50:7.0f} ms, p99 {p99:7.0f} ms, at most {took[-1] * 1000:.0f} ms"
            )
        bad = {f"{name} {status}": count for (name, status), count in self.answers.items() if status >= 400}
        print(f"        errors: {bad or 'none'}", flush=True)


def measure(url: str, axes: Axes, seconds: float, think: float, uploads: Sequence[Path]) -> None:
    with Store.open(url) as store:
        token = tokens.add(store, f"load-{os.getpid()}", ["submit"])
    command = [sys.executable, "-m", "compat_matrix", "serve", "--store", url, "--axes", str(axes.path), "--port", "0"]
    environment = {**os.environ, "KERNEL_COMPAT_MATRIX_CACHE": str(axes.folder / "cache"), "UV_OFFLINE": "1"}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_reportlog.plugin"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as service:
        try:
            assert service.stdout is not None
            address = service.stdout.readline().split()[0]
            time.sleep(3)
            load = Load(address, token, axes, think)
            asyncio.run(load.run(seconds))
            load.show("nothing runs")
            requests.post(
                f"{address}/api/v1/runs", json={"all": True}, headers=load.auth, timeout=60
            ).raise_for_status()
            time.sleep(10)  # for the environments
            with Store.open(url) as store:
                before = _ended(store)
                asyncio.run(load.run(seconds))
                load.show(f"cells run, {_ended(store) - before} results were stored")
                for one in submissions.waiting(store):
                    submissions.cancel(store, one.run)
            time.sleep(5)
            done = asyncio.run(load.run(seconds, uploads))
            load.show(f"{done} stores of {len(axes.cells)} results were uploaded")
        finally:
            service.send_signal(signal.SIGTERM)


def _ended(store: Store) -> int:
    with store.reading() as connection:
        return connection.scalar(text("SELECT count(*) FROM result")) or 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("databases", nargs="*", metavar="DATABASE", help="sqlite, postgresql (both)")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--think", type=float, default=1.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = Small.make(folder / "small")
        small.write("test_it.py", "import pytest\n@pytest.mark.parametrize('n', range(300))\ndef test_it(n): pass")
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
        uploads = []
        for seed in range(10):
            with Store.open(str(folder / f"upload-{seed}.db")) as store:
                fill(store, axes.cells, TESTS, seed)
            uploads.append(folder / f"upload-{seed}.db")
        for kind in options.databases or ["sqlite", "postgresql"]:
            print(f"{kind}: {READERS} readers, {options.seconds:.0f} s, {count:,} results", flush=True)
            if kind == "sqlite":
                copy = folder / "copy.db"
                with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
                    source.backup(target)
                measure(str(copy), axes, options.seconds, options.think, uploads)
                copy.unlink()
            else:
                with Postgres.running() as server:
                    copied(path, server.url)
                    measure(server.url, axes, options.seconds, options.think, uploads)


if __name__ == "__main__":
    main()
