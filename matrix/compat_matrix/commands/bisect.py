"""``kernel-compat-matrix bisect``: find the first release that broke a test or a shim, running as few cells as possible."""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from rich.console import Console

from .. import runner
from ..axes import load
from ..cells import Cell, values_of
from ..errors import MatrixError
from ..expressions import is_release, release
from ..jobs import jobs_of, new_run
from ..outcomes import NO_TEST
from ..progress import Progress
from ..results import CellResult
from ..store import Store
from ..words import plural

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
    axes, axis, what = load(options.axes), options.axis, options.test or options.seam
    cells = line(axes.select(options.only, options.cells, options.pairwise, options.shard), axis)
    command = ["pytest", options.test] if options.test else ["python", "-c", _REPORT]
    jobs = {}
    for value, job in zip(cells, jobs_of(options, axes, [*cells.values()], {}), strict=True):
        if options.test and job.tests.command[0] != "pytest":
            raise MatrixError(f"{job.cell} runs {job.tests.command[0]}, and --test needs pytest")
        jobs[value] = replace(job, tests=job.tests.model_copy(update={"command": command}), known=())
    with Store.open(options.store) as store:
        run = new_run(options, store, axes, [], label=f"bisect {what}", partial=True)

        def ask(value: str) -> Answer:
            executor = runner.Local(1)
            with Progress(1, 1, Console(stderr=True)) as progress:
                runner.execute(run, [jobs[value]], store, executor, progress)
            result = store.result(run, cells[value])
            answer = _of_test(options.test, result) if options.test else _of_shim(options.seam, result)
            print(f"{axis} {value} is {answer.state}{f': {answer.reason}' if answer.reason else ''}")
            return answer

        good, *between, bad = search([*cells], ask)
        count = plural(len(store.summary(run)), "cell")
    names = " or ".join(filter(None, [", ".join(between[:-1]), *between[-1:]]))
    broke = f", or {names}, whose state is unknown, broke" if between else " is the first that broke"
    print(f"{axis} {bad}{broke} {what}; {good} is good\n{count} run")
    return 0


def line(cells: Sequence[Cell], axis: str) -> dict[str, Cell]:
    """The cells that have an axis of releases, by their values on it, oldest first. On other axes they must be the same."""
    releases = [name for name, values in values_of(cells).items() if values and all(map(is_release, values))]
    if axis not in releases:
        raise MatrixError(f"--axis is one of {', '.join(releases)}, not {axis!r}")
    found = {cell.axes[axis]: cell for cell in cells if axis in cell.axes}
    for other in values_of(cells):
        values = list(dict.fromkeys(cell.axes.get(other, "none") for cell in cells if axis in cell.axes))
        if other != axis and len(values) > 1:
            raise MatrixError(f"several values of {other} are selected; choose one with --only: {', '.join(values)}")
    if len(found) < 2:
        raise MatrixError(f"a search needs two values of {axis} or more: only {', '.join(found)} is selected")
    return {value: found[value] for value in sorted(found, key=release)}


def search(values: Sequence[str], ask: Callable[[str], Answer]) -> list[str]:
    """The last good value, the ones behind it whose state is unknown, and the first bad one, with as few calls as possible.

    Raises:
        MatrixError: the first value isn't good or the last isn't bad.
    """
    for value, wanted in ((values[0], "good"), (values[-1], "bad")):
        state, reason = ask(value)
        if state != wanted:
            word = "its state is unknown" if state == "unknown" else f"it is {state}"
            raise MatrixError(f"{value} should be {wanted}, but {word}{f': {reason}' if reason else ''}")
    good, bad = 0, len(values) - 1
    untried = {*range(1, bad)}
    while there := [index for index in untried if good < index < bad]:
        middle = min(there, key=lambda index: abs(2 * index - good - bad))
        untried.remove(middle)
        state = ask(values[middle]).state
        if state == "good":
            good = middle
        elif state == "bad":
            bad = middle
    return [*values[good : bad + 1]]


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
