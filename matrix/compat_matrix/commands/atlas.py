"""``kernel-compat-matrix atlas``: the command ``kernel-compat-atlas``, which may also keep the seams in a store."""

import argparse
import json

from kernel_compat_atlas import cli
from kernel_compat_atlas.words import Notes

from .. import arguments
from ..errors import MatrixError
from ..store import Store, documents


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    cli.add_arguments(parser)
    arguments.add(parser, "--store:atlas")


def run(options: argparse.Namespace) -> int:
    """Show the seams or a project, and keep the seams if a store is named; returns the exit code."""
    if not options.store:
        return cli.run(options)
    if options.project is not None:
        raise MatrixError("--store keeps seams, and can't be combined with --project")
    cli.refuse_combinations(options)
    notes = Notes()
    seams = cli.seams_of(options, notes)
    with Store.open(options.store) as store:
        documents.keep(store, documents.ATLAS, json.dumps(seams.as_json(notes, checked=True)))
    return cli.show(seams, options, notes)
