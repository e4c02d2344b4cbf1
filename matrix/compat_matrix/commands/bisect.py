"""``kernel-compat-matrix bisect``: find the first release that broke a test or a shim, running as few cells as possible."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal, NamedTuple

from rich.console import Console

from .. import gpus, runner
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

#: pytest's output for a test that doesn't exist. It also prints this if the test's file has an error.
_MISSING = re.compile(r"^ERROR: (?:(?:file or directory )?not found|found no collectors for)\b", re.MULTILINE)


class Answer(NamedTuple):
    """The state of a cell; ``unknown`` for a skipped or missing test, or if the cell can't be installed."""

    state: Literal["good", "bad", "unknown"]
    reason: str = ""


def run(options: argparse.Namespace) -> int:
    """Search, and print the first bad release and the last good one; returns the exit code."""
    if bool(options.test) == bool(options.seam):
        raise MatrixError("either --test or --seam is needed")
    axes, axis, what = axes_of(options), options.axis, options.test or options.seam
    cells = line(cells_of(options, axes), axis, options.good, options.bad)
    runs: list[str] = []

    def say(value: str, answer: Answer, how: str) -> None:
        print(f"{axis} {value} is {answer.state} ({how}){f': {answer.reason}' if answer.reason else ''}")

    with Store.open(options.store) as store:

        def ask(value: str) -> Answer:
            job = _job(options, axes, cells[value])
            runs.append(runs[0] if runs else new_run(options, store, axes, [], label=f"bisect {what}", partial=True))
            executor = runner.Local(1, gpus.visible())
            with Progress(1, 1, Console(stderr=True)) as progress:
                runner.execute(runs[0], [job], store, executor, progress)
            answer = _judged(options, store.result(runs[0], job.cell, job.attempt))
            say(value, answer, "run")
            return answer

        known = _known(options, axes, store, cells)
        for value, answer in known.items():
            say(value, answer, "known")
        for value, later in pairwise(known):
            if (known[value].state, known[later].state) == ("bad", "good"):
                print(f"{value} is bad and {later} is good again: the search is for the first change to bad")
        good, *between, bad = search([*cells], ask, known)
    names = " or ".join(filter(None, [", ".join(between[:-1]), *between[-1:]]))
    broke = f", or {names}, whose state is unknown, broke" if between else " is the first that broke"
    print(f"{axis} {bad}{broke} {what}; {good} is good")
    print(f"{plural(len(runs), 'cell')} run, {len(known)} known")
    return 0


def line(cells: Sequence[Cell], axis: str, good: str | None, bad: str | None) -> dict[str, Cell]:
    """The cells from the good value of an axis to the bad one, by value, oldest first.

    Raises:
        MatrixError: they differ on other axes too, or a value doesn't exist, or the good one isn't older.
    """
    releases = [name for name, values in values_of(cells).items() if values and all(map(is_release, values))]
    if axis not in releases:
        raise MatrixError(f"--axis is one of {', '.join(releases)}, not {axis!r}")
    found = {cell.axes[axis]: cell for cell in cells if axis in cell.axes}
    for other in values_of(cells):
        values = list(dict.fromkeys(cell.axes.get(other, "none") for cell in cells if axis in cell.axes))
        if other != axis and len(values) > 1:
            said = f"{', '.join(values[:8])}{' ...' if len(values) > 8 else ''}"
            raise MatrixError(f"several values of {other} are selected; choose one with --only: {said}")
    every = sorted(found, key=release)
    first, last = good or every[0], bad or every[-1]
    for value in (first, last):
        if value not in found:
            raise MatrixError(f"{axis} {value} isn't selected; the selected values are {', '.join(every)}")
    line = every[every.index(first) : every.index(last) + 1]
    if len(line) < 2:
        raise MatrixError(f"the good {axis} must be older than the bad one, and {first} isn't older than {last}")
    return {value: found[value] for value in line}


def search(values: Sequence[str], ask: Callable[[str], Answer], known: Mapping[str, Answer]) -> list[str]:
    """Find where good becomes bad, with as few calls of `ask` as possible.

    Args:
        values: in order; the first must be good and the last bad, which is checked first.
        known: answers that are known already, none of them ``unknown``.

    Returns:
        The last good value, the ones behind it whose state is unknown, and the first value known to be bad.

    Raises:
        MatrixError: the first value isn't good or the last isn't bad.
    """
    answers = dict(known)
    for value, wanted in ((values[0], "good"), (values[-1], "bad")):
        answers[value] = found = answers.get(value) or ask(value)
        if found.state != wanted:
            word = "its state is unknown" if found.state == "unknown" else f"it is {found.state}"
            raise MatrixError(f"{value} should be {wanted}, but {word}{f': {found.reason}' if found.reason else ''}")
    states = [answers[value].state if value in answers else None for value in values]
    bad = states.index("bad")
    good = max(index for index in range(bad) if states[index] == "good")
    while untried := [index for index in range(good + 1, bad) if states[index] is None]:
        middle = min(untried, key=lambda index: abs(2 * index - good - bad))
        states[middle] = ask(values[middle]).state
        if states[middle] == "good":
            good = middle
        elif states[middle] == "bad":
            bad = middle
    return [*values[good : bad + 1]]


def _known(options: argparse.Namespace, axes: Axes, store: Store, cells: Mapping[str, Cell]) -> dict[str, Answer]:
    """The answers that the newest results of the same commit and pins give, by value."""
    here = revision(axes.folder)
    if not here or here.endswith("+"):  # uncommitted code
        return {}
    found: dict[str, Answer] = {}
    for value, cell in cells.items():
        past = [(run.id, summary.attempt) for run, summary in store.history(cell) if run.revision == here]
        pins = _job(options, axes, cell).pins if past else ""
        for run, attempt in past:
            result = store.result(run, cell, attempt)
            if result.pins == pins and (answer := _judged(options, result)).state != "unknown":
                found[value] = answer
                break
    return found


def _job(options: argparse.Namespace, axes: Axes, cell: Cell) -> Job:
    (job,) = jobs_of(options, axes, [cell], {})
    if options.seam:
        command = ["python", "-c", _REPORT]
    elif job.tests.command[0] == "pytest":
        command = ["pytest", options.test]
    else:
        raise MatrixError(f"{cell} runs {job.tests.command[0]}, and --test needs pytest")
    return replace(job, tests=job.tests.model_copy(update={"command": command}), known=())


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
    missing = result.reason.startswith("its command ended with") and _MISSING.search(result.log)
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
