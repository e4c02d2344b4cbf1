"""Choose an attention: the ladder of names, loading with fallbacks, and settings to decide before a model is loaded."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from ..errors import RenamedWarning

if TYPE_CHECKING:
    from .fallback import LADDER, Choice, Step, best_available, ladder, next_fallback
    from .layers import LayerKernels, layer_kernels
    from .loading import load_with_fallback
    from .planning import AttentionPlan, plan_attention, verify_attention

__all__ = [
    "LADDER",
    "AttentionPlan",
    "Choice",
    "LayerKernels",
    "Step",
    "best_available",
    "ladder",
    "layer_kernels",
    "load_with_fallback",
    "next_fallback",
    "plan_attention",
    "verify_attention",
]

#: Names of releases before 0.3, each with its name in `planning`, and what to call instead.
_RENAMED = {
    "Preload": ("AttentionPlan", "AttentionPlan"),
    "resolve_preload": ("plan_attention", "plan_attention"),
    "verify_flash_support": ("verify_flash", "verify_attention(model, name)"),
    "verify_sdpa_support": ("verify_context_parallel", "verify_attention(model, cp_size=...)"),
}


def __getattr__(name: str) -> Any:
    """Imports the module of a name on first use: the shims import one module of this package, and not the others."""
    import importlib

    for module in ("fallback", "layers", "loading", "planning") if name in __all__ else ():
        loaded = importlib.import_module(f".{module}", __name__)
        if name in loaded.__all__:
            return globals().setdefault(name, getattr(loaded, name))
    if name in _RENAMED:
        now, instead = _RENAMED[name]
        warnings.warn(f"kernel_compat.policy.{name} is now {instead}", RenamedWarning, stacklevel=2)
        return getattr(importlib.import_module(".planning", __name__), now)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
