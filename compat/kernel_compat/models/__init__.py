"""Patches of models that are built already, each with the handle that undoes it."""

from __future__ import annotations

from .handle import Handle
from .liger import use_liger_kernel
from .sdpa import assert_same_signature, use_sdpa_backends

__all__ = ["Handle", "assert_same_signature", "use_liger_kernel", "use_sdpa_backends"]
