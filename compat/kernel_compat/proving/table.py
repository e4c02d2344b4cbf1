"""The table of proofs that ships with the library: for each release and model type of transformers, the cases not equal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from ..versions import minor
from .outcomes import PADDING_FREE, WORST_FIRST

if TYPE_CHECKING:
    from .outcomes import Proof

__all__ = ["PATH", "WORSE", "known", "minor", "record", "releases", "wrong_cases"]

PATH = Path(str(resources.files(__package__))) / "table.json"

#: The verdicts whose cases the table has, the worst first.
WORSE: tuple[str, ...] = WORST_FIRST[:3]

#: Release -> model type -> verdict -> cases.
Table = dict[str, dict[str, dict[str, list[str]]]]


@cache
def _table() -> Table:
    return _read(PATH)


def _read(path: Path) -> Table:
    """Read a table. In the file, a type has one entry for consecutive releases alike: ``{"llama": {"4.54-5.23": {}}}``."""
    document = json.loads(path.read_text())
    order: list[str] = document["releases"]
    table: Table = {release: {} for release in order}
    for model_type, runs in document["types"].items():
        for run, cases in runs.items():
            first, _, last = run.partition("-")
            for release in order[order.index(first) : order.index(last or first) + 1]:
                table[release][model_type] = cases
    return table


def _write(table: Table, path: Path) -> None:
    order = sorted(table, key=Version)
    lines = []
    for model_type in sorted({name for types in table.values() for name in types}):
        runs: dict[str, dict[str, list[str]]] = {}
        by_release = {release: table[release].get(model_type) for release in order}
        for cases, run in groupby(order, key=by_release.__getitem__):
            first, *others = run
            if cases is not None:
                runs["-".join((first, *others[-1:]))] = cases
        lines.append(f"{json.dumps(model_type)}: {json.dumps(runs)}")
    types = ",\n".join(lines)
    path.write_text(f'{{"releases": {json.dumps(order)},\n"types": {{\n{types}\n}}}}\n')


def releases() -> list[str]:
    """The minor releases of transformers in the table."""
    return sorted(_table(), key=Version)


def wrong_cases(model_type: str, version: str) -> tuple[str, ...] | None:
    """The cases in which a model type is proven wrong; None if it isn't in the table.

    Args:
        model_type: ``config.model_type``.
        version: the version of transformers; all patch releases of a minor release share its entries.
    """
    cases = _table().get(minor(version), {}).get(model_type)
    return None if cases is None or "no recipe" in cases else tuple(cases.get("wrong", ()))


def known(version: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """For each model type of a release: by verdict, the cases that aren't equal.

    A type of which no tiny model could be made has the verdict ``no recipe``, without cases.
    """
    types = _table().get(minor(version), {})
    return {name: {verdict: tuple(cases) for verdict, cases in types[name].items()} for name in sorted(types)}


def record(proofs: Iterable[Proof], path: Path = PATH) -> None:
    """Enter proofs in a table; they replace all entries of the same release."""
    table = _read(path) if path.exists() else {}
    made: Table = {}
    for proof in proofs:
        found = {
            verdict: sorted({one.case for one in proof.outcomes if one.verdict == verdict and one.case != PADDING_FREE})
            for verdict in WORSE
        }
        cases = {"no recipe": []} if proof.no_recipe else {verdict: names for verdict, names in found.items() if names}
        made.setdefault(minor(proof.transformers), {})[proof.model_type] = cases
    _write(table | made, path)
