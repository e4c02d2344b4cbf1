"""The page of a cell."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from ..cells import Cell
from ..results import Test
from ..store import Measured, Past, Run, Store
from ..store.submissions import Running
from ..views import common, explain, trend
from . import logs
from .grid import entry
from .runs import newest_first

#: The number of results in the history on a page, and of errors of failed tests with a report.
HISTORY, _REPORTS = 50, 200


class Plot(NamedTuple):
    """Figures in one unit whose names have the same beginning, such as ``step time, flash_attention_4``: one line for each.

    Attributes:
        rows: a run with the value of each line, newest first; None if the run has none.
    """

    title: str
    lines: list[str]
    rows: list[tuple[Run, list[float | None]]]


def values(
    store: Store,
    cell: Cell,
    past: Past | None,
    history: Sequence[Past],
    active: Sequence[Running] = (),
    excluded: str = "",
) -> dict[str, Any]:
    """The values of the template, for a result or a cell without one.

    Args:
        history: the newest entries of the cell's history; one more than `HISTORY` if there are older ones.
    """
    history = sorted(history, key=lambda one: (one.summary.started, one.summary.attempt), reverse=True)
    found = store.result(past.run.id, cell, past.summary.attempt, log=False) if past else None
    shown = past or explain.plan_of(store, cell)
    made = {
        "cell": cell,
        "entry": entry(shown, bool(active) and not found, excluded),
        "active": active,
        "past": shown,
        "found": found,
        "history": [(one, entry(one)) for one in history[:HISTORY]],
        "newest": history[0] if history else None,
        "older": len(history) > HISTORY,
        "reproduce": common.reproduce(cell, shown.run if shown else None),
    }
    if found is None or past is None:
        return made
    failed = explain.alike(one for one in found.tests if one.bad)
    by_outcome: dict[str, list[Test]] = defaultdict(list)
    for test in found.tests:
        by_outcome[test.outcome].append(test)
    python, measured = found.environment.get("python"), store.series(cell)
    packed = logs.packed_log(store, past.run.id, cell, found.attempt)
    return made | {
        "failed": [(_error(lines), some) for lines, some in failed[:_REPORTS]],
        "failed_more": [one for _, some in failed[_REPORTS:] for one in some],
        "tests_by_outcome": by_outcome,
        "figures": explain.figures(measured),
        "plots": plots(measured),
        "installed": ({"Python": python} if isinstance(python, str) else {}) | explain.installed(found),
        "facts": explain.facts(found.environment),
        "packages": explain.packages_of(found),
        "shims": explain.shims(found.environment),
        "log": logs.end(packed) if packed else None,
        "shortened": logs.shortened,
    }


def plots(measured: Sequence[Measured]) -> list[Plot]:
    """The plots of figures that are comparable with the last ones of their names; a single value is none."""
    lines: dict[tuple[str, str], dict[str, Mapping[Run, float]]] = {}
    for name, last in sorted({one.figure.name: one for one in measured}.items()):
        title, _, line = name.rpartition(", ")
        values = {one.run: one.figure.value for one in trend.comparable(measured, last)}
        lines.setdefault((title or line, last.figure.unit), {})[line] = values
    found = []
    for (title, unit), own in lines.items():
        rows = [(run, [values.get(run) for values in own.values()]) for run in newest_first({*chain(*own.values())})]
        if len(rows) > 1:
            found.append(Plot(f"{title}, {unit}" if unit else title, [*own], rows))
    return found


def _error(lines: Sequence[str]) -> str:
    """The error lines of a report without pytest's mark."""
    return "\n".join(line[1:].strip() if line.startswith("E ") else line for line in lines)
