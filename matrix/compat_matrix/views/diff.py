"""``kernel-compat-matrix diff``: show the changes from one run to another. Exits with 1 if something broke."""

import argparse
from collections.abc import Iterator, Mapping
from typing import TypeVar

from rich.text import Text

from ..cells import Cell
from ..errors import MatrixError
from ..results import ENDED
from ..store import Store, Summary
from . import common, trend
from .facts import CellChange, Changes, FigureChange, as_json

T = TypeVar("T")

#: The number of runs, up to the old one, from which the noise of figures is known.
_RUNS = 50

#: The lists of cells in `Changes`, as they are shown.
LISTS = ("broke", "mended", "changed", "appeared", "gone")


def compare(store: Store, old: str, new: str) -> Changes:
    """The changes from one run to another, by their ids. A `MatrixError` if they ran different suites."""
    runs = [store.run(run) for run in (old, new)]
    if runs[0].suite != runs[1].suite:
        said = " and ".join(f"{run.id} (suite {common.one_line(run.suite, 60)})" for run in runs)
        raise MatrixError(f"{said} ran different tests and can't be compared")
    was, now = (store.summary(run, brief=True) for run in (old, new))
    pairs: list[tuple[Cell, Summary | None, Summary | None]]
    pairs = [(cell, one, now.get(cell)) for cell, one in was.items()]
    pairs += [(cell, None, one) for cell, one in now.items() if cell not in was]
    figures, too_few = _figures(store, runs[0].whole, runs[1].whole) if old != new else ([], 0)
    failed = [cell for cell, one, two in pairs if one and two and one.verdict == two.verdict == "failed"]
    tests_broke, tests_mended = store.changed_tests(old, new, failed)
    found = Changes(
        old=runs[0],
        new=runs[1],
        tests_broke=_in_order(tests_broke),
        tests_mended=_in_order(tests_mended),
        figures=figures,
        figures_with_too_few_runs=too_few,
    )
    differing = {cell: pair for cell, *pair in pairs if not (pair[0] and pair[1] and pair[0][:2] == pair[1][:2])}
    for cell, (one, two) in _in_order(differing).items():
        before, after = _ended(one), _ended(two)
        if before is None or after is None:
            into = found.appeared if after else found.gone if before else []
        elif before == after:
            into = found.changed if before == "failed" else []
        else:
            into = {"failed": found.broke, "passed": found.mended}.get(after, found.changed)
        into.append(CellChange(cell=cell, old=one, new=two))
    return found


def _in_order(found: Mapping[Cell, T]) -> dict[Cell, T]:
    return {cell: found[cell] for cell in common.ordered(found)}


def _ended(summary: Summary | None) -> str | None:
    return summary.verdict if summary and summary.verdict in ENDED else None


def _figures(store: Store, old: str, new: str) -> tuple[list[FigureChange], int]:
    """The figures that changed between two whole runs, and the number of those whose noise isn't known."""
    runs = store.wholes()
    past = [one for one in runs[runs.index(old) :][:_RUNS] if one != new]
    changes, too_few = [], 0
    for cell, every in _in_order(store.measured([*past, new])).items():
        now = {one.figure.name: one for one in every if one.run.whole == new}
        earlier = [one for one in every if one.run.whole != new]
        for _, one in sorted(now.items()):
            found = trend.level([each.figure.value for each in trend.comparable(earlier, one)])
            if (expected := trend.noise(found.values)) is None:
                too_few += 1
            elif (side := expected.side(one.figure.value)) and side not in map(expected.side, found.outside):
                # Else an earlier run was the first.
                changes.append(FigureChange(**vars(one.figure), cell=cell, **expected._asdict()))
    return changes, too_few


def run(arguments: argparse.Namespace) -> int:
    """Print the changes; returns 1 if something broke."""
    with Store.open(arguments.store, create=False) as store:
        old, new = (common.whole(store.parts(store.resolve(name))) for name in (arguments.old, arguments.new))
        found = compare(store, old.id, new.id)
    if arguments.json:
        print(as_json(found.model_copy(update={"old": old, "new": new}), indent=2))
    else:
        common.show([Text(f"from {common.named(old)} to {common.named(new)}", "bold"), *_lines(found)])
    return 1 if found.broke or found.tests_broke else 0


def _lines(found: Changes) -> Iterator[Text]:
    lists: dict[str, list[CellChange]] = {name: getattr(found, name) for name in LISTS}
    width = max((len(change.cell.name) for changes in lists.values() for change in changes), default=0)
    for name, changes in lists.items():
        title = f"{name.capitalize()}: {len(changes)}"
        yield from common.section(title, (_change_line(one, width) for one in changes))
    for word, tests in (("broke", found.tests_broke), ("were mended", found.tests_mended)):
        names: list[str | Text] = []
        for cell, own in tests.items():
            names += [Text(f"  {cell}"), *map(common.one_line, own)]
        count = sum(map(len, tests.values()))
        yield from common.section(f"Tests that {word} in cells that failed both times: {count}", names)
    title = f"Figures beyond the noise of earlier runs: {len(found.figures)}"
    yield from common.section(title, map(_figure_line, found.figures))
    if found.figures_with_too_few_runs:
        too_few = f"figures with too few earlier runs to know their noise: {found.figures_with_too_few_runs}"
        yield from (Text(), Text(too_few, "dim"))
    if not any([*lists.values(), found.tests_broke, found.tests_mended, found.figures]):
        yield Text("nothing changed")


def _change_line(change: CellChange, width: int) -> Text:
    was, now = (common.look(one) if one else ("not there", "dim") for one in (change.old, change.new))
    after = change.new or change.old
    reason = f"  {common.one_line(after.reason)}" if after and after.reason else ""
    return Text.assemble(f"  {change.cell.name:{width}}  ", was, " -> ", now, reason)


def _figure_line(found: FigureChange) -> Text:
    return Text(
        f"  {found.cell}  {common.one_line(found.name)}: {trend.changed(found.usual, found.value, found.better)}, "
        f"{trend.number(found.value, found.unit)}; usual is {trend.number(found.usual, found.unit)}, "
        f"from {trend.number(found.low)} to {trend.number(found.high)}"
    )
