"""What is proven of transformers' own model types, as it ships: a table made by ``kernel-compat prove --all --table``."""

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

__all__ = ["PATH", "minor", "record", "releases", "wrong_cases"]

PATH = Path(str(resources.files(__package__))) / "table.json"


@cache
def _table() -> dict[str, dict[str, Any]]:
    """By minor release: ``right``, the types without a wrong case, and ``wrong``, the wrong cases of the others."""
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


def record(proofs: Iterable[Proof], path: Path = PATH) -> None:
    """Enter proofs in a table, in the place of those of the same release."""
    table = json.loads(path.read_text()) if path.exists() else {}
    made: dict[str, dict[str, Any]] = {}
    for proof in proofs:
        types = made.setdefault(minor(proof.transformers), {"right": [], "wrong": {}})
        wrong = sorted({outcome.case for outcome in proof.outcomes if outcome.verdict == "wrong"})
        if wrong:
            types["wrong"][proof.model_type] = wrong
        elif not proof.no_recipe:
            types["right"].append(proof.model_type)
    for types in made.values():
        types["right"].sort()
    table |= made
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
