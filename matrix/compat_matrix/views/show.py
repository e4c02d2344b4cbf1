"""``kernel-compat-matrix show``: show a run as a grid."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ..cells import Cell
from ..errors import MatrixError
from ..results import Figure
from ..store import Summary
from ..words import plural
from . import common, trend


def run(arguments: argparse.Namespace) -> int:
    """Print the grid of a run; returns the exit code."""
    with common.open_store(arguments.store) as store:
        name = store.resolve(arguments.chosen)
        parts, summary = store.parts(name), store.summary(name, brief=not arguments.json)
        figures = store.figures(name) if arguments.json or arguments.figure is not None else {}
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
    chosen = {}
    if arguments.figure is not None:
        chosen = _chosen(arguments.figure, name, figures)
        better = next(iter(chosen.values())).better
        lines.append(common.Line(f"{common.one_line(arguments.figure)}{trend.direction(better)}", "bold"))
    grids = [line for block in _blocks(summary) for line in _grid(block, chosen, common.width())]
    lines += grids
    if arguments.figure is None:
        lines += _reasons(summary)
    if grids:
        lines.append(common.Line())
        lines.append(
            common.Line(
                "ok: passed, flaky: passed when repeated, known: fails for known issues, CAPITALS: how it failed, "
                "open: no result yet, -: excluded",
                "dim",
            )
        )
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


def _blocks(summary: Mapping[Cell, Summary]) -> list[list[tuple[Cell, Summary]]]:
    """The cells grouped by Python, FlashAttention, device and own axes, in order; without groups whose cells are all excluded."""
    grouped: dict[tuple[str, common.Kind], list[tuple[Cell, Summary]]] = {}
    for cell, one in summary.items():
        grouped.setdefault((cell.python, common.kind(cell)), []).append((cell, one))
    order = sorted(grouped, key=lambda key: (common.version_key(key[0]), common.kernel_place(key[1])))
    return [grouped[key] for key in order if any(one.state != "excluded" for _, one in grouped[key])]


def _grid(block: Sequence[tuple[Cell, Summary]], figures: Mapping[Cell, Figure], width: int) -> Iterator[common.Line]:
    """The lines of a block, split into parts below each other if the terminal is too narrow for its columns.

    Args:
        figures: the figure that is shown, of the cells that have it.
    """
    first, _ = block[0]
    exist = [cell for cell, one in block if one.state != "excluded"]
    rows = common.by_version(cell.transformers for cell in exist)
    columns = common.by_version(cell.torch for cell in exist)
    shown = {(cell.transformers, cell.torch): common.look(one) for cell, one in block}
    if figures:
        shown = {place: (word, "dim") for place, (word, _) in shown.items()}
        own = ((cell, figures[cell]) for cell in exist if cell in figures)
        shown |= {(cell.transformers, cell.torch): (trend.number(one.value, one.unit), "") for cell, one in own}
    names = [f"torch {column or '-'}" for column in columns]
    head = max(len("transformers"), *map(len, rows))
    each = max(*map(len, names), *(len(text) for text, _ in {*shown.values()}))
    fit = max(1, (width - head) // (each + 2))
    yield common.Line()
    yield common.Line(f"Python {first.python}, {common.kernel_name(*common.kind(first))}", "bold")
    for at in range(0, len(columns), fit):
        yield common.Line("  ".join([f"{text:{each}}" for text in [f"{'transformers':{head}}", *names[at : at + fit]]]))
        for row in rows:
            line = common.Line(f"{row or '-':{head}}")
            found = (shown.get((row, column), ("", "")) for column in columns[at : at + fit])
            line.parts += [part for text, style in found for part in (("  ", ""), (f"{text:{each}}", style))]
            yield line


def _reasons(summary: Mapping[Cell, Summary]) -> Iterator[common.Line]:
    """The reasons of failures, known ones and flaky tests included, the most frequent first."""
    failed = common.ordered(cell for cell, one in summary.items() if one.state in ("failed", "known", "flaky"))
    why = {
        cell: (common.look(summary[cell])[0].split(" ")[0], common.one_line(summary[cell].reason)) for cell in failed
    }
    counts = Counter(why.values())
    example = {reason: cell for cell, reason in reversed(why.items())}
    if counts:
        yield common.Line()
        yield common.Line("why", "bold")
    for reason, count in counts.most_common(10):
        kind, said = reason
        yield (
            common.Line(f"{count:5}  ")
            .add(kind, common.look(summary[example[reason]])[1])
            .add(f"  {said}  (such as {example[reason]})")
        )
    if len(counts) > 10:
        yield common.Line(f"{plural(len(counts) - 10, 'more reason')}: --json has them")
