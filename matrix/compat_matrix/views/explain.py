"""``kernel-compat-matrix explain``: show everything that is stored about one cell."""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packaging.utils import canonicalize_name

from ..cells import Cell, parse
from ..errors import MatrixError
from ..results import CellResult, Test
from ..store import Measured, Past, Store
from ..words import plural
from . import common, trend

#: The packages that are shown without `--full`, besides those of own axes.
_TELLING = re.compile(
    r"(python|torch|transformers|triton|kernel.compat.*|flash.attn.*|fa3.fwd|kernels|liger.kernel|nvidia.cutlass.*)"
)

_STATES = ("failed", "applied", "pending", "skipped", "not needed")


def run(arguments: argparse.Namespace) -> int:
    """Print the result and the history of the cell; returns the exit code."""
    cell = parse(arguments.cell)
    with common.open_store(arguments.store) as store:
        history = store.history(cell)
        measured = store.measured(cell=cell).get(cell, [])
        run = store.resolve(arguments.chosen) if arguments.chosen else newest(history)
        lines = [*_explained(store, cell, run, history, arguments)] if run else [*_without(store, cell)]
    lines += common.section("figures", common.aligned(figures(measured)))
    common.show([*lines, *common.section("history", _history(history))])
    return 0


def newest(history: Sequence[Past]) -> str | None:
    """The run with a cell's newest verdict; a partial run, or one on a machine that lacked something, if there is no other."""
    ran = [past for past in history if past.summary.state != "not run"]
    whole = [past for past in ran if not past.run.partial]
    return next((past.run.id for past in [*whole, *ran, *history]), None)


def counting(history: Sequence[Past]) -> Past | None:
    """The result that counts of a cell's results in the parts of a run, which are in the order of `Store.history`."""
    latest = {past.run.id: past for past in reversed(history)}
    return min(reversed(latest.values()), key=lambda past: past.summary.rank, default=None)


def _without(store: Store, cell: Cell) -> Iterator[common.Line]:
    """The output for a cell without a result in any run."""
    planned = store.current().get(cell)
    if planned is None:
        raise MatrixError(f"the store {store.name} has no cell {cell}: no run has planned it")
    yield common.Line(f"{cell}: ", "bold").add(*_state(planned))
    if planned.summary.reason:
        yield common.Line(common.clean(planned.summary.reason))
    yield common.Line(f"run        {common.named(planned.run)}")
    if planned.summary.state != "excluded":
        yield common.Line(f"run it     {common.reproduce(cell, planned.run)}")


def _explained(
    store: Store, cell: Cell, run: str, history: Sequence[Past], arguments: argparse.Namespace
) -> Iterator[common.Line]:
    parts = {part.id for part in store.parts(run)}
    past = counting([past for past in history if past.run.id in parts])
    if past is None:
        raise MatrixError(f"the run {run} has no result of {cell}")
    found = store.result(past.run.id, cell, past.summary.attempt)
    yield common.Line(f"{cell}: ", "bold").add(*_state(past))
    if found.reason:
        yield common.Line(common.clean(found.reason))
    attempt = f", attempt {found.attempt}" if found.attempt > 1 else ""
    took = common.duration(found.seconds)
    yield common.Line(f"run        {common.named(past.run)}, {common.moment(found.started)}, {took}{attempt}")
    yield common.Line(f"tests      {common.counted(test.outcome for test in found.tests)}")
    yield common.Line(f"run again  {common.reproduce(cell, past.run)}")
    if found.command:
        yield common.Line(f"which ran  {common.one_line(shlex.join(found.command), 10_000 if arguments.full else 160)}")
    yield from _tests(found, arguments.full)
    yield from _environment(found.cell, found.environment, arguments.full)
    yield from _shims(found.environment.get("shims", {}))
    if arguments.pins:
        yield from common.section("pins", common.clean(found.pins).splitlines() or ["none"])
    if arguments.full:
        yield from common.section("log", common.clean(found.log).splitlines() or ["empty"])
    elif found.verdict == "failed" and not _bad(found):
        yield from common.section(
            "the end of the log (--full has all of it)", common.clean(found.log).splitlines()[-15:]
        )


