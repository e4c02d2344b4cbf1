"""``kernel-compat-matrix list`` and ``emit``: print the cells, and as strategy matrices for GitHub Actions."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence

from ..axes import load
from ..cells import WORDS, Cell, values_of
from ..errors import MatrixError
from ..words import plural

#: GitHub's limit on the jobs of one matrix.
LIMIT = 256


def list_cells(options: argparse.Namespace) -> int:
    """Print the cells, or the reasons for the excluded ones; returns the exit code."""
    axes = load(options.axes)
    if options.excluded:
        refused = {cell.name: because for cell, because in axes.all_cells.items() if because}
        counts = [f"{plural(count, 'cell')}: {because}" for because, count in Counter(refused.values()).most_common()]
        print(json.dumps(refused, indent=2) if options.json else "\n".join(counts))
        return 0
    cells = axes.select(options.only, options.cells, options.pairwise, options.shard)
    if options.json:
        print(json.dumps([{"name": cell.name, **cell.axes} for cell in cells], indent=2))
    else:
        print("\n".join(cell.name for cell in cells))
        print(plural(len(cells), "cell"), file=sys.stderr)
    return 0


def emit(options: argparse.Namespace) -> int:
    """Print a matrix for each device as JSON; returns the exit code."""
    axes = load(options.axes)
    cells = axes.select(options.only, options.cells, options.pairwise, options.shard)
    found = {name: {"include": jobs([one for one in cells if one.device == name])} for name in WORDS["device"]}
    print(json.dumps(found))
    return 0


def jobs(cells: Sequence[Cell]) -> list[dict[str, str | int]]:
    """The jobs of a matrix, at most as many as GitHub allows: a cell each, or all cells that share an environment."""
    for name in (str, lambda cell: "-".join(filter(None, [cell.base, cell.own])), lambda cell: cell.base):
        groups: dict[str, list[Cell]] = {}
        for cell in cells:
            groups.setdefault(name(cell), []).append(cell)
        if len(groups) <= LIMIT:
            return [_job(name, group) for name, group in groups.items()]
    raise MatrixError(f"the cells have {len(groups)} environments, and GitHub allows {LIMIT} jobs: select fewer cells")


def _job(name: str, cells: Sequence[Cell]) -> dict[str, str | int]:
    return {
        "name": cells[0].name if len(cells) == 1 else f"{name} ({len(cells)} cells)",
        **{axis: " ".join(values) for axis, values in values_of(cells).items() if axis != "device"},
        "cells": len(cells),
        "arguments": " ".join(cell.name for cell in cells),
    }
