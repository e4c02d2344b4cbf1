"""Cases and model types that ran on the last release in the table of proofs and don't on a later one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path

from packaging.version import Version

from kernel_compat.proofs import table
from kernel_compat.proofs.table import Ran
from kernel_compat.versions import minor, within

from .outcomes import EVERYTHING, Outcome, Proof

__all__ = ["vanished", "with_losses"]

#: The losses that were reviewed, each with its reason: by model type, then the first release without it, then the case.
ACCEPTED = Path(str(resources.files(__package__))) / "lost.json"

#: In the reason why there is no tiny model: the environment lacks a package that the model needs. A module of transformers that
#: is gone is a loss.
_NOT_INSTALLED = re.compile(r"but it was not found in your environment|No module named '(?!transformers\b)")


def with_losses(proof: Proof, cases: Sequence[str] | None = None, owner: str | None = None) -> Proof:
    """The proof of a model type, in which cases are lost that ran on the last release of which the table knows it.

    Args:
        proof: of all classes of the type, or of one.
        cases: the cases that were tried; None for all.
        owner: the name of the class, for a proof of one.
    """
    crashed = any(other.case == EVERYTHING for other in proof.outcomes)
    if crashed or _NOT_INSTALLED.search(proof.no_recipe):
        return proof
    before, classes = _before(proof.model_type, proof.transformers)
    outcomes = list(proof.outcomes)
    if owner is not None:
        classes = {owner: classes[owner]} if owner in classes else {}
    for name, ran in classes.items():
        own = {other.case: number for number, other in enumerate(outcomes) if other.model == name}
        if "load" in own:
            continue
        for entry in ran if own else [EVERYTHING]:
            case, _, count = entry.rstrip("?").partition("*")
            if own and cases is not None and case not in cases:
                continue
            missing = Outcome(name, case, "not applicable", reason=proof.no_recipe or "the type has no such class")
            outcome = outcomes[own[case]] if case in own else missing
            reason = _loss(outcome, int(count or 1), entry.endswith("?"), before)
            if reason and not _accepted(proof.model_type, case, before, proof.transformers):
                at = own.get(case, len(outcomes))
                outcomes[at : at + 1] = [replace(outcome, verdict="lost", reason=reason)]
    return replace(proof, outcomes=tuple(outcomes))


def _loss(outcome: Outcome, compared: int, apart: bool, before: str) -> str:
    """Why a case is lost; empty if it isn't, or is wrong or crashed, which is worse."""
    if outcome.verdict in ("wrong", "crashed"):
        return ""
    if outcome.compared < compared:
        now = f"{outcome.compared} of them" if outcome.compared else "not here"
        ran = f"{compared} comparisons" if compared > 1 else "it"
        return f"{ran} ran on {before}, {now}: {outcome.reason}"
    return (
        f"not so on {before}: {outcome.reason or 'eager attention disagrees with itself'}"
        if outcome.apart and not apart
        else ""
    )


def vanished(model_types: Iterable[str], version: str) -> list[tuple[str, str]]:
    """The model types that the last release in the table has and that aren't among these, each with the reason why it is lost."""
    order = [release for release in table.releases() if within(release, f"<={minor(version)}")]
    if not order:
        return []
    gone = sorted(table.known(order[-1]).keys() - set(model_types))
    return [
        (name, f"{order[-1]} has this model type")
        for name in gone
        if not _accepted(name, EVERYTHING, order[-1], version)
    ]


def _before(model_type: str, version: str) -> tuple[str, Ran]:
    """The last release, up to this one, of which the cases are known that ran, and those of a type."""
    order = [release for release in table.cases_that_ran() if within(release, f"<={minor(version)}")]
    release = max(order, key=Version, default="")
    return release, table.cases_that_ran().get(release, {}).get(model_type, {})


@cache
def _reviewed() -> dict[str, dict[str, dict[str, str]]]:
    reviewed: dict[str, dict[str, dict[str, str]]] = json.loads(ACCEPTED.read_text())
    return reviewed


def _accepted(model_type: str, case: str, before: str, version: str) -> bool:
    """Whether a loss between two releases, the second included, was reviewed."""
    return any(
        within(release, f">{before},<={minor(version)}") and (case in cases or EVERYTHING in cases)
        for release, cases in _reviewed().get(model_type, {}).items()
    )
