"""``kernel-compat-matrix cancel``: interrupt runs that a service executes."""

from __future__ import annotations

import argparse

from ..options import add_store
from ..store import Store, submissions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Interrupts runs that wait for a service or are executed by one, and marks runs whose runner was killed as interrupted. "
        "A `run` that goes on is ended by Ctrl-C."
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run: an id, a label, latest~1")
    add_store(parser)


def run(options: argparse.Namespace) -> int:
    """Cancel the runs; returns the exit code."""
    with Store.open(options.store, create=False) as store:
        for name in [store.resolve(name) for name in options.runs]:
            submissions.cancel(store, name)
            print(f"{name} is interrupted")
    return 0
