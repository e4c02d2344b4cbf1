"""The pages of runs: all of them, one, and the changes between two."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from statistics import median
from typing import Any, NamedTuple

from ..cells import Cell, parse
from ..results import ENDED
from ..store import Past, Run, State, Store
from ..store.submissions import Running
from ..views import diff
from . import grid

#: What differs between the cells of one error.
_AMOUNT = re.compile(r"^\d+ of \d+ tests?|, by up to \S+$")

#: The number of runs that are searched for two with the same cells.
SEARCHED = 50


class Suite(NamedTuple):
    """The cells of a suite by state.

    Attributes:
        partial: whether none of its runs is a whole one.
        errors: the failed cells by error, as in `grid.groups`; `at`: the run in which each of them failed.
    """

    name: str
    partial: bool
    counts: Mapping[State, int]
    errors: list[tuple[str, str, str, list[Cell]]]
    at: Mapping[Cell, str]


class Batch(NamedTuple):
    """The runs of one commit with one label, newest first, and their results together."""

    runs: list[Run]
    suites: list[Suite]

    @property
    def state(self) -> str:
        """``running`` while one of them is, else that of the newest."""
        states = [run.state for run in self.runs]
        return "running" if "running" in states else states[0]


def newest_first(runs: Iterable[Run]) -> list[Run]:
    """Runs in the order in which they began: the store received those of other machines in any order."""
    return sorted(runs, key=lambda run: (run.started, run.id), reverse=True)


def wholes(runs: Iterable[Run]) -> list[Run]:
    """The newest part of each run, newest first."""
    return [*{run.whole: run for run in newest_first(runs)[::-1]}.values()][::-1]


def by_commit(runs: Iterable[Run]) -> list[list[Run]]:
    """The runs of each row, the newest row and in it the newest run first."""
    found: dict[tuple[str, ...], list[Run]] = {}
    for run in newest_first(runs):
        found.setdefault(_row(run), []).append(run)
    return [*found.values()]


def row_of(run: Run | None, runs: Iterable[Run]) -> list[Run]:
    """Those of these runs that are in a row with a run, newest first."""
    return [one for one in newest_first(runs) if run and _row(one) == _row(run)]


def _row(run: Run) -> tuple[str, ...]:
    """The commit and label of a row. Without a commit, or a label for changes on top of it, only the parts of a run are a row."""
    same = run.revision and (run.label or not run.revision.endswith("+"))
    return (run.revision, run.label) if same else (run.whole,)


def batches(store: Store, groups: Sequence[Sequence[Run]]) -> list[Batch]:
    """The rows of the list: of a cell in several runs of a row, the newest result counts."""
    names = [run.id for runs in groups for run in runs]
    totals, failed = store.totals(names), store.failed(names)

    def suite(name: str, runs: Sequence[Run]) -> Suite:
        bad = {cell: (run.id, one) for run in runs[::-1] for cell, one in failed.get(run.id, {}).items()}
        counts: Mapping[State, int] = totals[runs[0].id]
        if len(runs) > 1:
            summary = store.summary(*{run.whole for run in runs}, brief=True)
            counts = Counter(one.state for one in summary.values())
            bad = {cell: one for cell, one in bad.items() if summary[cell].verdict == "failed"}
        errors = _by_error({cell: grid.entry(Past(cell, runs[0], one)) for cell, (_, one) in bad.items()})
        partial = all(run.partial for run in runs)
        return Suite(name, partial, counts, errors, {cell: run for cell, (run, _) in bad.items()})

    found = []
    for runs in groups:
        suites: dict[str, list[Run]] = {}
        for run in runs:
            suites.setdefault(run.suite, []).append(run)
        ordered = sorted(suites.items(), key=lambda item: (item[0] != "default", item[0]))
        found.append(Batch([*runs], [suite(name, some) for name, some in ordered]))
    return found


def _by_error(entries: Mapping[Cell, grid.Entry]) -> list[tuple[str, str, str, list[Cell]]]:
    """As `grid.groups`: an error of another number of tests, or of another size, is the same one."""
    found: dict[tuple[str, str, str], tuple[str, str, str, list[Cell]]] = {}
    for state, word, reason, cells in grid.groups(entries):
        found.setdefault((state, word, _AMOUNT.sub("", reason)), (state, word, reason, []))[3].extend(cells)
    return sorted(found.values(), key=lambda one: -len(one[3]))


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
        "parts": newest_first(store.parts(run.id)),
    }


def changes(store: Store, two: tuple[Run, Run] | None) -> dict[str, Any]:
    """The values of the page with the changes between two runs."""
    return {"diff": two and diff.compare(store, two[0].id, two[1].id), "lists": diff.LISTS}


def last_two(store: Store, runs: Iterable[Run], new: Run | None = None) -> tuple[Run, Run] | None:
    """The newest of these runs, or else `new`, after the newest one before it of another row that has its suite and some of its cells."""

    @cache
    def ran(run: Run) -> set[Cell]:
        return {cell for cell, summary in store.summary(run.id, brief=True).items() if summary.verdict}

    every = wholes(runs)[:SEARCHED]
    for place, one in enumerate([new] if new else every):
        for old in every[place:]:
            if old.suite == one.suite and _row(old) != _row(one) and ran(old) & ran(one):
                return old, one
    return None
