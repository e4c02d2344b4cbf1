"""``kernel-compat-matrix list``: list the cells, or the excluded ones."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter

from ..arguments import SELECTION, Arguments, flag
from ..options import axes_of, cells_of
from ..words import plural

ARGUMENTS: Arguments = {
    **SELECTION,
    "--excluded": flag("list the excluded cells, with the reasons"),
    "--json": flag(),
}


def run(options: argparse.Namespace) -> int:
    """Print the cells, or the reasons for the excluded ones; returns the exit code."""
    axes = axes_of(options)
    if options.excluded:
        refused = {cell.name: because for cell, because in axes.all_cells.items() if because}
        if options.json:
            print(json.dumps(refused, indent=2))
        else:
            for because, count in Counter(refused.values()).most_common():
                print(f"{plural(count, 'cell')}: {because}")
        return 0
    cells = cells_of(options, axes)
    if options.json:
        print(json.dumps([{"name": cell.name, **cell.axes} for cell in cells], indent=2))
    else:
        print("\n".join(cell.name for cell in cells))
        print(plural(len(cells), "cell"), file=sys.stderr)
    return 0
