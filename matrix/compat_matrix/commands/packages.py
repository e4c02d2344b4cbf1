"""``kernel-compat-matrix pin`` and ``fetch``: resolve the packages of cells, and fetch them for machines without a network."""

from __future__ import annotations

import argparse
import sys

from .. import pins, wheelhouse
from ..errors import MatrixError
from ..options import axes_of, cells_of, pin_folder
from ..unpack import split
from ..words import plural


def pin(options: argparse.Namespace) -> int:
    """Write the pins; returns 1 if a part couldn't be resolved."""
    axes = axes_of(options)
    folder = pin_folder(options, axes)
    found = pins.resolve_parts(axes, cells_of(options, axes), latest=options.latest)
    failed = {name: part for name, part in sorted(found.items()) if isinstance(part, pins.UvError)}
    changed = [name for name, part in sorted(found.items()) if isinstance(part, pins.Part) and pins.write(part, folder)]
    for name, error in failed.items():
        print(f"{name}: {error}", file=sys.stderr)
    pinned = f"{plural(len(found) - len(failed), 'part')} pinned in {folder}, {len(changed)} of them changed"
    print("\n  ".join([pinned, *changed]))
    return 1 if failed else 0


def fetch(options: argparse.Namespace) -> int:
    """Fill the folder and print its size; returns the exit code."""
    axes = axes_of(options)
    cells = cells_of(options, axes)
    files = wheelhouse.fetch(
        axes,
        cells,
        options.folder,
        pin_folder=pin_folder(options, axes),
        latest=options.latest,
        without_torch=options.without_torch,
        runner=options.with_runner,
    )
    size = sum(file.stat().st_size for file in files) / 1e6
    counts = f"{plural(len(cells), 'cell')}, {plural(len(files), 'file')}"
    print(f"{options.folder}: {counts}, {size:.1f} MB")
    if options.parts is not None:
        try:
            folder, count = split(options.folder, options.parts)
        except (ValueError, OSError) as error:
            raise MatrixError(str(error)) from error
        print(f"{folder}: {plural(count, 'part')}")
    return 0
