"""What options select: the axes file and its cells."""

from __future__ import annotations

import argparse
from pathlib import Path

from .axes import OWN, Axes, load
from .cells import Cell, shard
from .errors import MatrixError

AXES = Path("matrix") / "axes.toml"


def axes_of(options: argparse.Namespace) -> Axes:
    """The axes in ``--axes``, or in the first default file that exists."""
    return load(options.axes or axes_in(Path()) or (OWN if OWN.exists() else AXES))


def axes_in(folder: Path) -> Path | None:
    """The axes file of a project in a folder; None if it has none."""
    return next((path for path in (folder / AXES, folder / AXES.name) if path.is_file()), None)


def cells_of(options: argparse.Namespace, axes: Axes) -> list[Cell]:
    """The selected cells; raises `MatrixError` if there are none."""
    cells = axes.select(options.only, options.cells, options.pairwise)
    if options.shard is not None and not (cells := shard(cells, options.shard)):
        raise MatrixError(f"the part {options.shard} has no cells")
    return cells
