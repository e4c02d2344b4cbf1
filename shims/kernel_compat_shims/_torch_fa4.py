"""What the shims for torch's FlashAttention-4 backend share: flash-attn-4's functions, as torch calls them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from types import MappingProxyType, SimpleNamespace
from typing import Any

from kernel_compat.environment import Environment
from kernel_compat.patching.seam import Seam

MODULE = "torch.nn.attention._fa4"

#: What torch calls flash-attn-4's functions through, by the name of its module, in every release that has the backend.
IMPORT = Seam(f"{MODULE}:_fa4_import_module", ("module_path",))

#: The backward of flash-attn-4 4.0.0b36 on sm_90 is right for multiples of this alone (measured for 8 to 256, with and
#: without varlen: dq of the others is off by its own size).
_HEAD_DIM_MULTIPLE = 32

#: Keywords that torch 2.11 doesn't hand on to flash-attn-4, for the call that is under way.
_untold: ContextVar[Mapping[str, Any]] = ContextVar("_untold", default=MappingProxyType({}))

_logger = logging.getLogger(__name__)


def not_installed(environment: Environment) -> str | None:
    if "flash-attn-4" in environment.packages or "flash_attn.cute" in environment.imports:
        return None
    return "flash-attn-4 is not installed"


@contextmanager
def told(keywords: Mapping[str, Any]) -> Iterator[None]:
    """Hand these on to flash-attn-4 within the block."""
    token = _untold.set(keywords)
    try:
        yield
    finally:
        _untold.reset(token)


def replace_import(original: Callable[[str], Any]) -> Callable[[str], Any]:
    """A `_fa4_import_module` that answers flash-attn-4's functions as torch means to call them."""

    @cache
    @wraps(original)
    def _fa4_import_module(module_path: str) -> SimpleNamespace:
        module = original(module_path)
        return SimpleNamespace(
            _flash_attn_fwd=_forward(module._flash_attn_fwd), _flash_attn_bwd=_backward(module._flash_attn_bwd)
        )

    return _fa4_import_module


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def _flash_attn_fwd(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        output, lse, *_ = function(*args, **_windows({**kwargs, **_untold.get()}))
        return output, lse

    return _flash_attn_fwd


def _backward(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def _flash_attn_bwd(q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        kwargs = _windows({**kwargs, **_untold.get()})
        dim = q.shape[-1]
        extra = -dim % _HEAD_DIM_MULTIPLE
        if extra:
            from torch.nn.functional import pad

            if kwargs.get("softmax_scale") is None:
                kwargs["softmax_scale"] = dim**-0.5
            q, k, v, out, dout = (pad(x, (0, extra)) for x in (q, k, v, out, dout))
            dq, dk, dv = (x[..., :dim] for x in function(q, k, v, out, dout, lse, **kwargs)[:3])
        else:
            dq, dk, dv = function(q, k, v, out, dout, lse, **kwargs)[:3]
        return dq, dk, dv

    return _flash_attn_bwd


def _windows(kwargs: dict[str, Any]) -> dict[str, Any]:
    """torch 2.11 writes -1 for a side without a limit; flash-attn-4 takes a single one for a limit that hides everything."""
    for side in ("window_size_left", "window_size_right"):
        if kwargs.get(side) is not None and kwargs[side] < 0:
            kwargs[side] = None
    return kwargs


def deactivate_when_undone() -> Callable[[], None]:
    """For releases that can't do without: their attention would die, SDPA's included, if it stayed active."""

    def undo() -> None:
        from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

        if current_flash_attention_impl() == "FA4":
            restore_flash_attention_impl()
            _logger.warning(
                "torch's FA4 backend is deactivated: it can't drive this flash-attn-4 without kernel-compat."
            )

    return undo
