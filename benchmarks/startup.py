"""Measure what a process pays to start: `import kernel_compat`, `install()` and ``kernel-compat status``.

Run by hand: python benchmarks/startup.py. Times are medians over fresh processes, in milliseconds. `install()` imports modules of
transformers; they are imported before the clock starts, because every model needs them too.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import subprocess
import sys
import time

#: `install()`, and the modules that it imported from others.
MODULES = """
import sys
import kernel_compat
kernel_compat.install()
print(*(name for name in sys.modules if name.partition(".")[0] not in ("__main__", "kernel_compat", "kernel_compat_shims")))
"""


def child(modules: list[str]) -> None:
    for module in modules:
        with contextlib.suppress(ImportError):  # a name that another module put into sys.modules
            importlib.import_module(module)
    start = time.perf_counter()
    import kernel_compat

    imported = time.perf_counter()
    kernel_compat.install()
    print(imported - start, time.perf_counter() - imported)


def run(*arguments: str, given: str = "") -> str:
    # Bytecode is kept, as pip keeps it for an installed package.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(
        [sys.executable, *arguments], input=given, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout


def main() -> None:
    modules = run("-c", MODULES)
    starts = [run(__file__, "child", given=modules).split()[-2:] for _ in range(15)]
    for name, times in zip(("import kernel_compat", "install()"), zip(*starts, strict=True), strict=True):
        print(f"{name}: {1000 * statistics.median(map(float, times)):.1f} ms")
    bare, status = [], []
    for _ in range(15):
        for times, arguments in ((bare, ("-c", "")), (status, ("-m", "kernel_compat", "status"))):
            start = time.perf_counter()
            run(*arguments)
            times.append(time.perf_counter() - start)
    print(f"python -c '': {1000 * statistics.median(bare):.0f} ms")
    print(f"kernel-compat status: {1000 * statistics.median(status):.0f} ms")


if __name__ == "__main__":
    child(sys.stdin.read().split()) if "child" in sys.argv else main()
