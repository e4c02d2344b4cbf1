"""Choose an attention: the ladder of names, loading with fallbacks, and settings to decide before a model is loaded."""

from __future__ import annotations

from .choosing.ladder import LADDER, Choice, Step, best_available, ladder, next_fallback
from .choosing.layers import LayerKernels, layer_kernels
from .choosing.loading import load_with_fallback
from .choosing.preload import Preload, resolve_preload, verify_flash_support, verify_sdpa_support

__all__ = [
    "LADDER",
    "Choice",
    "LayerKernels",
    "Preload",
    "Step",
    "best_available",
    "ladder",
    "layer_kernels",
    "load_with_fallback",
    "next_fallback",
    "resolve_preload",
    "verify_flash_support",
    "verify_sdpa_support",
]
