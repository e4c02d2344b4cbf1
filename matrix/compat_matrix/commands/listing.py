"""``kernel-compat-matrix list``: list the cells, or the excluded ones."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter

from ..cells import many
from ..options import add_selection, axes_of, cells_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add_selection(parser)
    parser.add_argument("--excluded", action="store_true", help="list the excluded cells, with the reasons")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Print the cells, or the reasons for the excluded ones; returns the exit code."""
    axes = axes_of(options)
    if options.excluded:
        refused = {cell.name: because for cell, because in axes.all_cells.items() if because}
        if options.json:
            print(json.dumps(refused, indent=2))
        else:
            for because, count in Counter(refused.values()).most_common():
                print(f"{many(count, 'cell')}: {because}")
        return 0
    cells = cells_of(options, axes)
    if options.json:
        print(json.dumps([{"name": cell.name, **vars(cell)} for cell in cells], indent=2))
    else:
        print("\n".join(cell.name for cell in cells))
        print(many(len(cells), "cell"), file=sys.stderr)
    return 0
