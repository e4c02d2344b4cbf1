"""``kernel-compat-matrix runs``: list the runs in a store, newest first, with the number of cells in each state."""

from __future__ import annotations

import argparse
import json

from . import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("--json", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    """Print the runs; returns the exit code."""
    with common.open_store(arguments.store) as store:
        runs = store.runs()
        totals = store.totals()
    if arguments.json:
        print(json.dumps([{**common.as_json(one), "cells": dict(totals[one.id])} for one in runs], indent=2))
        return 0
    for one in runs:
        print(f"{common.named(one)}  {one.state}{', partial' * one.partial}  {common.counted(totals[one.id])}")
    return 0
