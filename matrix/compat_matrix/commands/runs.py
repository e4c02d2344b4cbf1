"""The commands on the runs of a store: ``runs``, ``export``, ``merge``, ``cancel``, ``delete`` and ``prune``."""

import argparse
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone

from ..store import Run, Store, removal, submissions
from ..views import common
from ..views.facts import WholeRun, as_json
from ..words import plural


def runs(options: argparse.Namespace) -> int:
    """Print the runs and their parts, those that began last first, with the cells in each state; returns the exit code."""
    with Store.open(options.store, create=False) as store:
        every = sorted(store.runs(), key=lambda one: one.started, reverse=True)
        totals = store.totals(one.id for one in every)
        if options.json:
            print(as_json([WholeRun(**vars(one), cells=totals[one.id]) for one in every], indent=2))
            return 0
        for whole in dict.fromkeys(one.whole for one in every):
            parts = [one for one in reversed(every) if one.whole == whole]
            if len(parts) > 1:
                together = common.counted(summary.state for summary in store.summary(whole).values())
                print(_line(common.whole(parts), together))
            for one in parts:
                print(f"{'    part ' * (len(parts) > 1)}{_line(one, common.counted(totals[one.id]))}")
    return 0


def _line(run: Run, counts: str) -> str:
    return f"{common.named(run)}  {common.one_line(run.state)}{', partial' * run.partial}  {counts}"


def export(options: argparse.Namespace) -> int:
    """Write runs into a new store; returns the exit code."""
    with Store.open(options.store, create=False) as store:
        runs = [part.id for name in options.runs for part in store.parts(store.resolve(name))]
        store.export(runs, options.path)
    print(f"{options.path}: {', '.join(runs)}")
    return 0


def merge(options: argparse.Namespace) -> int:
    """Copy the runs that other stores have more and print their ids; returns the exit code."""
    with Store.open(options.store) as store:
        for url in options.stores:
            with Store.open(url, create=False, foreign=True) as other:
                print(f"{url}: {', '.join(store.merge(other, any_project=options.any_project)) or 'nothing new'}")
    return 0


def cancel(options: argparse.Namespace) -> int:
    """Interrupt runs; returns the exit code."""
    with Store.open(options.store, create=False) as store:
        for name in options.runs:
            parts = _named(store, [name])
            for run in [one for one in parts if one.state == "running"] or parts:  # it is an error if all have ended
                submissions.cancel(store, run.id)
                print(f"{run.id} is interrupted")
    return 0


def delete(options: argparse.Namespace) -> int:
    """Delete runs; returns the exit code."""
    with Store.open(options.store, create=False) as store:
        found = [one.id for one in _named(store, options.runs)]
        removal.delete_runs(store, found)
    print(f"deleted: {', '.join(found)}")
    return 0


def _named(store: Store, names: Iterable[str]) -> list[Run]:
    """The part whose id is given, and all parts of a run that is given by another name."""
    known = {one.id: one for one in store.runs()}
    found = [one for name in names for one in ([known[name]] if name in known else store.parts(store.resolve(name)))]
    return [*{one.id: one for one in found}.values()]


def prune(options: argparse.Namespace) -> int:
    """Delete or list the runs that are too old; returns the exit code."""
    with Store.open(options.store, create=False) as store:
        before = datetime.now(timezone.utc) - timedelta(days=options.keep)
        ended = [one for one in store.runs() if one.state != "running"]
        found = [one for one in ended if (one.finished or one.started) < before]
        for one in found:
            print(f"{common.named(one)} of {common.moment(one.started)}")
        if not options.dry_run:
            removal.delete_runs(store, [one.id for one in found])
    were = "would be" if options.dry_run else "was" if len(found) == 1 else "were"
    print(f"{plural(len(found), 'run')} {were} deleted")
    return 0
