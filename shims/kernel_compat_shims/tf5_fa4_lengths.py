"""transformers 5.4 on: its own flash_attention_4 is called with lengths that it doesn't take.

The greatest length of packed position_ids is a tensor, where FlashAttention-4 takes integers; up to 5.18 continuous batching passes
lengths by FlashAttention-2's positions, of which the fourth is another argument of FlashAttention-4.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim

_UTILS = "transformers.modeling_flash_attention_utils"
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


def _replace(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    original = originals["_lazy_imports"]

    @wraps(original)
    def _lazy_imports(implementation: Any, *args: Any, **kwargs: Any) -> Any:
        functions = original(implementation, *args, **kwargs)
        if implementation != _NAME:
            return functions
        dense, varlen, *rest = functions
        return (dense, _with_int_lengths(varlen), *rest)

    return {"_lazy_imports": _lazy_imports}


def _load_again() -> Callable[[], None]:
    """transformers keeps the functions it loaded last: it must load these again, now and when the shim goes."""
    module: Any = sys.modules[_UTILS]

    def forget() -> None:
        if module._loaded_implementation == _NAME:
            module._loaded_implementation = None

    forget()
    return forget


SHIM = Shim(
    name="tf5_fa4_lengths",
    distribution="transformers",
    versions=">=5.4,<6",
    reason=(
        "transformers' own flash_attention_4 is handed the greatest length of packed sequences as a tensor, which it dies of, and "
        "in continuous batching lengths by the positions of FlashAttention-2"
    ),
    seams=(Seam(f"{_UTILS}:_lazy_imports", ("implementation", "attention_wrapper")),),
    replace=_replace,
    complete=_load_again,
)
