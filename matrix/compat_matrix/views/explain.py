"""``kernel-compat-matrix explain``: show everything that is stored about one cell."""

import argparse
import re
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from packaging.utils import canonicalize_name
from pydantic import ValidationError
from rich.text import Text

from ..cells import Cell, parse
from ..errors import NotFoundError
from ..results import CellResult, Test
from ..store import Measured, Past, Store
from ..words import clean, plural
from . import common, trend
from .facts import Shim

#: The packages that are shown without `--full`, besides those of own axes.
_TELLING = re.compile(
    r"(python|torch|transformers|triton|kernel.compat.*|flash.attn.*|fa3.fwd|kernels|liger.kernel|nvidia.cutlass.*)"
)

_STATES = ("failed", "applied", "pending", "skipped", "not needed")


def run(arguments: argparse.Namespace) -> int:
    """Print the result and the history of the cell; returns the exit code."""
    cell = parse(arguments.cell)
    with Store.open(arguments.store, create=False) as store:
        run = store.resolve(arguments.chosen) if arguments.chosen else ""
        past = past_of(store, cell, run) or (None if run else plan_of(store, cell))
        if past is None:
            raise _absent(store, cell, run)
        lines = [*_explained(store, past, arguments.full)]
        lines += common.section("figures", common.aligned(figures(store.series(cell))))
        history = store.history(cell)
    common.show([*lines, *common.section("history", map(_past, history))])
    return 0


def _absent(store: Store, cell: Cell, run: str) -> NotFoundError:
    """The error for a cell without a result in a run, or in any."""
    if run:
        return NotFoundError(f"the run {run} has no result of {cell}")
    if plans := store.plans(cell):  # no whole run has planned it: it would be the newest
        return NotFoundError(
            f"the store {store.name} has no result of {cell}: only {plans[0]}, a partial run, has planned it"
        )
    return NotFoundError(f"the store {store.name} has no cell {cell}: no run has planned it")


def plan_of(store: Store, cell: Cell) -> Past | None:
    """The newest result of a cell in whole runs, or else its newest plan."""
    return next(iter(store.newest(cell=cell)), None)


def past_of(store: Store, cell: Cell, run: str = "", attempt: int | None = None) -> Past | None:
    """A result of a cell, as `Store.past`, by default the newest in whole runs, or else in partial ones."""
    if not run:
        newest = plan_of(store, cell)
        if newest is None or newest.summary.verdict is None:
            newest = next(iter(store.history(cell, limit=1)), None)
        elif attempt is None:
            return newest
        run = newest.run.id if newest else ""
    return store.past(run, cell, attempt)


def _explained(store: Store, past: Past, full: bool) -> Iterator[Text]:
    cell = past.cell
    yield Text.assemble((f"{cell}: ", "bold"), _word(past))
    if past.summary.reason:
        yield Text(clean(past.summary.reason))
    if past.summary.verdict is None:
        yield Text(f"run        {common.named(past.run)}")
        if not past.summary.excluded:
            yield Text(f"run it     {common.reproduce(cell, past.run)}")
        return
    found = store.result(past.run.id, cell, past.summary.attempt)
    took = common.duration(found.seconds) + (f", attempt {found.attempt}" if found.attempt > 1 else "")
    yield Text(f"run        {common.named(past.run)}, {common.moment(found.started)}, {took}")
    yield Text(f"tests      {common.counted(test.outcome for test in found.tests)}")
    yield Text(f"run again  {common.reproduce(cell, past.run)}")
    if found.command:
        yield Text(f"which ran  {common.one_line(shlex.join(found.command), 10_000 if full else 160)}")
    yield from _tests(found, full)
    packages = packages_of(found).items() if full else installed(found).items()
    environment = [f"{name}: {value}" for name, value in facts(found.environment).items()]
    environment += [f"{name} {version}" for name, version in packages]
    yield from common.section("environment", [common.one_line(line, 1000) for line in environment])
    rows = [[*map(clean, (one.name, one.state, one.reason))] for one in shims(found.environment)]
    yield from common.section("shims", common.aligned(rows))
    log = clean(found.log).splitlines()
    if full:
        yield from common.section("pins", clean(found.pins).splitlines() or ["none"])
        yield from common.section("log", log or ["empty"])
    elif found.verdict == "failed" and not any(test.bad for test in found.tests):
        yield from common.section("the end of the log (--full has all of it)", log[-15:])


def _word(past: Past) -> tuple[str, str]:
    word, style = common.look(past.summary)
    state = past.summary.state
    return f"failed, {word}" if state == "failed" else state, style


