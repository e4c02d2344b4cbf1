"""``kernel-compat-matrix compatibility``: write a Markdown document of the combinations that work, with the shims."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from ..cells import Cell
from ..errors import MatrixError
from ..results import ENDED
from ..store import Past, Store
from . import common


class _Answer(NamedTuple):
    """The properties that the cells of a row share."""

    works: str
    shims: tuple[str, ...]


def run(arguments: argparse.Namespace) -> int:
    """Write the document; returns the exit code."""
    with common.open_store(arguments.store) as store:
        runs = arguments.runs and [store.resolve(name) for name in arguments.runs]
        text = document(store, store.current(runs))
    write(arguments.path, text)
    return 0


def write(path: Path, text: str) -> None:
    """Write a document atomically.

    Raises:
        MatrixError: it can't be written.
    """
    if not path.name or path.is_dir():
        raise MatrixError(f"{path} is a folder: name the file to write")
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise MatrixError(f"{path} can't be written: {error.strerror or error}") from error


def document(store: Store, current: Mapping[Cell, Past]) -> str:
    """The document; it depends on nothing but the results."""
    answers = {cell: _answer(store, cell, past) for cell, past in current.items()}
    wholes = {past.run.whole for cell, past in current.items() if answers[cell]}
    runs = sorted((common.whole(store.parts(whole)) for whole in wholes), key=lambda one: (one.started, one.id))
    numbers = {found.id: number for number, found in enumerate(runs, 1)}
    # One order for all tables: a release that is missing in one of them ends the ranges there.
    releases = {axis: Releases(getattr(cell, axis) for cell in current) for axis in ("transformers", "torch", "python")}
    lines = [
        "# Compatibility",
        "",
        "What each combination gave when its tests ran last, and the shims that were applied there. Combinations that gave the",
        "same are one row; `5.0 to 5.4` is every release between that is in the store. Written by `kernel-compat-matrix compatibility`: edits are lost.",
    ]
    for kind in sorted({common.kind(cell) for cell, answer in answers.items() if answer}, key=common.kernel_place):
        own = {cell: answer for cell, answer in answers.items() if answer and common.kind(cell) == kind}
        lines += ["", f"## {common.kernel_name(*kind)}", ""]
        lines += ["| transformers | torch | Python | | shims | tests passed | run |", "|---|---|---|---|---|---|---|"]
        lines += [_line(cells, own, current, numbers, releases) for cells in _rows(own)]
    lines += ["", "## Runs", "", "| | run | date | host | revision |", "|---|---|---|---|---|"]
    for one in runs:
        lines.append(table_line(str(numbers[one.id]), one.id, f"{one.started:%Y-%m-%d}", one.host, one.revision))
    return "\n".join(lines) + "\n"


def _answer(store: Store, cell: Cell, past: Past) -> _Answer | None:
    """The properties of a cell; None if it is excluded or hasn't run."""
    if past.summary.verdict not in ENDED:
        return None
    found = store.environment(past.run.id, cell).get("shims", {})
    applied = tuple(sorted(name for name, shim in found.items() if shim.get("state") == "applied"))
    if past.summary.verdict == "passed":
        return _Answer("works", applied)
    reason = common.one_line(past.summary.reason)
    if past.summary.verdict != "failed":
        return _Answer(f"{past.summary.verdict}: {reason}", applied)
    return _Answer(f"fails: {past.summary.kind or 'test'}: {reason}", applied)


def _rows(answers: Mapping[Cell, _Answer]) -> Iterator[list[Cell]]:
    """The cells of each row: of consecutive releases of transformers with the same properties; within those of Python; within those of torch."""
    releases, pythons, torches = (
        common.by_version(getattr(cell, axis) for cell in answers) for axis in ("transformers", "python", "torch")
    )
    there = {(cell.transformers, cell.python, cell.torch): cell for cell in answers}
    given = {key: answers[cell] for key, cell in there.items()}
    for some in alike(releases, [[given.get((tf, py, t)) for py in pythons for t in torches] for tf in releases]):
        tf = some[0]
        for some_pythons in alike(pythons, [[given.get((tf, py, t)) for t in torches] for py in pythons]):
            py = some_pythons[0]
            for some_torches in alike(torches, [given.get((tf, py, t)) for t in torches]):
                if (tf, py, some_torches[0]) in there:
                    yield [there[one] for one in product(some, some_pythons, some_torches)]


def alike(values: Sequence[str], answers: Sequence[object]) -> list[list[str]]:
    """The values in order, consecutive ones with the same properties grouped."""
    return [[value for value, _ in group] for _, group in groupby(zip(values, answers, strict=True), key=itemgetter(1))]


def _line(
    cells: Sequence[Cell],
    answers: Mapping[Cell, _Answer],
    current: Mapping[Cell, Past],
    numbers: Mapping[str, int],
    releases: Mapping[str, Releases],
) -> str:
    versions = [write(common.by_version(getattr(cell, axis) for cell in cells)) for axis, write in releases.items()]
    answer = answers[cells[0]]
    shims = ", ".join(f"`{name}`" for name in answer.shims) or "none"
    counts = sorted({current[cell].summary.passed for cell in cells})
    passed = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
    runs = ", ".join(map(str, sorted({numbers[current[cell].run.whole] for cell in cells})))
    return table_line(*versions, answer.works, shims, passed, runs)


def table_line(*fields: str) -> str:
    """A row of a Markdown table."""
    shown = (common.one_line(text, 10_000).replace("\\", "\\\\").replace("|", "\\|") for text in fields)
    return f"| {' | '.join(text.replace('<', '&lt;') for text in shown)} |"


class Releases:
    """Formats lists of releases; consecutive ones as ``5.0 to 5.4``."""

    def __init__(self, versions: Iterable[str]) -> None:
        minors = sorted({common.version_key(version)[0].release[:2] for version in versions})
        self._place = {minor: place for place, minor in enumerate(minors)}

    def __call__(self, versions: Sequence[str]) -> str:
        """The releases as text."""
        numbered = [(self._place[common.version_key(one)[0].release[:2]] - n, one) for n, one in enumerate(versions)]
        groups = [[one for _, one in group] for _, group in groupby(numbered, key=itemgetter(0))]
        return ", ".join(f"{some[0]} to {some[-1]}" if len(some) > 2 else ", ".join(some) for some in groups)
