"""``kernel-compat-matrix prune``: delete the runs that ended long ago."""

from __future__ import annotations

import argparse
from datetime import timedelta

from ..options import add_store, days
from ..store import Store, removal
from ..views.common import moment, named
from ..words import plural


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Deletes the runs that ended before this number of days, and what only they have. Runs that haven't ended stay."
    )
    parser.add_argument("--keep", type=days, required=True, metavar="DAYS", help="how long runs are kept, such as 90d")
    parser.add_argument("--dry-run", action="store_true", help="list the runs that would be deleted; delete nothing")
    add_store(parser)


def run(options: argparse.Namespace) -> int:
    """Delete the runs, or list them; returns the exit code."""
    with Store.open(options.store, create=False) as store:
        found = removal.older(store, timedelta(days=options.keep))
        for one in found:
            print(f"{named(one)} of {moment(one.started)}")
        if not options.dry_run:
            removal.delete_runs(store, [one.id for one in found])
    were = "would be" if options.dry_run else "was" if len(found) == 1 else "were"
    print(f"{plural(len(found), 'run')} {were} deleted")
    return 0
