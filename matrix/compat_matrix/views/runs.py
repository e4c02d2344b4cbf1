"""``kernel-compat-matrix runs``: list the runs in a store and their parts, newest first, with the cells in each state."""

from __future__ import annotations

import argparse
import json

from ..store import Run
from . import common


def run(arguments: argparse.Namespace) -> int:
    """Print the runs; returns the exit code."""
    with common.open_store(arguments.store) as store:
        runs = store.runs()
        totals = store.totals(one.id for one in runs)
        parts: dict[str, list[Run]] = {one.whole: [] for one in runs}
        for one in reversed(runs):
            parts[one.whole].append(one)
        together = {
            whole: common.counted(summary.state for summary in store.summary(whole).values())
            for whole, several in parts.items()
            if len(several) > 1
        }
    if arguments.json:
        print(json.dumps([{**common.as_json(one), "cells": dict(totals[one.id])} for one in runs], indent=2))
        return 0
    for whole, several in parts.items():
        print(_line(common.whole(several), together.get(whole) or common.counted(totals[whole])))
        for one in several if whole in together else ():
            print(f"    part {_line(one, common.counted(totals[one.id]))}")
    return 0


def _line(run: Run, counts: str) -> str:
    return f"{common.named(run)}  {common.one_line(run.state)}{', partial' * run.partial}  {counts}"
