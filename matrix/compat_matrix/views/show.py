"""``kernel-compat-matrix show``: show a run as a grid."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from ..cells import Cell
from ..errors import MatrixError
from ..results import Figure
from ..store import Summary
from ..words import plural
from . import common, trend


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "chosen", metavar="RUN", nargs="?", default="latest", help="a run: an id, a label, latest~1 (default: latest)"
    )
    parser.add_argument("--figure", metavar="NAME", help="show a figure that tests recorded, instead of the states")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the grid of a run; returns the exit code."""
    with common.open_store(arguments.store) as store:
        name = store.resolve(arguments.chosen)
        parts, summary, figures = store.parts(name), store.summary(name), store.figures(name)
    found = common.whole(parts)
    if arguments.json:
        cells = [
            common.summary_as_json(cell, summary[cell]) | {"figures": [one._asdict() for one in figures.get(cell, ())]}
            for cell in common.ordered(summary)
        ]
        run = {"run": common.as_json(found), "parts": [common.as_json(one) for one in parts], "cells": cells}
        print(json.dumps(run, indent=2))
        return 0
    state = common.one_line(found.state) + (f", in {len(parts)} parts" if len(parts) > 1 else "")
    counts = common.counted(one.state for one in summary.values())
    lines = [
        common.Line(f"run {common.named(found)}, {state}, begun {common.moment(found.started)}", "bold"),
        common.Line(f"{plural(len(summary), 'cell')}: {counts}"),
    ]
    words = {cell: (common.word(one), common.style(one)) for cell, one in summary.items()}
    if arguments.figure is not None:
        chosen = _chosen(arguments.figure, name, figures)
        words = {cell: (word, "dim") for cell, (word, _) in words.items()}
        words |= {cell: (trend.number(one.value, one.unit), "") for cell, one in chosen.items()}
        better = next(iter(chosen.values())).better
        lines.append(common.Line(f"{common.one_line(arguments.figure)}{trend.direction(better)}", "bold"))
    blocks = common.blocks(summary)
    for block in blocks:
        lines += _grid(block, words, common.width())
    if arguments.figure is None:
        lines += _reasons(summary)
    if blocks:
        lines += [
            common.Line(),
            common.Line(
                "ok: passed, flaky: passed when repeated, known: fails for known issues, CAPITALS: how it failed, "
                "open: no result yet, -: excluded",
                "dim",
            ),
        ]
    common.show(lines)
    return 0


def _chosen(name: str, run: str, figures: Mapping[Cell, Sequence[Figure]]) -> dict[Cell, Figure]:
    """The figure of each cell that has it.

    Raises:
        MatrixError: no cell has it.
    """
    chosen = {cell: one for cell, some in figures.items() for one in some if one.name == name}
    if not chosen:
        there = sorted({common.one_line(one.name) for some in figures.values() for one in some})
        names = f"it has {', '.join(there)}" if there else "it has none"
        raise MatrixError(f"the run {run} has no figure {name!r}: {names}")
    return chosen


def _grid(block: common.Block, words: Mapping[Cell, tuple[str, str]], width: int) -> Iterator[common.Line]:
    """The lines of a block, split into parts below each other if the terminal is too narrow for its columns.

    Args:
        words: the text of each cell, and its style.
    """
    first = max(len("transformers"), *map(len, block.rows))
    each = max(
        *(len(f"torch {column or '-'}") for column in block.columns),
        *(len(words[cell][0]) for cell in block.cells.values()),
    )
    fit = max(1, (width - first) // (each + 2))
    columns = iter(block.columns)
    yield common.Line()
    yield common.Line(block.title, "bold")
    while part := [*islice(columns, fit)]:
        yield common.Line(
            "  ".join(
                ["transformers".ljust(first), *(f"torch {column or '-'}".ljust(each) for column in part)]
            ).rstrip()
        )
        for row in block.rows:
            line = common.Line((row or "-").ljust(first))
            for column in part:
                cell = block.cells.get((row, column))
                text, style = words[cell] if cell else ("", "")
                line.add("  ").add(text.ljust(each), style)
            yield line


def _reasons(summary: Mapping[Cell, Summary]) -> Iterator[common.Line]:
    """The reasons of failures, known ones and flaky tests included, the most frequent first."""
    failed = common.ordered(cell for cell, one in summary.items() if one.state in ("failed", "known", "flaky"))
    why = {cell: (common.word(summary[cell]).split(" ")[0], common.one_line(summary[cell].reason)) for cell in failed}
    counts = Counter(why.values())
    example = {reason: cell for cell, reason in reversed(why.items())}
    if counts:
        yield common.Line()
        yield common.Line("why", "bold")
    for reason, count in counts.most_common(10):
        kind, said = reason
        yield (
            common.Line(f"{count:5}  ")
            .add(kind, common.style(summary[example[reason]]))
            .add(f"  {said}  (such as {example[reason]})")
        )
    if len(counts) > 10:
        yield common.Line(f"{plural(len(counts) - 10, 'more reason')}: --json has them")
