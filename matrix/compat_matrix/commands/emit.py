"""``kernel-compat-matrix emit``: print the cells as strategy matrices for GitHub Actions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Hashable, Iterable, Sequence

from ..cells import DEVICES, Cell, many, shard
from ..options import add_selection, axes_of, cells_of, positive

#: GitHub's limit on the jobs of one matrix.
LIMIT = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Prints JSON: for each device a matrix for `strategy: matrix: ${{ fromJSON(...) }}`. A job is a cell or, where those "
        f"are more than the {LIMIT} jobs of a matrix, the cells that share an environment; its `arguments` are those of "
        "`kernel-compat-matrix run`."
    )
    parser.add_argument("service", choices=["github"])
    add_selection(parser)
    parser.add_argument("--shards", type=positive, metavar="N", help="use this number of jobs per device instead")


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
    lambda cell: (cell.base, cell.flash_attention),
    lambda cell: cell.base,
)


def _job(cells: Sequence[Cell], part: str = "") -> dict[str, str | int]:
    name = cells[0].name if len(cells) == 1 else f"{cells[0].base} ({len(cells)} cells)"
    return {
        "name": f"{part} ({many(len(cells), 'cell')})" if part else name,
        "python": _values(cell.python for cell in cells),
        "transformers": _values(cell.transformers for cell in cells),
        "torch": _values(cell.torch for cell in cells),
        "flash_attention": _values(cell.flash_attention for cell in cells),
        "cells": len(cells),
        "arguments": " ".join(cell.name for cell in cells),
    }


def _values(values: Iterable[str]) -> str:
    return " ".join(dict.fromkeys(values))
