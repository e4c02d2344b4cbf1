"""Time the published site in Chromium with its CPU slowed down four times: until it has painted, and until it has answered.

Run by hand: python benchmarks/published_site.py [FOLDER]. Without a folder it makes the site of docs/compatibility.sqlite.xz. It needs
kernel-compat-matrix, Playwright and Chromium. Times are medians of 9, each in a new browser without a cache.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from compat_matrix.cli import main as matrix

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from report_site import folder_served

TIMES, SLOWER = 9, 4

RESULTS = Path(__file__).parent.parent / "docs" / "compatibility.sqlite.xz"

#: The time until the first paint, and until the page and its scripts are loaded.
PAINTED = """async () => {
    const paint = () => performance.getEntriesByName("first-contentful-paint")[0];
    const entry = () => performance.getEntriesByType("navigation")[0];
    while (!paint() || !entry().loadEventEnd) await new Promise((done) => setTimeout(done, 10));
    return {"first paint": paint().startTime, "loaded": entry().loadEventEnd};
}"""

#: From the click on the button until the answer is in the page, and until it is painted.
ANSWERED = """() => new Promise((done) => {
    const began = performance.now();
    document.querySelector("#ask button").click();
    const made = performance.now() - began;
    requestAnimationFrame(() => setTimeout(() => done({"answer": made, "painted": performance.now() - began})));
})"""


def slowed(browser: Browser, address: str) -> Page:
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": SLOWER})
    page.goto(address)
    return page


def measure(address: str, folder: Path) -> None:
    cell = max((folder / "cells").iterdir(), key=lambda path: path.stat().st_size).name
    times: dict[tuple[str, str], list[float]] = {}
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(TIMES):
            for path in ("index.html", f"cells/{cell}", "seams.html", "types.html", "runs.html"):
                if not (folder / path).exists():
                    continue
                page = slowed(browser, address + path)
                found = page.evaluate(PAINTED)
                if path == "index.html":
                    for name, value in {"transformers": "5.9.1", "torch": "2.11.0"}.items():
                        page.get_by_label(name, exact=True).fill(value)
                    found |= page.evaluate(ANSWERED)
                    assert page.locator("#answer").inner_text()
                for name, value in found.items():
                    times.setdefault((path, name), []).append(value)
                page.context.close()
        browser.close()
    for (path, name), values in times.items():
        print(f"    {path:45} {name:12} {statistics.median(values):7.0f} ms, {max(values):.0f} ms at most", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="the folder of a site")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as temporary:
        if folder is None:
            store, folder = Path(temporary, "results.sqlite"), Path(temporary, "site")
            store.write_bytes(lzma.decompress(RESULTS.read_bytes()))
            began, busy = time.perf_counter(), time.process_time()
            matrix(["report", "--store", str(store), str(folder)])
            print(f"made in {time.perf_counter() - began:.1f} s, of the CPU {time.process_time() - busy:.1f} s")
        files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        print(f"{len(files)} files, {sum(files):,} bytes; the CPU {SLOWER} times slower:")
        with folder_served(folder) as address:
            measure(f"{address}/", folder)


if __name__ == "__main__":
    main()
