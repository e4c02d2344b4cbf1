"""The pages of runs: one run, and the changes between two."""

import json
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from ..cells import Cell, parse
from ..results import ENDED
from ..store import Run, Store
from ..store.submissions import Running
from ..views import diff
from . import grid

#: The number of runs that are searched for two with the same cells.
SEARCHED = 50


def of_one(
    store: Store, run: Run, active: Sequence[Running] = (), can: str = "", queue: Sequence[Any] = ()
) -> dict[str, Any]:
    """The values of a run's page, with its cells that are running, the action that can be taken, and the runs that wait."""
    summary = store.summary(run.id)
    entries = grid.of_run(run, summary, {one.cell for one in active})
    before, own = next(((place, one) for place, one in enumerate(queue) if one.run == run.id), (0, None))
    again = {parse(name): attempt for name, attempt in json.loads(own.again).items()} if own else {}
    open_ = [cell for cell, one in summary.items() if one.state == "unfinished" or one.attempt == again.get(cell)]
    took = [one.seconds for one in summary.values() if one.verdict in ENDED]
    return {
        "run": run,
        "active": active,
        "can": can,
        "groups": grid.groups(entries),
        "counts": Counter(one.state for one in entries.values()),
        "to_run": len(open_),
        "done": sum(one.state != "excluded" for one in summary.values()) - len(open_),
        "left": median(took) * len(open_) / len(active) if took and active else None,
        "before": before,
        "waits": own,
    }


def changes(store: Store, two: tuple[Run, Run] | None) -> dict[str, Any]:
    """The values of the page with the changes between two runs."""
    return {"diff": two and diff.compare(store, two[0].id, two[1].id), "lists": diff.LISTS}


def last_two(store: Store, runs: Sequence[Run]) -> tuple[Run, Run] | None:
    """The newest of these runs with results, after the newest one before it that has its suite and some of its cells."""
    new, cells = None, set[Cell]()
    for one in runs[:SEARCHED]:
        if new and (one.whole == new.whole or one.suite != new.suite):
            continue
        ran = {cell for cell, summary in store.summary(one.id, brief=True).items() if summary.verdict}
        if new and ran & cells:
            return one, new
        if not new and ran:
            new, cells = one, ran
    return None
