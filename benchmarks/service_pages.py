"""Time the pages: the service with 100,000 results in its store, a report, and a browser until it has painted 1,000 cells.

Run by hand: python benchmarks/service_pages.py. It needs kernel-compat-matrix[service], Playwright and Chromium, and 300 MB of disk
in the temporary folder. Times are medians of 9.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import requests
import uvicorn
from matrix_store import cells, copy_runs, fill, result
from playwright.sync_api import sync_playwright

from compat_matrix.pages import report
from compat_matrix.service.app import create_app
from compat_matrix.service.guard import Settings
from compat_matrix.store import Store

TIMES = 9


def timed(what: str, action: Callable[[], object], before: Callable[[], object] = lambda: None) -> None:
    seconds, busy = [], []
    for _ in range(TIMES):
        before()
        began, began_busy = time.perf_counter(), time.process_time()
        action()
        seconds.append(time.perf_counter() - began)
        busy.append(time.process_time() - began_busy)
    middle = statistics.median(seconds)
    print(f"    {what:55} {middle * 1000:8.1f} ms, of the CPU {statistics.median(busy) * 1000:.1f} ms", flush=True)


def serve(store: Store) -> tuple[uvicorn.Server, str]:
    server = uvicorn.Server(uvicorn.Config(create_app(store, None, Settings()), port=0, log_level="warning"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def measure_server(store: Store, pythons: int) -> None:
    planned = cells(pythons, 28, 6)
    run = store.new_run(planned[:TIMES])
    left = iter(planned)
    timed("store a result of 6 tests", lambda: store.add(run, result(next(left), 6, fail=False, seed=3)))
    store.finish(run, "finished")
    server, address = serve(store)
    session = requests.Session()
    cell = planned[5]
    for page in (
        "/",
        "/?python=all",
        f"/?tf={cell.transformers}.1&pt={cell.torch}.0",  # another patch: earlier results are looked through
        "/?tf=9.9.9&pt=2.0.0&fa=none&py=3.0",
        f"/cells/{cell}",
        "/runs",
        "/diff",
        "/status",
        f"/api/v1/compat?transformers={cell.transformers}&torch={cell.torch}",
        "/api/v1/feed.atom",
    ):
        first = session.get(address + page)
        timed(f"{page}: {len(first.content)} bytes", lambda page=page: session.get(address + page))  # type: ignore[misc]
    tag = {"If-None-Match": session.get(address).headers["etag"]}
    timed("/ of which nothing is new", lambda: session.get(address, headers=tag))
    server.should_exit = True


def measure_report(store: Store, folder: str) -> None:
    began = time.perf_counter()
    report.write(store, Path(folder, "site"))
    print(f"    {'the report':55} {time.perf_counter() - began:8.1f} s", flush=True)


def measure_browser(store: Store) -> None:
    server, address = serve(store)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        found: dict[str, list[float]] = {}
        count = 0
        for _ in range(TIMES):
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            page = context.new_page()
            page.goto(f"{address}/?python=all")
            count = page.locator(".grid td a").count()
            timing = page.evaluate(
                """async () => {
                    const entry = performance.getEntriesByType("navigation")[0];
                    const paints = () => performance.getEntriesByName("first-contentful-paint");
                    while (!paints().length) await new Promise((done) => setTimeout(done, 10));
                    return {"first paint": paints()[0].startTime, "answered": entry.responseEnd, "loaded": entry.loadEventEnd};
                }"""
            )
            for name, value in timing.items():
                found.setdefault(name, []).append(value)
            context.close()
        browser.close()
    print(f"    {count} cells in Chromium, nothing in its cache", flush=True)
    for name, values in found.items():
        print(f"    {name:55} {statistics.median(values):8.1f} ms, {max(values):.1f} ms at most", flush=True)
    server.should_exit = True


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for pythons, copies in ((1, 297), (6, 49)):
            path = Path(folder, f"{pythons}.db")
            with Store.open(str(path)) as store:
                for seed in (1, 2):
                    fill(store, cells(pythons, 28, 6), 6, seed)
            copy_runs(path, copies)
            runs = 2 + 2 * copies
            print(f"{runs * pythons * 168:,} results: {runs} runs of {pythons * 168} cells", flush=True)
            with Store.open(str(path)) as store:
                measure_server(store, pythons)
                if pythons == 1:
                    measure_report(store, folder)
                if pythons > 1:
                    measure_browser(store)
            path.unlink()


if __name__ == "__main__":
    main()
