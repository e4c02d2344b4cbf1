"""`runs`: the runs in a store, the newest first, with how many cells ended how."""

from __future__ import annotations

import argparse
import json

from .common import ORDER, open_store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    with open_store(arguments.store) as store:
        totals = store.totals()
        runs = store.runs()
    if arguments.json:
        found = [{**one._asdict(), "cells": dict(totals[one.id])} for one in runs]
        print(json.dumps(found, indent=2, default=str))
        return 0
    for one in runs:
        states = sorted(totals[one.id].items(), key=lambda item: ORDER.index(item[0]))
        counts = ", ".join(f"{count} {state}" for state, count in states)
        label = f" ({one.label})" if one.label else ""
        print(f"{one.id}{label}  {one.state}  {counts}")
    return 0
