"""``kernel-compat-matrix architectures``: write a Markdown document with the proofs of every model type."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..arguments import Arguments, option
from ..views.architectures import document
from ..views.compatibility import write

ARGUMENTS: Arguments = {
    "path": option("the file to write, such as docs/architectures.md", metavar="PATH", type=Path),
}


def run(options: argparse.Namespace) -> int:
    """Write the document; returns the exit code."""
    write(options.path, document())
    return 0
