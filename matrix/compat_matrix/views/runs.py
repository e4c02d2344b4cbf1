"""``kernel-compat-matrix runs``: list the runs in a store and their parts, newest first, with the cells in each state."""

from __future__ import annotations

import argparse

from ..arguments import JSON, STORE, Arguments
from ..store import Run
from . import common
from .facts import WholeRun, as_json

ARGUMENTS: Arguments = {**JSON, **STORE}


def run(arguments: argparse.Namespace) -> int:
    """Print the runs; returns the exit code."""
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
