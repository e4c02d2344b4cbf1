"""The public names of `kernel_compat.choosing`: the ladder of attention names, and what to settle before a model is loaded."""

from __future__ import annotations

from .choosing.ladder import (
    LADDER,
    Choice,
    Preload,
    Step,
    best_available,
    ladder,
    load_with_fallback,
    next_fallback,
    resolve_preload,
    verify_flash_support,
    verify_sdpa_support,
)

__all__ = [
    "LADDER",
    "Choice",
    "Preload",
    "Step",
    "best_available",
    "ladder",
    "load_with_fallback",
    "next_fallback",
    "resolve_preload",
    "verify_flash_support",
    "verify_sdpa_support",
]
