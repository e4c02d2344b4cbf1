"""The table of proofs that ships with the library.

For each release of transformers and each model type it has the cases whose results aren't equal to eager attention's, and the cases that ran.

In the file, a type has one entry for consecutive releases alike: ``{"llama": {"4.54-5.23": {}}}``, with the cases that aren't equal
by verdict. ``ran`` has, for the releases of which it is known, the cases that ran of each class, as the number of an entry in
``sets``. There ``cached`` is a case, ``cached*2`` one with two comparisons, and ``cached?`` one in which eager attention disagrees
with itself. A class that can't be loaded under a flash attention name isn't in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from packaging.version import Version

from ..versions import minor, within
from .outcomes import PADDING_FREE, RAN, Outcome

if TYPE_CHECKING:
    from .outcomes import Proof

__all__ = [
    "EVERYTHING",
    "PATH",
    "WORSE",
    "known",
    "minor",
    "nothing_ran",
    "record",
    "releases",
    "vanished",
    "with_losses",
    "wrong_cases",
]

PATH = Path(str(resources.files(__package__))) / "table.json"
#: The losses that were reviewed, each with its reason: by model type, then the first release without it, then the case.
ACCEPTED = PATH.with_name("lost.json")

#: The verdicts whose cases the table has, the worst first.
WORSE = ("wrong", "crashed", "refused")

#: The case of an outcome that stands for all of a type or a class.
EVERYTHING = "all"

#: In the reason why there is no tiny model: the environment lacks a package that the model needs. A module of transformers that
#: is gone is a loss.
_NOT_INSTALLED = re.compile(r"but it was not found in your environment|No module named '(?!transformers\b)")

T = TypeVar("T")

#: Release -> model type -> what is known.
ByRelease = dict[str, dict[str, T]]
#: By verdict, the cases.
Cases = dict[str, list[str]]
#: By class, the cases that ran.
Ran = dict[str, list[str]]


@cache
def _table() -> ByRelease[Cases]:
    return _read(PATH)[0]


@cache
def _ran() -> ByRelease[Ran]:
    return _read(PATH)[1]


def _read(path: Path) -> tuple[ByRelease[Cases], ByRelease[Ran]]:
    document = json.loads(path.read_text())
    order: list[str] = document["releases"]
    ran = document.get("ran", {"sets": [], "types": {}})
    sets: list[list[str]] = ran["sets"]
    classes = _unfolded(ran["types"], order)
    return _unfolded(document["types"], order), {
        release: {name: {owner: sets[number] for owner, number in own.items()} for name, own in types.items()}
        for release, types in classes.items()
        if types
    }


def _unfolded(types: Mapping[str, Mapping[str, T]], order: Sequence[str]) -> ByRelease[T]:
    found: ByRelease[T] = {release: {} for release in order}
    for model_type, runs in types.items():
        for run, value in runs.items():
            first, _, last = run.partition("-")
            for release in order[order.index(first) : order.index(last or first) + 1]:
                found[release][model_type] = value
    return found


def _folded(table: ByRelease[Any], order: Sequence[str]) -> Iterator[str]:
    """A line for each type, with an entry for consecutive releases alike."""
    for model_type in sorted({name for types in table.values() for name in types}):
        runs: dict[str, Any] = {}
        by_release = {release: table.get(release, {}).get(model_type) for release in order}
        for value, run in groupby(order, key=by_release.__getitem__):
            first, *others = run
            if value is not None:
                runs["-".join((first, *others[-1:]))] = value
        yield f"{json.dumps(model_type)}: {json.dumps(runs)}"


def _write(table: ByRelease[Cases], ran: ByRelease[Ran], path: Path) -> None:
    order = sorted(table, key=Version)
    sets: list[list[str]] = []
    numbered: ByRelease[dict[str, int]] = {}
    for release in order:
        for name, classes in sorted(ran.get(release, {}).items()):
            for owner, cases in sorted(classes.items()):
                if cases not in sets:
                    sets.append(cases)
                numbered.setdefault(release, {}).setdefault(name, {})[owner] = sets.index(cases)
    lines = (",\n".join(some) for some in (map(json.dumps, sets), _folded(numbered, order), _folded(table, order)))
    path.write_text(
        '{{"releases": {},\n"ran": {{"sets": [\n{}\n],\n"types": {{\n{}\n}}}},\n"types": {{\n{}\n}}}}\n'.format(
            json.dumps(order), *lines
        )
    )


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


def record(proofs: Iterable[Proof], path: Path = PATH) -> None:
    """Enter proofs in a table; they replace all entries of the same release."""
    table, ran = _read(path) if path.exists() else ({}, {})
    made: ByRelease[Cases] = {}
    made_ran: ByRelease[Ran] = {}
    for proof in proofs:
        found = {
            verdict: sorted({one.case for one in proof.outcomes if one.verdict == verdict and one.case != PADDING_FREE})
            for verdict in WORSE
        }
        cases = {"no recipe": []} if proof.no_recipe else {verdict: names for verdict, names in found.items() if names}
        release = minor(proof.transformers)
        made.setdefault(release, {})[proof.model_type] = cases
        made_ran.setdefault(release, {})[proof.model_type] = _ran_in(proof.outcomes)
    _write(table | made, ran | made_ran, path)


def _ran_in(outcomes: Iterable[Outcome]) -> Ran:
    """By class, the cases that ran, as the table has them."""
    found: Ran = {}
    for one in outcomes:
        if one.verdict in RAN and one.case not in ("load", EVERYTHING):
            count = f"*{one.compared}" if one.compared > 1 else ""
            found.setdefault(one.model, []).append(f"{one.case}{count}{'?' if one.apart else ''}")
    return found


# Losses.


def with_losses(proof: Proof, cases: Sequence[str] | None = None, owner: str | None = None) -> Proof:
    """The proof of a model type, in which cases are lost that ran on the last release of which the table knows it.

    Args:
        proof: of all classes of the type, or of one.
        cases: the cases that were tried; None for all.
        owner: the name of the class, for a proof of one.
    """
    crashed = any(one.case == EVERYTHING for one in proof.outcomes)
    if crashed or _NOT_INSTALLED.search(proof.no_recipe):
        return proof
    before, classes = _before(proof.model_type, proof.transformers)
    outcomes = list(proof.outcomes)
    if owner is not None:
        classes = {owner: classes[owner]} if owner in classes else {}
    for name, ran in classes.items():
        own = {one.case: number for number, one in enumerate(outcomes) if one.model == name}
        if "load" in own:
            continue
        for entry in ran if own else [EVERYTHING]:
            case, _, count = entry.rstrip("?").partition("*")
            if own and cases is not None and case not in cases:
                continue
            missing = Outcome(name, case, "not applicable", reason=proof.no_recipe or "the type has no such class")
            found = outcomes[own[case]] if case in own else missing
            reason = _loss(found, int(count or 1), entry.endswith("?"), before)
            if reason and not _accepted(proof.model_type, case, before, proof.transformers):
                at = own.get(case, len(outcomes))
                outcomes[at : at + 1] = [replace(found, verdict="lost", reason=reason)]
    return replace(proof, outcomes=tuple(outcomes))


def _loss(found: Outcome, compared: int, apart: bool, before: str) -> str:
    """What a case has lost; empty for nothing. A case that is wrong or crashed is worse."""
    if found.verdict in ("wrong", "crashed"):
        return ""
    if found.compared < compared:
        now = f"{found.compared} of them" if found.compared else "not here"
        ran = f"{compared} comparisons" if compared > 1 else "it"
        return f"{ran} ran on {before}, {now}: {found.reason}"
    return (
        f"not so on {before}: {found.reason or 'eager attention disagrees with itself'}"
        if found.apart and not apart
        else ""
    )


def vanished(model_types: Iterable[str], version: str) -> list[tuple[str, str]]:
    """The model types that the last release in the table has and that aren't among these, each with the reason why it is lost."""
    order = [release for release in releases() if within(release, f"<={minor(version)}")]
    if not order:
        return []
    gone = sorted(_table()[order[-1]].keys() - set(model_types))
    return [
        (name, f"{order[-1]} has this model type")
        for name in gone
        if not _accepted(name, EVERYTHING, order[-1], version)
    ]


def _before(model_type: str, version: str) -> tuple[str, Ran]:
    """The last release, up to this one, of which the cases are known that ran, and those of a type."""
    order = [release for release in _ran() if within(release, f"<={minor(version)}")]
    release = max(order, key=Version, default="")
    return release, _ran().get(release, {}).get(model_type, {})


@cache
def _reviewed() -> dict[str, dict[str, dict[str, str]]]:
    found: dict[str, dict[str, dict[str, str]]] = json.loads(ACCEPTED.read_text())
    return found


def _accepted(model_type: str, case: str, before: str, version: str) -> bool:
    """Whether a loss between two releases, the second included, was reviewed."""
    return any(
        within(release, f">{before},<={minor(version)}") and (case in cases or EVERYTHING in cases)
        for release, cases in _reviewed().get(model_type, {}).items()
    )
