"""The table of proofs that ships with the library.

For each release of transformers and each model type it has the cases whose results aren't equal to eager attention's, and the cases that ran.
`kernel_compat_prove` writes it.

In the file, a type has one entry for consecutive releases alike: ``{"llama": {"4.54-5.23": {}}}``, with the cases that aren't equal
by verdict. ``ran`` has, for the releases of which it is known, the cases that ran of each class, as the number of an entry in
``sets``. There ``cached`` is a case, ``cached*2`` one with two comparisons, and ``cached?`` one in which eager attention disagrees
with itself. A class that can't be loaded under a flash attention name isn't in it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TypeVar

from packaging.version import Version

from ..versions import minor

__all__ = [
    "PATH",
    "WORSE",
    "ByRelease",
    "Cases",
    "Ran",
    "cases_that_ran",
    "known",
    "nothing_ran",
    "read",
    "releases",
    "wrong_cases",
]

PATH = Path(str(resources.files(__package__))) / "table.json"

#: The verdicts whose cases the table has, the worst first.
WORSE = ("wrong", "crashed", "refused")

T = TypeVar("T")

#: Release -> model type -> what is known.
ByRelease = dict[str, dict[str, T]]
#: By verdict, the cases.
Cases = dict[str, list[str]]
#: By class, the cases that ran.
Ran = dict[str, list[str]]


@cache
def _table() -> ByRelease[Cases]:
    return read(PATH)[0]


@cache
def cases_that_ran() -> ByRelease[Ran]:
    """By release and model type, the cases that ran of each class."""
    return read(PATH)[1]


def read(path: Path) -> tuple[ByRelease[Cases], ByRelease[Ran]]:
    """Read a table from its file: the cases that aren't equal, and the cases that ran."""
    document = json.loads(path.read_text())
    order: list[str] = document["releases"]
    ran = document.get("ran", {"sets": [], "types": {}})
    sets: list[list[str]] = ran["sets"]
    classes = _unfolded(ran["types"], order)
    return _unfolded(document["types"], order), {
        release: {name: {owner: sets[number] for owner, number in by_class.items()} for name, by_class in types.items()}
        for release, types in classes.items()
        if types
    }


def _unfolded(types: Mapping[str, Mapping[str, T]], order: Sequence[str]) -> ByRelease[T]:
    by_release: ByRelease[T] = {release: {} for release in order}
    for model_type, runs in types.items():
        for run, value in runs.items():
            first, _, last = run.partition("-")
            for release in order[order.index(first) : order.index(last or first) + 1]:
                by_release[release][model_type] = value
    return by_release


def releases() -> list[str]:
    """The minor releases of transformers in the table."""
    return sorted(_table(), key=Version)


def wrong_cases(model_type: str, version: str) -> tuple[str, ...] | None:
    """The cases in which a model type is proven wrong; None if it isn't in the table, or couldn't be loaded when it was made.

    Args:
        model_type: ``config.model_type``.
        version: the version of transformers; all patch releases of a minor release share its entries.
    """
    cases = _table().get(minor(version), {}).get(model_type)
    return None if cases is None or nothing_ran(cases) else tuple(cases.get("wrong", ()))


def nothing_ran(cases: Mapping[str, Collection[str]]) -> bool:
    """Whether no case of a model type ran, by its entry: no tiny model could be made, or no class could be loaded."""
    return "no recipe" in cases or "load" in cases.get("refused", ())


def known(version: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """For each model type of a release: by verdict, the cases that aren't equal.

    A type of which no tiny model could be made has the verdict ``no recipe``, without cases.
    """
    types = _table().get(minor(version), {})
    return {name: {verdict: tuple(cases) for verdict, cases in types[name].items()} for name in sorted(types)}
