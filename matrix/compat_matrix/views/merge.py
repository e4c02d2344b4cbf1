"""``kernel-compat-matrix merge``: copy the runs of other stores."""

from __future__ import annotations

import argparse

from ..store import Store
from . import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "stores", metavar="FROM", nargs="+", help="a store, as a file or URL, whose runs this one lacks"
    )


def run(arguments: argparse.Namespace) -> int:
    """Copy the missing runs and print their ids; returns the exit code."""
    with Store.open(arguments.store) as store:
        for url in arguments.stores:
            with common.open_store(url) as other:
                took = store.merge(other)
            print(f"{other.name}: {', '.join(took) if took else 'nothing new'}")
    return 0
