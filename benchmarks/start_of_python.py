"""What kernel_compat_run.pth costs a Python process: without the environment variable, and with it.

Usage: python benchmarks/start_of_python.py [STARTS]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

LINE = (Path(__file__).parent.parent / "compat" / "run" / "start.pth").read_text(encoding="utf-8")
STARTS = int(sys.argv[1]) if len(sys.argv) > 1 else 100


def start(**variables: str) -> float:
    """Milliseconds of a process that does nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "KERNEL_COMPAT"}
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", ""], env={**environment, **variables}, check=True)
    return 1000 * (time.perf_counter() - begin)


def of_the_line() -> float:
    """Milliseconds of the line itself, compiled and run as `site` does, without the variable."""
    begin = time.perf_counter()
    exec(LINE)
    return 1000 * (time.perf_counter() - begin)


if __name__ == "__main__":
    os.environ.pop("KERNEL_COMPAT", None)
    off, on = zip(*((start(), start(KERNEL_COMPAT="{}")) for _ in range(STARTS)), strict=True)
    print(f"the line, without the variable: {statistics.median(of_the_line() for _ in range(STARTS)):.3f} ms")
    print(f"a process without the variable: {statistics.median(off):.1f} ms, with it: {statistics.median(on):.1f} ms")
