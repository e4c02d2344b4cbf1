"""``kernel-compat-matrix cancel``, ``delete`` and ``prune``: interrupt runs, and delete them with their results."""

from __future__ import annotations

import argparse
from datetime import timedelta

from ..arguments import A_RUN, STORE, Arguments, add, days, flag, option
from ..store import Store, removal, submissions
from ..views.common import moment, named
from ..words import plural

_RUNS: Arguments = {"runs": option(A_RUN, metavar="RUN", nargs="+")}
_OLD: Arguments = {
    "--keep": option("how long runs are kept, such as 90d", type=days, required=True, metavar="DAYS"),
    "--dry-run": flag("list the runs that would be deleted; delete nothing"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of one of the commands to its parser."""
    add(parser, {**(_OLD if parser.prog.endswith("prune") else _RUNS), **STORE})


def run(options: argparse.Namespace) -> int:
    """Delete or cancel the runs; returns the exit code."""
    with Store.open(options.store, create=False) as store:
        if options.name == "prune":
            found = removal.older(store, timedelta(days=options.keep))
            for one in found:
                print(f"{named(one)} of {moment(one.started)}")
            if not options.dry_run:
                removal.delete_runs(store, [one.id for one in found])
            were = "would be" if options.dry_run else "was" if len(found) == 1 else "were"
            print(f"{plural(len(found), 'run')} {were} deleted")
            return 0
        runs = [store.resolve(name) for name in options.runs]
        if options.name == "delete":
            removal.delete_runs(store, runs)
            print(f"deleted: {', '.join(dict.fromkeys(runs))}")
        for name in runs if options.name == "cancel" else ():
            submissions.cancel(store, name)
            print(f"{name} is interrupted")
    return 0
