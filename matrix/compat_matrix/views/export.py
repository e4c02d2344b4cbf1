"""``kernel-compat-matrix export``: write runs into a store of their own."""

from __future__ import annotations

import argparse

from . import common


def run(arguments: argparse.Namespace) -> int:
    """Write the runs into a new file; returns the exit code."""
    with common.open_store(arguments.store) as store:
        runs = [part.id for name in arguments.runs for part in store.parts(store.resolve(name))]
        store.export(runs, arguments.path)
    print(f"{arguments.path}: {', '.join(runs)}")
    return 0
