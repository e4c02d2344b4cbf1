"""``kernel-compat-matrix bisect``: find the first release that broke a test or a shim, running as few cells as possible."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from rich.console import Console

from .. import gpus, runner
from ..arguments import ENVIRONMENTS, LATEST, SELECTION, STORE, TESTS, Arguments, add, option
from ..axes import Axes
from ..cells import Cell, values_of
from ..errors import MatrixError
from ..expressions import is_release, release
from ..options import axes_of, cells_of, jobs_of, new_run, revision
from ..outcomes import NO_TEST
from ..progress import Progress
from ..results import CellResult
from ..store import Store
from ..words import plural
from ..work import Job

#: Run in a cell to get only the library's report on its shims.
_REPORT = "import torch, transformers, kernel_compat_cell as cell; cell.pytest_sessionfinish()"

#: pytest's output for a test that doesn't exist or isn't selected. It also prints this if the test's file has an error.
_MISSING = re.compile(
    r"^ERROR: (?:(?:file or directory )?not found|found no collectors for)\b|^=* ?\d+ skipped in |\d deselected",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Answer:
    """The state of a cell; ``unknown`` for a skipped or missing test, or if the cell can't be installed."""

    state: Literal["good", "bad", "unknown"]
    reason: str = ""


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        good: the last good value.
        bad: the first value known to be bad.
        between: the values between them, whose state is unknown.
    """

    good: str
    bad: str
    between: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Looks for the first release on an axis that broke a test or a shim. The selection leaves one value on every other "
        "axis. Results that the store has for the same pins and the same commit are reused."
    )
    what = {
        "--test": option("a test by its pytest node id, or all tests below it; only these run", metavar="NODEID"),
        "--seam": option("a shim by its name in `kernel-compat status`; it is bad if it isn't applied", metavar="NAME"),
    }
    add(parser.add_mutually_exclusive_group(required=True), what)
    add(parser, {**OPTIONS, **SELECTION, **STORE, **TESTS, **LATEST, **ENVIRONMENTS})


OPTIONS: Arguments = {
    "--axis": option("the axis of releases to search (default: transformers)", default="transformers"),
    "--good": option("a good value (default: the oldest)", metavar="VERSION"),
    "--bad": option("a bad value (default: the newest)", metavar="VERSION"),
}


def run(arguments: argparse.Namespace) -> int:
    """Search, and print the first bad release and the last good one; returns the exit code."""
    axes = axes_of(arguments)
    cells = line(cells_of(arguments, axes), arguments.axis, arguments.good, arguments.bad)
    with Store.open(arguments.store) as store:
        asking = _Asking(arguments, axes, store, cells)
        known = asking.known()
        found = search([*cells], asking, known)
    broke = " is the first that"
    if found.between:
        names = " or ".join(filter(None, [", ".join(found.between[:-1]), found.between[-1]]))
        broke = f", or {names}, whose state is unknown,"
    what = arguments.test or arguments.seam
    print(f"{arguments.axis} {found.bad}{broke} broke {what}; {found.good} is good")
    print(f"{plural(asking.ran, 'cell')} run, {len(known)} known")
    return 0


def line(cells: Sequence[Cell], axis: str, good: str | None, bad: str | None) -> dict[str, Cell]:
    """The cells from the good value of an axis to the bad one, by value, oldest first.

    Raises:
        MatrixError: they differ on other axes too, or a value doesn't exist, or the good one isn't older.
    """
    there = values_of(cells)
    if axis not in there or not all(map(is_release, there[axis])):
        releases = [name for name, values in there.items() if values and all(map(is_release, values))]
        raise MatrixError(f"--axis is one of {', '.join(releases)}, not {axis!r}")
    having = [cell for cell in cells if axis in cell.axes]
    for other in there:
        values = list(dict.fromkeys(cell.axes.get(other, "none") for cell in having))
        if other != axis and len(values) > 1:
            said = f"{', '.join(values[:8])}{' ...' if len(values) > 8 else ''}"
            raise MatrixError(f"several values of {other} are selected; choose one with --only: {said}")
    found = {cell.axes[axis]: cell for cell in sorted(having, key=lambda cell: release(cell.axes[axis]))}
    every = list(found)
    for value in (good, bad):
        if value is not None and value not in found:
            raise MatrixError(f"{axis} {value} isn't selected; the selected values are {', '.join(every)}")
    first, last = every.index(good or every[0]), every.index(bad or every[-1])
    if first >= last:
        raise MatrixError(
            f"the good {axis} must be older than the bad one, and {every[first]} isn't older than {every[last]}"
        )
    return {value: found[value] for value in every[first : last + 1]}


def search(values: Sequence[str], ask: Callable[[str], Answer], known: Mapping[str, Answer]) -> Found:
    """Find where good becomes bad, with as few calls of `ask` as possible.

    Args:
        values: in order; the first must be good and the last bad, which is checked first.
        known: answers that are known already.

    Raises:
        MatrixError: the first value isn't good or the last isn't bad.
    """
    answers = dict(known)

    def answer(value: str) -> str:
        if value not in answers:
            answers[value] = ask(value)
        return answers[value].state

    for value, wanted in ((values[0], "good"), (values[-1], "bad")):
        if answer(value) != wanted:
            because = f": {answers[value].reason}" if answers[value].reason else ""
            word = "its state is unknown" if answers[value].state == "unknown" else f"it is {answers[value].state}"
            raise MatrixError(f"{value} should be {wanted}, but {word}{because}")
    bad = next(index for index, value in enumerate(values) if value in answers and answers[value].state == "bad")
    good = max(i for i, value in enumerate(values[:bad]) if value in answers and answers[value].state == "good")
    while True:
        open_ = [i for i in range(good + 1, bad) if values[i] not in answers or answers[values[i]].state != "unknown"]
        if not open_:
            return Found(values[good], values[bad], tuple(values[good + 1 : bad]))
        middle = min(open_, key=lambda index: abs(2 * index - good - bad))
        if (state := answer(values[middle])) == "good":
            good = middle
        elif state == "bad":
            bad = middle


class _Asking:
    """Gets answers by running cells, all in one run of the store, which is created with the first of them."""

    def __init__(self, options: argparse.Namespace, axes: Axes, store: Store, cells: Mapping[str, Cell]) -> None:
        self.options, self.axes, self.store, self.cells = options, axes, store, cells
        self.revision = revision(axes.folder)
        self.ran = 0
        self._run: str | None = None

    def known(self) -> dict[str, Answer]:
        """The answers in the store."""
        found = {}
        for value, cell in self.cells.items():
            past = (_judged(self.options, result) for result in self._stored(cell))
            answer = next((one for one in past if one.state != "unknown"), None)
            if answer is not None:
                found[value] = answer
                self._say(value, answer, "known")
        for value, later in pairwise(found):
            if (found[value].state, found[later].state) == ("bad", "good"):
                print(f"{value} is bad and {later} is good again: the search is for the first change to bad")
        return found

    def __call__(self, value: str) -> Answer:
        job = self._job(self.cells[value])
        if self._run is None:
            label = f"bisect {self.options.test or self.options.seam}"
            self._run = new_run(self.options, self.store, self.axes, [], label=label, partial=True)
        executor = runner.Local(1, gpus.visible(), fork=False)
        with Progress(1, 1, Console(stderr=True)) as progress:
            runner.execute(self._run, [job], self.store, executor, progress)
        self.ran += 1
        answer = _judged(self.options, self.store.result(self._run, job.cell, job.attempt))
        self._say(value, answer, "run")
        return answer

    def _job(self, cell: Cell) -> Job:
        (job,) = jobs_of(self.options, self.axes, [cell], {})
        if self.options.seam:
            command = ["python", "-c", _REPORT]
        elif job.tests.command[0] == "pytest":
            command = ["pytest", self.options.test]
        else:
            raise MatrixError(f"{cell} runs {job.tests.command[0]}, and --test needs pytest")
        return replace(job, tests=job.tests.model_copy(update={"command": command}), known=())

    def _stored(self, cell: Cell) -> Iterator[CellResult]:
        """The earlier results of this cell for the same commit and pins, newest first."""
        if not self.revision or self.revision.endswith("+"):  # uncommitted code
            return
        pins: str | None = None
        for run, summary in self.store.history(cell):
            if run.revision != self.revision:
                continue
            if pins is None:
                pins = self._job(cell).pins
            result = self.store.result(run.id, cell, summary.attempt)
            if result.pins == pins:
                yield result

    def _say(self, value: str, answer: Answer, how: str) -> None:
        because = f": {answer.reason}" if answer.reason else ""
        print(f"{self.options.axis} {value} is {answer.state} ({how}){because}")


def _judged(options: argparse.Namespace, result: CellResult) -> Answer:
    return _of_test(options.test, result) if options.test else _of_shim(options.seam, result)


def _of_test(nodeid: str, result: CellResult) -> Answer:
    below = (f"{nodeid}[", f"{nodeid}::")
    found = [one for one in result.tests if one.nodeid == nodeid or one.nodeid.startswith(below)]
    if any(one.bad or one.outcome == "known" for one in found):
        return Answer("bad", result.reason)
    if any(one.outcome != "skipped" for one in found):
        return Answer("good")
    if found:
        return Answer("unknown", f"skipped: {found[0].message}")
    if result.kind in ("installation", "hardware"):
        return Answer("unknown", result.reason)
    missing = _MISSING.search(result.log) and not re.search(r"\b\d+ errors? in \d", result.log)
    if missing or result.reason == NO_TEST or result.command[:2] != ("pytest", nodeid):
        return Answer("unknown", "it has no such test")
    # Without a kind of failure nothing is said about the test; any other ended the cell before the test could begin.
    return Answer("bad" if result.kind else "unknown", result.reason)


def _of_shim(name: str, result: CellResult) -> Answer:
    shims = result.environment.get("shims")
    if shims is None:
        return Answer("unknown", result.reason or "the library reported nothing")
    if name not in shims:
        raise MatrixError(f"{result.cell} has no shim {name!r}: {', '.join(shims) or 'none at all'}")
    state, reason = shims[name]["state"], shims[name]["reason"]
    return Answer("good") if state == "applied" else Answer("bad", f"{state}: {reason}")
