"""``kernel-compat-matrix pin``: resolve cells and write their pins."""

from __future__ import annotations

import argparse
import sys

from .. import pins
from ..arguments import LATEST, PINS, SELECTION
from ..options import axes_of, cells_of, pin_folder
from ..words import plural

ARGUMENTS = {**SELECTION, **PINS, **LATEST}


def run(options: argparse.Namespace) -> int:
    """Write the pins; returns 1 if a part couldn't be resolved."""
    axes = axes_of(options)
    cells = cells_of(options, axes)
    folder = pin_folder(options, axes)
    failed = 0
    changed = []
    parts = pins.resolve_parts(axes, cells, latest=options.latest)
    for name, part in sorted(parts.items()):
        if isinstance(part, pins.UvError):
            failed += 1
            print(f"{name}: {part}", file=sys.stderr)
        elif pins.write(part, folder):
            changed.append(name)
    print(
        f"{plural(len(parts) - failed, 'part')} pinned in {folder}, {len(changed)} of them changed"
        + "".join(f"\n  {n}" for n in changed)
    )
    return 1 if failed else 0
