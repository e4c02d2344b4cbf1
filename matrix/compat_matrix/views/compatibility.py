"""``kernel-compat-matrix compatibility``: write a Markdown document of the combinations that work, with the shims."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from ..cells import Cell
from ..errors import MatrixError
from ..results import ENDED
from ..store import Past, Store
from . import common
from .explain import shims
from .ranges import Writer, ranges

#: A row is for consecutive or other releases of the first axis with the same answers; within those of the next one.
_ORDER = ("transformers", "python", "torch")


def run(arguments: argparse.Namespace) -> int:
    """Write the document; returns the exit code."""
    with Store.open(arguments.store, create=False) as store:
        runs = arguments.runs and [store.resolve(name) for name in arguments.runs]
        text = document(store, store.current(runs))
    write(arguments.path, text)
    return 0


def write(path: Path, text: str) -> None:
    """Write a document. A `MatrixError` if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MatrixError(f"{path} can't be written: {error.strerror or error}") from error


def document(store: Store, current: Mapping[Cell, Past]) -> str:
    """The document; it depends on nothing but the results."""
    answers = {cell: _answer(store, past) for cell, past in current.items() if past.summary.verdict in ENDED}
    wholes = {current[cell].run.whole for cell in answers}
    runs = sorted((common.whole(store.parts(whole)) for whole in wholes), key=lambda one: (one.started, one.id))
    numbers = {found.id: number for number, found in enumerate(runs, 1)}
    lines = [
        "# Compatibility",
        "",
        "What each combination gave when its tests ran last, and the shims that were applied there. Combinations that gave the",
        "same are one row; `5.0 to 5.4` is every release between that is in the store. Written by `kernel-compat-matrix compatibility`: edits are lost.",
    ]
    for kind in sorted(set(map(common.kind, answers)), key=common.kernel_place):
        lines += ["", f"## {common.kernel_name(*kind)}", ""]
        lines += ["| transformers | torch | Python | | shims | tests passed | run |", "|---|---|---|---|---|---|---|"]
        own = {cell: answer for cell, answer in answers.items() if common.kind(cell) == kind}
        write = Writer(own, current).releases
        for row in ranges(own, _ORDER):
            versions = [write[axis](getattr(row, axis)) for axis in ("transformers", "torch", "python")]
            counts = sorted({current[cell].summary.passed for cell in row.cells})
            passed = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
            named = ", ".join(map(str, sorted({numbers[current[cell].run.whole] for cell in row.cells})))
            lines.append(table_line(*versions, *row.has, passed, named))
    lines += ["", "## Runs", "", "| | run | date | host | revision |", "|---|---|---|---|---|"]
    for one in runs:
        lines.append(table_line(str(numbers[one.id]), one.id, f"{one.started:%Y-%m-%d}", one.host, one.revision))
    return "\n".join(lines) + "\n"


def _answer(store: Store, past: Past) -> tuple[str, str]:
    """What the cells of a row share: whether it works, and the shims."""
    summary = past.summary
    applied = sorted(shim.name for shim in shims(store.environment(past.run.id, past.cell)) if shim.state == "applied")
    how = f"fails: {summary.kind or 'test'}" if summary.verdict == "failed" else summary.verdict
    works = "works" if summary.verdict == "passed" else f"{how}: {common.one_line(summary.reason)}"
    return works, ", ".join(f"`{name}`" for name in applied) or "none"


def table_line(*fields: str) -> str:
    """A row of a Markdown table."""
    shown = (common.one_line(text, 10_000).replace("\\", "\\\\").replace("|", "\\|") for text in fields)
    return f"| {' | '.join(text.replace('<', '&lt;') for text in shown)} |"
