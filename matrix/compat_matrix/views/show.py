"""``kernel-compat-matrix show``: show a run as a grid."""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.text import Span, Text

from ..cells import Cell
from ..errors import MatrixError
from ..results import Figure
from ..store import Past, Store, Summary
from ..words import plural
from . import common, lost, trend
from .facts import MeasuredCell, ShownRun, as_json

_LEGEND = (
    "ok: passed, flaky: passed when repeated, known: fails for known issues, CAPITALS: how it failed, "
    "open: no result yet, -: excluded"
)


def run(arguments: argparse.Namespace) -> int:
    """Print the grid of a run; returns the exit code."""
    with Store.open(arguments.store, create=False) as store:
        name = store.resolve(arguments.chosen)
        parts, summary = store.parts(name), store.summary(name, brief=not arguments.json)
        gone = lost.tests(store, name) if arguments.json or arguments.figure is None else []
        figures = store.figures(name) if arguments.json or arguments.figure is not None else {}
    found = common.whole(parts)
    if arguments.json:
        every = [Past(cell, found, summary[cell]) for cell in common.ordered(summary)]
        cells = [MeasuredCell.of(one, figures=figures.get(one.cell, [])) for one in every]
        print(as_json(ShownRun(run=found, parts=parts, cells=cells, lost=gone), indent=2))
        return 0
    state = common.one_line(found.state) + (f", in {len(parts)} parts" if len(parts) > 1 else "")
    counts = common.counted(one.state for one in summary.values())
    lines = [
        Text(f"run {common.named(found)}, {state}, begun {common.moment(found.started)}", "bold"),
        Text(f"{plural(len(summary), 'cell')}: {counts}"),
    ]
    looks = {cell: common.look(one) for cell, one in summary.items()}
    if arguments.figure is not None:
        chosen = _chosen(arguments.figure, name, figures)
        better = next(iter(chosen.values())).better
        lines.append(Text(f"{common.one_line(arguments.figure)}{trend.direction(better)}", "bold"))
        looks = {cell: (word, "dim") for cell, (word, _) in looks.items()}
        looks |= {cell: (trend.number(one.value, one.unit), "") for cell, one in chosen.items()}
    grids = [*_grids(looks)]
    reasons = [*_reasons(summary, looks)] if arguments.figure is None else []
    common.show([*lines, *grids, *reasons, *lost.lines(gone), *([Text(), Text(_LEGEND, "dim")] if grids else [])])
    return 0


def _chosen(name: str, run: str, figures: Mapping[Cell, Sequence[Figure]]) -> dict[Cell, Figure]:
    """The figure of each cell that has it. A `MatrixError` if none has."""
    chosen = {cell: one for cell, some in figures.items() for one in some if one.name == name}
    if not chosen:
        there = sorted({common.one_line(one.name) for some in figures.values() for one in some})
        names = f"it has {', '.join(there)}" if there else "it has none"
        raise MatrixError(f"the run {run} has no figure {name!r}: {names}")
    return chosen


def _grids(looks: Mapping[Cell, tuple[str, str]]) -> Iterator[Text]:
    """The lines of the tables, each split into parts below each other if the terminal is too narrow for its columns."""
    width = Console().width if sys.stdout.isatty() else 100_000
    for title, columns, rows in common.blocks(looks, lambda look: look[0] != "-"):
        names = [f"torch {column or '-'}" for column in columns]
        table = [(release, [look or ("", "") for look in some]) for release, some in rows]
        head = max(len("transformers"), *(len(release) for release, _ in rows))
        each = max(*map(len, names), *(len(text) for _, cells in table for text, _ in cells))
        fit = max(1, (width - head) // (each + 2))
        yield from (Text(), Text(title, "bold"))
        for at in range(0, len(columns), fit):
            yield Text("  ".join(f"{text:{each}}" for text in [f"{'transformers':{head}}", *names[at : at + fit]]))
            for release, cells in table:
                some = cells[at : at + fit]
                words = "  ".join([f"{release or '-':{head}}", *(f"{text:{each}}" for text, _ in some)])
                begins = range(head + 2, len(words), each + 2)
                styles = zip(begins, some, strict=True)
                yield Text(words, spans=[Span(begin, begin + each, style) for begin, (_, style) in styles])


def _reasons(summary: Mapping[Cell, Summary], looks: Mapping[Cell, tuple[str, str]]) -> Iterator[Text]:
    """The reasons of failures, known ones and flaky tests included, the most frequent first."""
    failed = common.ordered(cell for cell, one in summary.items() if one.state in ("failed", "known", "flaky"))
    why = {cell: (looks[cell][0].split(" ")[0], common.one_line(summary[cell].reason)) for cell in failed}
    counts = Counter(why.values())
    example = {reason: cell for cell, reason in reversed(why.items())}
    if counts:
        yield from (Text(), Text("why", "bold"))
    for (kind, said), count in counts.most_common(10):
        such = example[kind, said]
        yield Text.assemble(f"{count:5}  ", (kind, looks[such][1]), f"  {said}  (such as {such})")
    if len(counts) > 10:
        yield Text(f"{plural(len(counts) - 10, 'more reason')}: --json has them")
