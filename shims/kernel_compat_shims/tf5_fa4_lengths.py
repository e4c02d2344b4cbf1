"""transformers 5.4 and later: its own ``flash_attention_4`` calls FlashAttention-4 with arguments that it refuses.

FlashAttention-4 takes maximum lengths as integers, and another argument, ``qv``, in fourth place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each

from ._dispatch import UTILS

_NAME = "flash_attention_4"


def _with_int_lengths(varlen: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(varlen)
    def flash_attn_varlen_func(q: Any, k: Any, v: Any, *lengths: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), lengths, strict=False))
        for length in ("max_seqlen_q", "max_seqlen_k"):
            if hasattr(kwargs.get(length), "item"):
                kwargs[length] = int(kwargs[length])
        return varlen(q, k, v, **kwargs)

    return flash_attn_varlen_func


def _imports(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _lazy_imports(implementation: Any, *args: Any, **kwargs: Any) -> Any:
        dense, varlen, *rest = original(implementation, *args, **kwargs)
        return (dense, _with_int_lengths(varlen) if implementation == _NAME else varlen, *rest)

    return _lazy_imports


def _load_again() -> Callable[[], None]:
    """Make transformers, which keeps the functions it loaded last, load them again: now, and when the shim is undone."""
    module: Any = sys.modules[UTILS]

    def forget() -> None:
        if module._loaded_implementation == _NAME:
            module._loaded_implementation = None

    forget()
    return forget


SHIM = Shim(
    name="tf5_fa4_lengths",
    distribution="transformers",
    versions=">=5.4,<6",
    reason="flash_attention_4 gets maximum lengths as tensors, and lengths by position in continuous batching (up to 5.18)",
    upstream="huggingface/transformers#48353, allenai/OLMo-core#857",
    delete_when="the oldest supported transformers has the fix of huggingface/transformers#48353",
    seams=(Seam(f"{UTILS}:_lazy_imports", ("implementation", "attention_wrapper")),),
    replace=each(_imports),
    complete=_load_again,
)
