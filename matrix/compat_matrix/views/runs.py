"""``kernel-compat-matrix runs``, ``export`` and ``merge``: the runs of a store, and copies of them."""

from __future__ import annotations

import argparse

from ..store import Run, Store
from . import common
from .facts import WholeRun, as_json


def run(arguments: argparse.Namespace) -> int:
    """Print the runs and their parts, newest first, with the cells in each state; returns the exit code."""
    with common.open_store(arguments.store) as store:
        runs = store.runs()
        totals = store.totals(one.id for one in runs)
        if arguments.json:
            print(as_json(WholeRun.model_validate({**one._asdict(), "cells": totals[one.id]}) for one in runs))
            return 0
        parts: dict[str, list[Run]] = {one.whole: [] for one in runs}
        for one in reversed(runs):
            parts[one.whole].append(one)
        for whole, several in parts.items():
            if len(several) == 1:
                print(_line(several[0], common.counted(totals[whole])))
                continue
            together = common.counted(summary.state for summary in store.summary(whole).values())
            print(_line(common.whole(several), together))
            for one in several:
                print(f"    part {_line(one, common.counted(totals[one.id]))}")
    return 0


def _line(run: Run, counts: str) -> str:
    return f"{common.named(run)}  {common.one_line(run.state)}{', partial' * run.partial}  {counts}"


def export(arguments: argparse.Namespace) -> int:
    """Write runs into a new store; returns the exit code."""
    with common.open_store(arguments.store) as store:
        runs = [part.id for name in arguments.runs for part in store.parts(store.resolve(name))]
        store.export(runs, arguments.path)
    print(f"{arguments.path}: {', '.join(runs)}")
    return 0


def merge(arguments: argparse.Namespace) -> int:
    """Copy the runs that other stores have more and print their ids; returns the exit code."""
    with Store.open(arguments.store) as store:
        for url in arguments.stores:
            print(f"{url}: {', '.join(copied(store, url)) or 'nothing new'}")
    return 0


def copied(store: Store, path: str) -> list[str]:
    """As `Store.merge`, from a file or a URL; returns the ids of the copied runs."""
    with Store.open(path, create=False, foreign=True) as other:
        return store.merge(other)