def _tests(found: CellResult, full: bool) -> Iterator[common.Line]:
    for test in [*_bad(found), *(test for test in found.tests if test.outcome in ("known", "flaky"))]:
        yield common.Line()
        state = "failed" if test.bad else test.outcome
        shown = common.one_line(test.nodeid, 1000)
        yield common.Line(shown if test.bad else f"{shown} ({state})", common.STYLES[state])
        lines = common.clean(test.message).splitlines()
        yield from (common.Line(f"    {line}") for line in (lines if full else _shortened(lines)))


def _bad(found: CellResult) -> list[Test]:
    return [test for test in found.tests if test.bad]


def error_lines(lines: Sequence[str], most: int = 8) -> list[str]:
    """The error lines of a pytest report; the last lines of any other text."""
    errors = [line for line in lines if line.startswith("E ")]
    return errors[:most] or [line for line in lines if line.strip()][-most:]


def _shortened(lines: Sequence[str]) -> list[str]:
    kept = error_lines(lines)
    return kept if len(kept) == len(lines) else [*kept, f"({plural(len(lines) - len(kept), 'more line')}: --full)"]


def _environment(cell: Cell, environment: Mapping[str, Any], full: bool) -> list[common.Line]:
    packages = {name: v for name, v in environment.get("packages", {}).items() if full or matters(name, cell)}
    lines = [f"{name}: {value}" for name, value in facts(environment).items()]
    lines += [f"{name} {version}" for name, version in packages.items()]
    return common.section("environment", [common.one_line(line, 1000) for line in lines])


def matters(package: str, cell: Cell) -> bool:
    """Whether the version of a package in a cell is shown among the few that matter most."""
    own = {canonicalize_name(axis) for axis, _ in cell.extra}
    return _TELLING.fullmatch(package) is not None or canonicalize_name(package) in own


def facts(environment: Mapping[str, Any]) -> dict[str, str]:
    """The environment that a cell reported, without packages and shims."""
    texts = {
        name: "; ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in environment.items()
        if name not in ("packages", "shims")
    }
    return {name: common.clean(value) for name, value in texts.items() if value}


def shims(found: Mapping[str, Any]) -> list[tuple[str, str, str, list[str]]]:
    """The name, state, reason and seams of every shim, the most relevant first."""
    entries = [
        (str(name), str(shim.get("state", "")), str(shim.get("reason", "")), [*map(str, shim.get("seams", []))])
        for name, shim in found.items()
    ]
    place = {state: number for number, state in enumerate(_STATES)}
    return sorted(entries, key=lambda entry: (place.get(entry[1], len(place)), entry[0]))


def _shims(found: Mapping[str, Any]) -> list[common.Line]:
    return common.section("shims", common.aligned([tuple(map(common.clean, one[:3])) for one in shims(found)]))


def figures(measured: Sequence[Measured]) -> list[tuple[str, str, str, str]]:
    """The name, the sparkline, the last value and the trend of each figure of a cell."""
    newest = {one.figure.name: one for one in measured}
    rows = []
    for name, last in sorted(newest.items()):
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
    if expected and level.outside:
        return (
            f"{trend.changed(expected.usual, last.value, last.better)} than usual, "
            f"{trend.number(expected.low)} to {trend.number(expected.high, last.unit)}"
        )
    if level.before:
        before, usual = (statistics.fmean(some[-trend.MOST :]) for some in (level.before, level.values))
        return f"{trend.changed(before, usual, last.better)} since {common.named(series[level.first].run)}"
    if expected is None:
        return f"too few results to know its noise: {len(values)} of {trend.LEAST}"
    return f"as usual, {trend.number(expected.low)} to {trend.number(expected.high, last.unit)}"


def _history(history: Sequence[Past]) -> Iterator[common.Line]:
    for past in history:
        line = common.Line(f"    {common.moment(past.summary.started)}  {past.run.id}  ").add(*_state(past))
        yield line.add(f"  {common.one_line(past.summary.reason, 100)}" if past.summary.reason else "")


def _state(past: Past) -> tuple[str, str]:
    word, style = common.look(past.summary)
    state = past.summary.state
    return f"failed, {word}" if state == "failed" else state, style
