"""The pages of runs: the list, one run, and the changes between two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..cells import Cell
from ..store import Run, Store, Summary
from ..views import diff
from . import grid

#: The number of runs that are searched for two with the same cells.
SEARCHED = 50


def of_one(
    run: Run, summary: Mapping[Cell, Summary], earlier: Sequence[Run], running: Collection[Cell] = ()
) -> dict[str, Any]:
    """The values of a run's page.

    Args:
        earlier: the runs before it, newest first.
        running: its cells that are running.
    """
    entries = grid.of_run(run, summary, running)
    counts = Counter(one.state for one in entries.values())
    return {"run": run, "groups": grid.groups(entries), "counts": counts, "before": before(run, earlier)}


def changes(store: Store, old: Run | None, new: Run | None) -> dict[str, Any]:
    """The values of the page with the changes between two runs."""
    return {"diff": diff.compare(store, old.id, new.id) if old and new else None, "titles": diff.TITLES}


def before(run: Run, earlier: Sequence[Run]) -> Run | None:
    """The newest of these runs before a run that isn't a part of it and has the same suite."""
    return next((one for one in earlier if _comparable(one, run)), None)


def _comparable(one: Run, other: Run) -> bool:
    return one.whole != other.whole and one.suite == other.suite


def last_two(store: Store, runs: Sequence[Run]) -> tuple[Run | None, Run | None]:
    """The newest of these runs with results, and the newest one before it that shares cells with it."""
    new, cells = None, set[Cell]()
    for one in runs[:SEARCHED]:
        if new and not _comparable(one, new):
            continue
        ran = {cell for cell, summary in store.summary(one.id).items() if summary.verdict}
        if new is None and ran:
            new, cells = one, ran
        elif ran & cells:
            return one, new
    return None, None
