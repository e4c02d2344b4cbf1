"""``kernel-compat-matrix pin``: resolve cells and write their pins."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .. import pins
from ..locking import ResolutionError
from ..options import add_selection, axes_of, cells_of, pin_folder
from ..words import plural


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add_selection(parser)
    parser.add_argument(
        "--pins", type=Path, metavar="DIR", help="the folder of the pins (default: pins, beside the axes file)"
    )
    parser.add_argument("--latest", action="store_true", help="ignore `exclude_newer`")


def run(options: argparse.Namespace) -> int:
    """Write the pins; returns 1 if a part couldn't be resolved."""
    axes = axes_of(options)
    cells = cells_of(options, axes)
    folder = pin_folder(options, axes)
    failed = 0
    changed = []
    parts = pins.resolve_parts(axes, cells, latest=options.latest)
    for name, part in sorted(parts.items()):
        if isinstance(part, ResolutionError):
            failed += 1
            print(f"{name}: {part}", file=sys.stderr)
        elif pins.write(part, folder):
            changed.append(name)
    print(
        f"{plural(len(parts) - failed, 'part')} pinned in {folder}, {len(changed)} of them changed"
        + "".join(f"\n  {n}" for n in changed)
    )
    return 1 if failed else 0
