"""``kernel-compat-matrix fetch``: write a folder that cells can be installed from without network."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pydantic import ByteSize, TypeAdapter, ValidationError

from ..arguments import LATEST, PINS, SELECTION, Arguments, flag, option
from ..errors import MatrixError
from ..options import axes_of, cells_of, pin_folder
from ..unpack import split
from ..wheelhouse import fetch
from ..words import plural


def _size(text: str) -> int:
    """A number of bytes."""
    try:
        size = TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a size such as 64MiB") from None
    if size < 1 << 20:  # there would be thousands
        raise argparse.ArgumentTypeError(f"{text} is less than 1MiB")
    return size


ARGUMENTS: Arguments = {
    **SELECTION,
    "folder": option("the folder; files that it has already are not fetched again", type=Path, metavar="DIR"),
    **PINS,
    **LATEST,
    "--without-torch": flag("leave out torch, for machines that have their own: `run --base-python`"),
    "--with-runner": flag("include this command itself"),
    "--parts": option(
        "write the folder also as files of at most this size, such as 64MiB, into DIR.parts", type=_size, metavar="SIZE"
    ),
}


def run(options: argparse.Namespace) -> int:
    """Fill the folder and print its size; returns the exit code."""
    axes = axes_of(options)
    cells = cells_of(options, axes)
    wheelhouse = fetch(
        axes,
        cells,
        options.folder,
        pin_folder=pin_folder(options, axes),
        latest=options.latest,
        without_torch=options.without_torch,
        runner=options.with_runner,
        note=lambda text: print(text, file=sys.stderr),
    )
    files = wheelhouse.files.values()
    size = sum(file.size for file in files) / 1e6
    counts = f"{plural(len(wheelhouse.cells), 'cell')}, {plural(len(files), 'file')}"
    print(f"{options.folder}: {counts}, {size:.1f} MB")
    if options.parts is not None:
        try:
            parts, count = split(options.folder, options.parts)
        except (ValueError, OSError) as error:
            raise MatrixError(str(error)) from error
        print(f"{parts}: {plural(count, 'part')}")
    return 0
