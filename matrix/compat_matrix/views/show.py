"""``kernel-compat-matrix show``: show a run as a grid."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice

from ..cells import Cell, many
from ..store import Summary
from . import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "chosen", metavar="RUN", nargs="?", default="latest", help="a run: an id, a label, latest~1 (default: latest)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the grid of a run; returns the exit code."""
    with common.open_store(arguments.store) as store:
        name = store.resolve(arguments.chosen)
        found, summary = store.run(name), store.summary(name)
    if arguments.json:
        cells = [common.summary_as_json(cell, summary[cell]) for cell in common.ordered(summary)]
        print(json.dumps({"run": common.as_json(found), "cells": cells}, indent=2))
        return 0
    lines = [
        common.Line(
            f"run {common.named(found)}, {common.one_line(found.state)}, begun {common.moment(found.started)}", "bold"
        ),
        common.Line(f"{many(len(summary), 'cell')}: {common.counted(one.state for one in summary.values())}"),
    ]
    blocks = common.blocks(summary)
    for block in blocks:
        lines += _grid(block, summary, common.width())
    lines += _reasons(summary)
    if blocks:
        lines += [
            common.Line(),
            common.Line("ok: passed, CAPITALS: how it failed, open: no result yet, -: excluded", "dim"),
        ]
    common.show(lines)
    return 0


def _grid(block: common.Block, summary: Mapping[Cell, Summary], width: int) -> Iterator[common.Line]:
    """The lines of a block, split into parts below each other if the terminal is too narrow for its columns."""
    first = max(len("transformers"), *map(len, block.rows))
    each = max(
        *(len(f"torch {column}") for column in block.columns),
        *(len(common.word(summary[cell])) for cell in block.cells.values()),
    )
    fit = max(1, (width - first) // (each + 2))
    columns = iter(block.columns)
    yield common.Line()
    yield common.Line(block.title, "bold")
    while part := [*islice(columns, fit)]:
        yield common.Line(
            "  ".join(["transformers".ljust(first), *(f"torch {column}".ljust(each) for column in part)]).rstrip()
        )
        for row in block.rows:
            line = common.Line(row.ljust(first))
            for column in part:
                cell = block.cells.get((row, column))
                shown = summary[cell] if cell else None
                line.add("  ").add(common.word(shown).ljust(each), common.style(shown))
            yield line


def _reasons(summary: Mapping[Cell, Summary]) -> Iterator[common.Line]:
    """The reasons of failures, the most frequent first."""
    failed = [cell for cell in common.ordered(summary) if summary[cell].state == "failed"]
    why = {cell: (common.word(summary[cell]).split(" ")[0], common.one_line(summary[cell].reason)) for cell in failed}
    counts = Counter(why.values())
    example = {reason: cell for cell, reason in reversed(why.items())}
    if counts:
        yield common.Line()
        yield common.Line("why", "bold")
    for reason, count in counts.most_common(10):
        kind, said = reason
        yield (
            common.Line(f"{count:5}  ").add(kind, common.STYLES["failed"]).add(f"  {said}  (such as {example[reason]})")
        )
    if len(counts) > 10:
        yield common.Line(f"{many(len(counts) - 10, 'more reason')}: --json has them")
