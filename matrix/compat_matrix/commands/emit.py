"""``kernel-compat-matrix emit``: print the cells as strategy matrices for GitHub Actions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Hashable, Sequence

from ..arguments import SELECTION, Arguments, option, positive
from ..cells import DEVICES, Cell, shard, values_of
from ..options import axes_of, cells_of
from ..words import plural

#: GitHub's limit on the jobs of one matrix.
LIMIT = 256


ARGUMENTS: Arguments = {
    "service": option(choices=["github"]),
    **SELECTION,
    "--shards": option("use this number of jobs per device instead", type=positive, metavar="N"),
}


def run(arguments: argparse.Namespace) -> int:
    """Print the matrices as JSON; returns the exit code."""
    cells = cells_of(arguments, axes_of(arguments))
    matrices = {
        device: {"include": jobs([cell for cell in cells if cell.device == device], arguments.shards)}
        for device in DEVICES
    }
    print(json.dumps(matrices))
    return 0


def jobs(cells: Sequence[Cell], shards: int | None = None) -> list[dict[str, str | int]]:
    """The jobs of a matrix, at most as many as GitHub allows. Every cell is in one job.

    Args:
        shards: the largest number of jobs.
    """
    if shards is None:
        for key in _KEYS:
            groups: dict[Hashable, list[Cell]] = {}
            for cell in cells:
                groups.setdefault(key(cell), []).append(cell)
            if len(groups) <= LIMIT:
                return [_job(group) for group in groups.values()]
    count = min(shards or LIMIT, LIMIT, len(cells))
    return [_job(shard(cells, f"{n}/{count}"), f"{n}/{count}") for n in range(1, count + 1)]


#: Ways to group cells into jobs, smallest groups first; a job creates each environment once.
_KEYS: tuple[Callable[[Cell], Hashable], ...] = (
    lambda cell: cell,
    lambda cell: (cell.base, cell.flash_attention, cell.extra),
    lambda cell: (cell.base, cell.flash_attention),
    lambda cell: cell.base,
)


def _job(cells: Sequence[Cell], part: str = "") -> dict[str, str | int]:
    own = {cell.own for cell in cells}
    shared = "-".join(filter(None, [cells[0].base, *own])) if len(own) == 1 else cells[0].base
    name = cells[0].name if len(cells) == 1 else f"{shared} ({len(cells)} cells)"
    return {
        "name": f"{part} ({plural(len(cells), 'cell')})" if part else name,
        **{axis: " ".join(values) for axis, values in values_of(cells).items() if axis != "device"},
        "cells": len(cells),
        "arguments": " ".join(cell.name for cell in cells),
    }
