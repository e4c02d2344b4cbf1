"""Proof that a model computes the same under a registered attention name as with eager attention.

A tiny model of every type is built twice with the same weights, and compared case by case: padding, packed sequences, masks,
caches, generation, gradients, checkpointing.
"""

from .cases import CASES, QUICK
from .outcomes import Outcome, Proof, summary
from .proof import prove_config, prove_type
from .sweep import sweep

__all__ = ["CASES", "QUICK", "Outcome", "Proof", "prove_config", "prove_type", "summary", "sweep"]
