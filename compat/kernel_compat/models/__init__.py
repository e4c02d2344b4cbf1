"""Patches of models that are built already, each with the `kernel_compat.Handle` that undoes it."""

from __future__ import annotations

import warnings
from typing import Any

from ..errors import RenamedWarning
from ..gates import public
from ..patching.handle import Handle as Handle  # documented where it is
from .padding_free import padding_free
from .sdpa_backends import use_sdpa_backends

__all__ = ["LigerSupport", "liger_support", "padding_free", "use_liger_kernel", "use_sdpa_backends"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # from kernel-compat-ops
        return public(name, "ops")
    if name == "assert_same_signature":
        from ..patching.wrapping import assert_same_signature

        message = f"kernel_compat.models.{name} is not public any more, and nothing replaces it"
        warnings.warn(message, RenamedWarning, stacklevel=2)
        return assert_same_signature
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
