"""``kernel-compat-matrix delete``: delete runs with their results."""

from __future__ import annotations

import argparse

from ..options import add_store
from ..store import Store, removal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = "Deletes runs, and the logs and texts that only they have. A run that hasn't ended is refused."
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run: an id, a label, latest~1")
    add_store(parser)


def run(options: argparse.Namespace) -> int:
    """Delete the runs; returns the exit code."""
    with Store.open(options.store, create=False) as store:
        runs = [store.resolve(name) for name in options.runs]
        removal.delete_runs(store, runs)
    print(f"deleted: {', '.join(dict.fromkeys(runs))}")
    return 0
