"""``kernel-compat-matrix diff``: show the changes from one run to another. Exits with 1 if something broke."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..cells import Cell
from ..errors import MatrixError
from ..store import Store, Summary
from . import common


class Change(NamedTuple):
    """A cell before and after; None if the run doesn't have it."""

    cell: Cell
    old: Summary | None
    new: Summary | None


class Diff(NamedTuple):
    """The changes between two runs. Cells that ended alike are left out, except for the tests of those that failed both times.

    Attributes:
        broke: cells that passed, and fail now.
        mended: cells that failed, and pass now.
        changed: cells that failed, and fail differently now.
        new: cells that passed or failed in the new run only.
        gone: cells that passed or failed in the old run only: not planned any more, not finished, or not run.
        tests_broke, tests_mended: for cells that failed both times, the tests that ran both times and failed once.
    """

    broke: list[Change]
    mended: list[Change]
    changed: list[Change]
    new: list[Change]
    gone: list[Change]
    tests_broke: dict[Cell, list[str]]
    tests_mended: dict[Cell, list[str]]

    @property
    def something_broke(self) -> bool:
        """Whether a cell broke, or a test in a cell that failed both times."""
        return bool(self.broke or self.tests_broke)


TITLES = {
    "broke": "Broke",
    "mended": "Mended",
    "changed": "Fail in another way",
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
    diff = Diff([], [], [], [], [], {}, {})
    both_failed = []
    ends = store.compare(old, new)
    for cell in common.ordered(ends):
        was, now = ends[cell]
        change = Change(cell, was, now)
        ended = (_ended(was), _ended(now))
        if ended == ("passed", "failed"):
            diff.broke.append(change)
        elif ended == ("failed", "passed"):
            diff.mended.append(change)
        elif ended == ("failed", "failed"):
            both_failed.append(cell)
            if was and now and was.kind != now.kind:
                diff.changed.append(change)
        elif ended[0] is None and ended[1]:
            diff.new.append(change)
        elif ended[0] and ended[1] is None:
            diff.gone.append(change)
    _compare_tests(store, old, new, both_failed, diff)
    return diff


def _ended(summary: Summary | None) -> str | None:
    return summary.verdict if summary and summary.verdict in ("passed", "failed") else None


def _compare_tests(store: Store, old: str, new: str, cells: list[Cell], diff: Diff) -> None:
    failed = {run: store.outcomes(run, cells, failed_only=True) for run in (old, new)}
    for run, other, into in ((new, old, diff.tests_broke), (old, new, diff.tests_mended)):
        # A test that failed only once may not have run the other time. The other tests are queried for those cells only.
        once = {cell: tests for cell in cells if (tests := failed[run][cell].keys() - failed[other][cell])}
        ran = store.outcomes(other, once)
        for cell, tests in once.items():
            if both := sorted(test for test in tests if ran[cell].get(test, "skipped") != "skipped"):
                into[cell] = both


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("old", metavar="OLD", help="a run: an id, a label, latest~1")
    parser.add_argument("new", metavar="NEW", help="the other run, such as latest")
    parser.add_argument("--json", action="store_true", help="print JSON")


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
        if changes:
            yield common.Line()
            yield common.Line(f"{TITLES[name]}: {len(changes)}", "bold")
        for change in changes:
            line = common.Line(f"  {change.cell.name.ljust(width)}  ")
            line.add(*_state(change.old)).add(" -> ").add(*_state(change.new))
            after = change.new or change.old
            if after and after.reason:
                line.add(f"  {common.one_line(after.reason)}")
            yield line
    yield from _test_lines("Tests that broke in cells that failed both times", diff.tests_broke)
    yield from _test_lines("Tests that were mended in cells that failed both times", diff.tests_mended)
    if not any([*lists.values(), diff.tests_broke, diff.tests_mended]):
        yield common.Line("nothing changed")


def _state(summary: Summary | None) -> tuple[str, str]:
    return (common.word(summary), common.style(summary)) if summary else ("not there", "dim")


def _test_lines(title: str, tests: Mapping[Cell, list[str]]) -> Iterator[common.Line]:
    if tests:
        yield common.Line()
        yield common.Line(f"{title}: {sum(map(len, tests.values()))}", "bold")
    for cell, names in tests.items():
        yield common.Line(f"  {cell.name}")
        yield from (common.Line(f"    {common.one_line(name)}") for name in names)


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
    }
