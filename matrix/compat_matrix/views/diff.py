"""``kernel-compat-matrix diff``: show the changes from one run to another. Exits with 1 if something broke."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from ..cells import Cell
from ..errors import MatrixError
from ..results import ENDED, Figure
from ..store import Store, Summary
from . import common, trend

T = TypeVar("T")

#: The number of runs, up to the old one, from which the noise of figures is known.
_RUNS = 50


class Change(NamedTuple):
    """A cell before and after; None if the run doesn't have it."""

    cell: Cell
    old: Summary | None
    new: Summary | None


class FigureChange(NamedTuple):
    """A figure whose value in the new run is beyond the noise of the runs up to the old one."""

    cell: Cell
    figure: Figure
    noise: trend.Noise


class Diff(NamedTuple):
    """The changes between two runs. Cells that ended alike are left out, except for the tests of those that failed both times.

    Attributes:
        broke: cells that didn't fail, and fail now.
        mended: cells that failed, were flaky or failed as known, and pass now.
        changed: cells that failed, and fail differently now; or that are flaky or fail as known now.
        new: cells that ended in the new run only.
        gone: cells that ended in the old run only: not planned any more, not finished, or not run.
        tests_broke, tests_mended: for cells that failed both times, the tests that ran both times and failed once.
        figures: figures that changed.
        too_few: the number of figures of which too few runs are there to know their noise.
    """

    broke: list[Change]
    mended: list[Change]
    changed: list[Change]
    new: list[Change]
    gone: list[Change]
    tests_broke: dict[Cell, list[str]]
    tests_mended: dict[Cell, list[str]]
    figures: list[FigureChange]
    too_few: int

    @property
    def something_broke(self) -> bool:
        """Whether a cell broke, or a test in a cell that failed both times."""
        return bool(self.broke or self.tests_broke)


TITLES = {
    "broke": "Broke",
    "mended": "Mended",
    "changed": "Ended in another way",
    "new": "New",
    "gone": "Gone",
}


def compare(store: Store, old: str, new: str) -> Diff:
    """The changes from one run to another, by their ids.

    Raises:
        MatrixError: a run doesn't exist, or they ran different suites.
    """
    suites = [(run, store.run(run).suite) for run in (old, new)]
    if suites[0][1] != suites[1][1]:
        said = " and ".join(f"{run} (suite {common.one_line(suite, 60)})" for run, suite in suites)
        raise MatrixError(f"{said} ran different tests and can't be compared")
    ends, tests_broke, tests_mended = store.compare(old, new)
    diff = Diff([], [], [], [], [], _in_order(tests_broke), _in_order(tests_mended), *_compare_figures(store, old, new))
    for cell, (was, now) in _in_order(ends).items():
        before, after = _ended(was), _ended(now)
        if before is None or after is None:
            into = diff.new if after else diff.gone if before else []
        elif before == after:
            into = diff.changed if before == "failed" else []
        else:
            into = {"failed": diff.broke, "passed": diff.mended}.get(after, diff.changed)
        into.append(Change(cell, was, now))
    return diff


def _in_order(found: Mapping[Cell, T]) -> dict[Cell, T]:
    return {cell: found[cell] for cell in common.ordered(found)}


def _ended(summary: Summary | None) -> str | None:
    return summary.verdict if summary and summary.verdict in ENDED else None


def _compare_figures(store: Store, old: str, new: str) -> tuple[list[FigureChange], int]:
    """The figures that changed, and the number of those whose noise isn't known."""
    if old == new:
        return [], 0
    old, new = (store.run(run).whole for run in (old, new))
    runs = [*dict.fromkeys(one.whole for one in store.runs())]
    place = runs.index(old)
    past = [one for one in runs[place : place + _RUNS] if one != new]
    changes, too_few = [], 0
    measured = store.measured(runs=[*past, new])
    for cell, every in _in_order(measured).items():
        now = {one.figure.name: one for one in every if one.run.whole == new}
        earlier = [one for one in every if one.run.whole != new]
        for _, one in sorted(now.items()):
            found = trend.level([each.figure.value for each in trend.comparable(earlier, one)])
            expected = trend.noise(found.values)
            if expected is None:
                too_few += 1
                continue
            side = expected.side(one.figure.value)
            if side and side not in map(expected.side, found.outside):  # else an earlier run was the first
                changes.append(FigureChange(cell, one.figure, expected))
    return changes, too_few


