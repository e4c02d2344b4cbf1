"""``kernel-compat-matrix delete`` and ``cancel``: delete runs with their results, or interrupt them."""

from __future__ import annotations

import argparse

from ..options import add_store
from ..store import Store, removal, submissions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run: an id, a label, latest~1")
    add_store(parser)


def run(options: argparse.Namespace) -> int:
    """Delete or cancel the runs; returns the exit code."""
    with Store.open(options.store, create=False) as store:
        runs = [store.resolve(name) for name in options.runs]
        if options.name == "delete":
            removal.delete_runs(store, runs)
            print(f"deleted: {', '.join(dict.fromkeys(runs))}")
        for name in runs if options.name == "cancel" else ():
            submissions.cancel(store, name)
            print(f"{name} is interrupted")
    return 0
