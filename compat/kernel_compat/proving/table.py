"""What is proven of transformers' own model types, as it ships: a table that `record` makes of proofs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

if TYPE_CHECKING:
    from .outcomes import Proof

__all__ = ["PATH", "WORSE", "known", "minor", "record", "releases", "wrong_cases"]

PATH = Path(str(resources.files(__package__))) / "table.json"

#: The verdicts whose cases are kept, the worst first.
WORSE = ("wrong", "crashed", "refused")


@cache
def _table() -> dict[str, dict[str, Any]]:
    """By minor release: ``right``, the types without a wrong case; by verdict, the cases of each type that has some; and
    ``no recipe``, the types that nothing is known of."""
    table: dict[str, dict[str, Any]] = json.loads(PATH.read_text())
    return table


def minor(version: str) -> str:
    """``5.23`` of ``5.23.0``."""
    return ".".join(map(str, Version(version).release[:2]))


def releases() -> list[str]:
    """The minor releases of transformers in the table."""
    return sorted(_table(), key=Version)


def wrong_cases(model_type: str, version: str) -> tuple[str, ...] | None:
    """The cases in which a model type computes something else than eager attention; None where it isn't in the table.

    Args:
        model_type: as in a config.
        version: of transformers; a patch release counts as its minor release.
    """
    types = _table().get(minor(version))
    if types is None:
        return None
    if model_type in types["wrong"]:
        return tuple(types["wrong"][model_type])
    return () if model_type in types["right"] else None


def known(version: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """Of each model type of a release the cases that aren't equal, by verdict; none where all are.

    Where no tiny model could be made, ``no recipe`` is there without cases.
    """
    types = _table().get(minor(version), {})
    found: dict[str, dict[str, tuple[str, ...]]] = {name: {} for name in types.get("right", ())}
    found |= {name: {"no recipe": ()} for name in types.get("no recipe", ())}
    for verdict in WORSE:
        for name, cases in types.get(verdict, {}).items():
            found.setdefault(name, {})[verdict] = tuple(cases)
    return dict(sorted(found.items()))


def record(proofs: Iterable[Proof], path: Path = PATH) -> None:
    """Enter proofs in a table, in the place of those of the same release."""
    table = json.loads(path.read_text()) if path.exists() else {}
    made: dict[str, dict[str, Any]] = {}
    for proof in proofs:
        empty: dict[str, Any] = {"right": [], "no recipe": [], **{verdict: {} for verdict in WORSE}}
        types = made.setdefault(minor(proof.transformers), empty)
        for verdict in WORSE:
            if cases := sorted({outcome.case for outcome in proof.outcomes if outcome.verdict == verdict}):
                types[verdict][proof.model_type] = cases
        if proof.no_recipe:
            types["no recipe"].append(proof.model_type)
        elif proof.model_type not in types["wrong"]:
            types["right"].append(proof.model_type)
    for types in made.values():
        types["right"].sort()
        types["no recipe"].sort()
    table |= made
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
