"""Proof that a model computes the same under a registered attention name as with eager attention.

A tiny model is built twice with the same weights, with eager attention and under the name, and the two are compared case by
case: padding, packed sequences, masks, caches, generation, gradients, checkpointing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .outcomes import Outcome, Proof, summary
from .sweep import sweep

if TYPE_CHECKING:
    from .cases import CASES, QUICK
    from .proof import prove_config, prove_type

__all__ = ["CASES", "QUICK", "Outcome", "Proof", "prove_config", "prove_type", "summary", "sweep"]


def __getattr__(name: str) -> Any:
    """Imports the names that need torch on first use."""
    import importlib

    modules = {"CASES": "cases", "QUICK": "cases", "prove_config": "proof", "prove_type": "proof"}
    if name not in modules:
        raise AttributeError(name)
    return getattr(importlib.import_module(f".{modules[name]}", __name__), name)
