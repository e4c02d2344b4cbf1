"""``kernel-compat-matrix architectures``: write a Markdown document with the proofs of every model type."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..views.architectures import document
from ..views.compatibility import write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("path", metavar="PATH", type=Path, help="the file to write, such as docs/architectures.md")


def run(options: argparse.Namespace) -> int:
    """Write the document; returns the exit code."""
    write(options.path, document())
    return 0
