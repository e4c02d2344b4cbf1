"""``kernel-compat-matrix cancel``, ``delete`` and ``prune``: interrupt runs, and delete them with their results."""

from __future__ import annotations

import argparse
from datetime import timedelta

from ..store import Store, removal, submissions
from ..views.common import moment, named
from ..words import plural


def cancel(options: argparse.Namespace) -> int:
    """Interrupt runs; returns the exit code."""
    with Store.open(options.store, create=False) as store:
        for run in [store.resolve(name) for name in options.runs]:
            submissions.cancel(store, run)
            print(f"{run} is interrupted")
    return 0


def delete(options: argparse.Namespace) -> int:
    """Delete runs; returns the exit code."""
    with Store.open(options.store, create=False) as store:
        runs = [store.resolve(name) for name in options.runs]
        removal.delete_runs(store, runs)
    print(f"deleted: {', '.join(dict.fromkeys(runs))}")
    return 0


def prune(options: argparse.Namespace) -> int:
    """Delete or list the runs that are too old; returns the exit code."""
    with Store.open(options.store, create=False) as store:
        found = removal.older(store, timedelta(days=options.keep))
        for one in found:
            print(f"{named(one)} of {moment(one.started)}")
        if not options.dry_run:
            removal.delete_runs(store, [one.id for one in found])
    were = "would be" if options.dry_run else "was" if len(found) == 1 else "were"
    print(f"{plural(len(found), 'run')} {were} deleted")
    return 0
