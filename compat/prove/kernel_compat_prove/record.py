"""Writing the table of proofs, whose format `kernel_compat.proofs.table` describes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from packaging.version import Version

from kernel_compat.proofs.table import PATH, WORSE, ByRelease, Cases, Ran, read
from kernel_compat.versions import minor

from .outcomes import EVERYTHING, PADDING_FREE, RAN, Outcome, Proof

__all__ = ["record"]


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


def record(proofs: Iterable[Proof], path: Path = PATH) -> None:
    """Enter proofs in a table; they replace all entries of the same release."""
    table, ran = read(path) if path.exists() else ({}, {})
    made: ByRelease[Cases] = {}
    made_ran: ByRelease[Ran] = {}
    for proof in proofs:
        by_verdict = {
            verdict: sorted(
                {
                    outcome.case
                    for outcome in proof.outcomes
                    if outcome.verdict == verdict and outcome.case != PADDING_FREE
                }
            )
            for verdict in WORSE
        }
        cases = (
            {"no recipe": []} if proof.no_recipe else {verdict: names for verdict, names in by_verdict.items() if names}
        )
        release = minor(proof.transformers)
        made.setdefault(release, {})[proof.model_type] = cases
        made_ran.setdefault(release, {})[proof.model_type] = _ran_in(proof.outcomes)
    _write(table | made, ran | made_ran, path)


def _ran_in(outcomes: Iterable[Outcome]) -> Ran:
    """By class, the cases that ran, as the table has them."""
    ran: Ran = {}
    for outcome in outcomes:
        if outcome.verdict in RAN and outcome.case not in ("load", EVERYTHING):
            count = f"*{outcome.compared}" if outcome.compared > 1 else ""
            ran.setdefault(outcome.model, []).append(f"{outcome.case}{count}{'?' if outcome.apart else ''}")
    return ran
