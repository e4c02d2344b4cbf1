"""Shared by the shims for torch's FlashAttention-4 backend: flash-attn-4's functions under torch's calling convention."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import cache, wraps
from types import MappingProxyType, SimpleNamespace
from typing import Any

from kernel_compat.environment import Environment
from kernel_compat.kernels.catalog import FLASH_ATTN_4
from kernel_compat.patching.seam import Seam

MODULE = "torch.nn.attention._fa4"

#: The function through which torch gets flash-attn-4's functions, in every release that has the backend.
IMPORT = Seam(f"{MODULE}:_fa4_import_module", ("module_path",))

#: Keywords to pass to flash-attn-4 besides torch's, for the current call.
added: ContextVar[Mapping[str, Any]] = ContextVar("added", default=MappingProxyType({}))

_logger = logging.getLogger(__name__)


def not_installed(environment: Environment) -> str | None:
    if "flash-attn-4" in environment.packages or "flash_attn.cute" in environment.imports:
        return None
    return "flash-attn-4 is not installed"


def replace_import(original: Callable[[str], Any]) -> Callable[[str], Any]:
    """A `_fa4_import_module` that returns flash-attn-4's functions under the convention by which torch calls them."""

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
        output, lse, *_ = function(*args, **_windows({**kwargs, **added.get()}))
        return output, lse

    return _flash_attn_fwd


def _backward(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def _flash_attn_bwd(q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        kwargs = _windows({**kwargs, **added.get()})
        dim = q.shape[-1]
        extra = -dim % FLASH_ATTN_4.features.head_dim_multiple
        if extra:
            from torch.nn.functional import pad

            if kwargs.get("softmax_scale") is None:
                kwargs["softmax_scale"] = dim**-0.5
            q, k, v, out, dout = (pad(x, (0, extra)) for x in (q, k, v, out, dout))
        # torch.compile takes the gradients to be as contiguous as the inputs.
        dq, dk, dv = (x[..., :dim].contiguous() for x in function(q, k, v, out, dout, lse, **kwargs)[:3])
        return dq, dk, dv

    return _flash_attn_bwd


def _windows(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Replace -1, torch 2.11's value for a side without a limit, by None: flash-attn-4 reads a single -1 as a limit."""
    for side in ("window_size_left", "window_size_right"):
        if kwargs.get(side) is not None and kwargs[side] < 0:
            kwargs[side] = None
    return kwargs


def deactivate_when_undone() -> Callable[[], None]:
    """The `complete` of releases whose attention, SDPA's included, raises if the backend stays active without the shim."""

    def undo() -> None:
        from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

        if current_flash_attention_impl() == "FA4":
            restore_flash_attention_impl()
            _logger.warning(
                "torch's FA4 backend is deactivated: it can't drive this flash-attn-4 without kernel-compat."
            )

    return undo
