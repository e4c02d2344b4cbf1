"""``kernel-compat-matrix pin`` and ``fetch``: resolve the packages of cells, and fetch them for machines without a network."""

import argparse
import sys

from .. import pins, wheelhouse
from ..axes import load
from ..errors import MatrixError
from ..unpack import split
from ..words import plural


def pin(options: argparse.Namespace) -> int:
    """Write the pins; returns 1 if a part couldn't be resolved."""
    axes = load(options.axes)
    cells = axes.select(options.only, options.cells, options.pairwise, options.shard)
    found = pins.resolve_parts(axes, cells, latest=options.latest)
    failed = [part for part in found.values() if part.problem]
    for part in sorted(found.values(), key=lambda part: part.name):
        if part.problem:
            print(f"{part.name}: {part.problem}", file=sys.stderr)
        else:
            pins.write(part, axes.pins)
    print(f"{plural(len(found) - len(failed), 'part')} pinned in {axes.pins}")
    return int(bool(failed))


def fetch(options: argparse.Namespace) -> int:
    """Fill the folder and print its size; returns the exit code."""
    axes = load(options.axes)
    cells = axes.select(options.only, options.cells, options.pairwise, options.shard)
    files = wheelhouse.fetch(
        axes,
        cells,
        options.folder,
        latest=options.latest,
        without_torch=options.without_torch,
        runner=options.with_runner,
    )
    size = sum(file.stat().st_size for file in files) / 1e6
    counts = f"{plural(len(cells), 'cell')}, {plural(len(files), 'file')}"
    print(f"{options.folder}: {counts}, {size:.1f} MB")
    if options.parts is not None:
        try:
            folder, count = split(options.folder, options.parts << 20)
        except (ValueError, OSError) as error:
            raise MatrixError(str(error)) from error
        print(f"{folder}: {plural(count, 'part')}")
    return 0