def run(arguments: argparse.Namespace) -> int:
    """Print the changes; returns 1 if something broke."""
    with common.open_store(arguments.store) as store:
        old, new = (common.whole(store.parts(store.resolve(name))) for name in (arguments.old, arguments.new))
        diff = compare(store, old.id, new.id)
    if arguments.json:
        print(json.dumps({"old": common.as_json(old), "new": common.as_json(new)} | _as_json(diff), indent=2))
    else:
        heading = common.Line(f"from {common.named(old)} to {common.named(new)}", "bold")
        common.show([heading, *_lines(diff)])
    return 1 if diff.something_broke else 0


def _lines(diff: Diff) -> Iterator[common.Line]:
    lists: dict[str, list[Change]] = {name: getattr(diff, name) for name in TITLES}
    width = max((len(change.cell.name) for changes in lists.values() for change in changes), default=0)
    for name, changes in lists.items():
        yield from common.section(f"{TITLES[name]}: {len(changes)}", (_change_line(one, width) for one in changes))
    for word, tests in (("broke", diff.tests_broke), ("were mended", diff.tests_mended)):
        names: list[str | common.Line] = []
        for cell, own in tests.items():
            names += [common.Line(f"  {cell}"), *map(common.one_line, own)]
        count = sum(map(len, tests.values()))
        yield from common.section(f"Tests that {word} in cells that failed both times: {count}", names)
    title = f"Figures beyond the noise of earlier runs: {len(diff.figures)}"
    yield from common.section(title, map(_figure_line, diff.figures))
    if diff.too_few:
        yield common.Line()
        yield common.Line(f"figures with too few earlier runs to know their noise: {diff.too_few}", "dim")
    if not any([*lists.values(), diff.tests_broke, diff.tests_mended, diff.figures]):
        yield common.Line("nothing changed")


def _change_line(change: Change, width: int) -> common.Line:
    was, now = (common.look(one) if one else ("not there", "dim") for one in (change.old, change.new))
    after = change.new or change.old
    line = common.Line(f"  {change.cell.name:{width}}  ").add(*was).add(" -> ").add(*now)
    return line.add(f"  {common.one_line(after.reason)}") if after and after.reason else line


def _figure_line(found: FigureChange) -> common.Line:
    cell, figure, noise = found
    value, usual = trend.number(figure.value, figure.unit), trend.number(noise.usual, figure.unit)
    return common.Line(
        f"  {cell.name}  {common.one_line(figure.name)}: {trend.changed(noise.usual, figure.value, figure.better)}, "
        f"{value}; usual is {usual}, from {trend.number(noise.low)} to {trend.number(noise.high)}"
    )


def _as_json(diff: Diff) -> dict[str, Any]:
    def state(summary: Summary | None) -> dict[str, Any] | None:
        return summary and {"state": summary.state, "kind": summary.kind, "reason": summary.reason}

    def changes(found: list[Change]) -> list[dict[str, Any]]:
        return [{"cell": one.cell.name, "old": state(one.old), "new": state(one.new)} for one in found]

    return {
        "cells": {name: changes(getattr(diff, name)) for name in TITLES},
        "tests": {
            "broke": {cell.name: tests for cell, tests in diff.tests_broke.items()},
            "mended": {cell.name: tests for cell, tests in diff.tests_mended.items()},
        },
        "figures": [{"cell": cell.name, **figure._asdict(), **noise._asdict()} for cell, figure, noise in diff.figures],
        "figures_with_too_few_runs": diff.too_few,
    }
