"""transformers 5.4 on: its own flash_attention_4 dies of packed position_ids, whose greatest length it passes as a tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from kernel_compat.seams import Seam, Shim

_UTILS = "transformers.modeling_flash_attention_utils"
_NAME = "flash_attention_4"


def _with_int_lengths(varlen: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(varlen)
    def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> Any:
        for length in ("max_seqlen_q", "max_seqlen_k"):
            if hasattr(kwargs.get(length), "item"):
                kwargs[length] = int(kwargs[length])
        return varlen(*args, **kwargs)

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
    reason="transformers' own flash_attention_4 is handed the greatest length of packed sequences as a tensor, which it dies of",
    seams=(Seam(f"{_UTILS}:_lazy_imports", ("implementation", "attention_wrapper")),),
    replace=_replace,
    complete=_load_again,
)
