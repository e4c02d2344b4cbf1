"""``kernel-compat-matrix compatibility``: write a Markdown document of the combinations that work, with the shims."""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from ..cells import Cell
from ..errors import MatrixError
from ..results import ENDED
from ..store import Past, Store
from . import common
from .explain import shims


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
    # One order for all tables: a release that is missing in one of them ends the ranges there.
    releases = {axis: Releases(getattr(cell, axis) for cell in current) for axis in ("transformers", "torch", "python")}
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
        for cells in _rows(own, ("transformers", "python", "torch")):
            versions = [write([getattr(cell, axis) for cell in cells]) for axis, write in releases.items()]
            counts = sorted({current[cell].summary.passed for cell in cells})
            passed = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
            named = ", ".join(map(str, sorted({numbers[current[cell].run.whole] for cell in cells})))
            lines.append(table_line(*versions, *answers[cells[0]], passed, named))
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


def _rows(answers: Mapping[Cell, object], axes: Sequence[str]) -> Iterator[list[Cell]]:
    """The cells of each row: of consecutive releases on the first axis with the same answers; within those on the next one."""
    if not axes:
        yield [*answers]
        return
    found: dict[str, dict[tuple[str, ...], object]] = {}
    for cell, answer in answers.items():
        rest = tuple(getattr(cell, axis) for axis in axes[1:])
        found.setdefault(getattr(cell, axes[0]), {})[rest] = answer
    releases = common.by_version(found)
    for some in alike(releases, [found[release] for release in releases]):
        yield from _rows({cell: answers[cell] for cell in answers if getattr(cell, axes[0]) in some}, axes[1:])


def alike(values: Sequence[str], answers: Sequence[object]) -> list[list[str]]:
    """The values in order, consecutive ones with the same properties grouped."""
    return [[value for value, _ in group] for _, group in groupby(zip(values, answers, strict=True), key=itemgetter(1))]


def table_line(*fields: str) -> str:
    """A row of a Markdown table."""
    shown = (common.one_line(text, 10_000).replace("\\", "\\\\").replace("|", "\\|") for text in fields)
    return f"| {' | '.join(text.replace('<', '&lt;') for text in shown)} |"


class Releases:
    """Formats lists of releases; consecutive ones as ``5.0 to 5.4``."""

    def __init__(self, versions: Iterable[str]) -> None:
        minors = sorted({common.version_key(version)[0].release[:2] for version in versions})
        self._place = {minor: place for place, minor in enumerate(minors)}

    def __call__(self, some: Iterable[str]) -> str:
        """The releases as text."""
        versions = common.by_version(some)
        numbered = [(self._place[common.version_key(one)[0].release[:2]] - n, one) for n, one in enumerate(versions)]
        groups = [[one for _, one in group] for _, group in groupby(numbered, key=itemgetter(0))]
        return ", ".join(f"{some[0]} to {some[-1]}" if len(some) > 2 else ", ".join(some) for some in groups)