def _past(past: Past) -> Text:
    reason = f"  {common.one_line(past.summary.reason, 100)}" if past.summary.reason else ""
    return Text.assemble(f"    {common.moment(past.summary.started)}  {past.run.id}  ", _word(past), reason)


def _tests(found: CellResult, full: bool) -> Iterator[Text]:
    shown = [test for test in found.tests if test.bad or test.outcome in ("known", "flaky")]
    shown.sort(key=lambda test: not test.bad)
    for kept, (first, *others) in [(_report(test), [test]) for test in shown] if full else alike(shown):
        title = common.one_line(first.nodeid, 1000) + ("" if first.bad else f" ({first.outcome})")
        more = f"and {plural(len(others), 'more test')} with the same error" if others else ""
        yield from (Text(), Text(title, common.STYLES[first.outcome]), *([Text(f"    {more}")] if more else ()))
        yield from (Text(f"    {line}") for line in kept)
        if left := len(_report(first)) - len(kept):
            yield Text(f"    ({plural(left, 'more line')}: --full)")


def alike(tests: Iterable[Test]) -> list[tuple[list[str], list[Test]]]:
    """The error lines of tests, each with the tests of one outcome that have them."""
    groups: dict[tuple[str, ...], list[Test]] = {}
    for test in tests:
        groups.setdefault((test.outcome, *error_lines(_report(test))), []).append(test)
    return [([*lines], some) for (_, *lines), some in groups.items()]


def _report(test: Test) -> list[str]:
    return clean(test.message).splitlines()


def error_lines(lines: Sequence[str], most: int = 8) -> list[str]:
    """The error lines of a pytest report; the last lines of any other text."""
    errors = [line for line in lines if line.startswith("E ")]
    return errors[:most] or [line for line in lines if line.strip()][-most:]


def packages_of(found: CellResult) -> dict[str, str]:
    """The versions of packages that a cell reports; those of its pins if it died before."""
    packages = found.environment.get("packages")
    if isinstance(packages, Mapping) and packages:
        return {str(name): str(version) for name, version in packages.items()}
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", found.pins, re.MULTILINE))


def installed(found: CellResult) -> dict[str, str]:
    """The packages whose versions matter most, sorted."""
    own = {canonicalize_name(axis) for axis, _ in found.cell.extra}
    every = sorted(packages_of(found).items())
    return {name: version for name, version in every if _TELLING.fullmatch(name) or canonicalize_name(name) in own}


def facts(environment: Mapping[str, Any]) -> dict[str, str]:
    """The environment that a cell reported, without packages and shims."""
    return {
        name: clean("; ".join(map(str, value)) if isinstance(value, list) else str(value))
        for name, value in environment.items()
        if name not in ("packages", "shims") and value not in ("", [])
    }


def shims(environment: Mapping[str, Any]) -> list[Shim]:
    """The shims that a cell reported, the most relevant first; anything that isn't a shim is left out."""
    entries = environment.get("shims")
    found = []
    for name, shim in entries.items() if isinstance(entries, Mapping) else ():
        with suppress(TypeError, ValidationError):
            found.append(Shim(**{"state": "", "reason": "", "seams": [], **shim, "name": name}))
    return sorted(found, key=lambda shim: ([*_STATES, shim.state].index(shim.state), shim.name))


def figures(measured: Sequence[Measured]) -> list[tuple[str, str, str, str]]:
    """The name, the sparkline, the last value and the trend of each figure of a cell."""
    rows = []
    for name, last in sorted({one.figure.name: one for one in measured}.items()):
        series = trend.comparable(measured, last)
        values = [one.figure.value for one in series]
        value = trend.number(last.figure.value, last.figure.unit) + trend.direction(last.figure.better)
        units = {common.one_line(one.figure.unit) for one in measured if one.figure.name == name}
        others = sorted(units - {common.one_line(last.figure.unit)})
        said = _trend(series, values) + (f"; values in {', '.join(others)} aren't compared" if others else "")
        rows.append((common.one_line(name), trend.sparkline(values[-trend.MOST :]), value, said))
    return rows


def _trend(series: Sequence[Measured], values: Sequence[float]) -> str:
    level, last = trend.level(values), series[-1].figure
    expected = trend.noise(level.values)
    if level.before and not (expected and level.outside):
        before, usual = (statistics.fmean(some[-trend.MOST :]) for some in (level.before, level.values))
        return f"{trend.changed(before, usual, last.better)} since {common.named(series[level.first].run)}"
    if expected is None:
        return f"too few results to know its noise: {len(values)} of {trend.LEAST}"
    than = f"{trend.changed(expected.usual, last.value, last.better)} than" if level.outside else "as"
    return f"{than} usual, {trend.number(expected.low)} to {trend.number(expected.high, last.unit)}"
