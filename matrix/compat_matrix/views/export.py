"""``kernel-compat-matrix export``: write runs into a store of their own."""

from __future__ import annotations

import argparse

from ..arguments import A_RUN, STORE, Arguments, option
from . import common

ARGUMENTS: Arguments = {
    "runs": option(A_RUN, metavar="RUN", nargs="+"),
    "path": option("the file to write; it must not exist", metavar="PATH"),
    **STORE,
}


def run(arguments: argparse.Namespace) -> int:
    """Write the runs into a new file; returns the exit code."""
    with common.open_store(arguments.store) as store:
        runs = [part.id for name in arguments.runs for part in store.parts(store.resolve(name))]
        store.export(runs, arguments.path)
    print(f"{arguments.path}: {', '.join(runs)}")
    return 0
