"""The kernels this library knows, and how anything else becomes one."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from .kernel import Features, Functions, Kernel, Provider, adapt, takes

__all__ = ["Features", "Functions", "Kernel", "Provider", "as_kernel", "known_kernels"]


@cache
def known_kernels() -> dict[str, Kernel]:
    """The library's kernels by name, the newest FlashAttention first."""
    from . import flash_attention_2, flash_attention_3, flash_attention_4, reference
    from . import torch_varlen as flash_attention_torch

    modules = (flash_attention_4, flash_attention_3, flash_attention_2, flash_attention_torch, reference)
    return {module.KERNEL.name: module.KERNEL for module in modules}


def as_kernel(kernel: Any) -> Kernel:
    """A kernel by its name, as it is, or from any object with FlashAttention functions.

    Such an object can do what the parameters of its functions name. An attribute `features`, a `Features`, says more,
    as functions with ``**kwargs`` need it.

    Raises:
        ValueError: no kernel has that name, or the object has no ``flash_attn_varlen_func`` that takes FA2's keywords.
        TypeError: `kernel` is none of these.
    """
    if isinstance(kernel, Kernel):
        return kernel
    known = known_kernels()
    if isinstance(kernel, str):
        if kernel not in known:
            raise ValueError(f"{kernel!r} is no kernel; there are: {', '.join(known)}")
        return known[kernel]
    if not hasattr(kernel, "flash_attn_func") and not hasattr(kernel, "flash_attn_varlen_func"):
        raise TypeError(f"a kernel is a name, a Kernel or an object with flash_attn_varlen_func, not {kernel!r}")
    if not callable(getattr(kernel, "flash_attn_varlen_func", None)):
        raise ValueError(
            f"{kernel!r} has no flash_attn_varlen_func: without it padded and packed batches can't be computed"
        )
    raw = {name: getattr(kernel, name, None) for name in Functions._fields}
    declared = getattr(kernel, "features", None)
    declared = declared if isinstance(declared, Features) else None
    known_as = _foreign.get(id(kernel))
    if known_as is not None and known_as[1:3] == (raw, declared):  # either may have been replaced
        return known_as[3]
    made = _foreign_kernel(kernel, raw, declared)
    _foreign[id(kernel)] = (kernel, raw, declared, made)
    return made


#: The kernels made from objects by the object's id; the object too, so that no other gets its id. The same object is
#: the same kernel: registering a name twice is no error then.
_foreign: dict[int, tuple[Any, dict[str, Any], Features | None, Kernel]] = {}

#: Keywords that every varlen function is called with.
_REQUIRED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal")


def _foreign_kernel(functions: Any, raw: dict[str, Any], declared: Features | None) -> Kernel:
    """A kernel over somebody else's functions.

    Args:
        declared: what it can do. None: the features whose keywords are parameters of the functions, on any device and
            dtype they take.
    """
    try:
        parameters = inspect.signature(raw["flash_attn_varlen_func"]).parameters
    except (TypeError, ValueError) as error:
        raise ValueError(f"the parameters of {functions!r}'s flash_attn_varlen_func can't be read: {error}") from error
    missing = [keyword for keyword in _REQUIRED if not takes(raw["flash_attn_varlen_func"], keyword)]
    if missing:
        raise ValueError(f"{functions!r}'s flash_attn_varlen_func does not take {', '.join(missing)}")
    name = getattr(functions, "__name__", None) or type(functions).__name__
    everything = Features(
        softcap=True,
        sinks=True,
        dropout=True,
        deterministic=True,
        paged=True,
        dtypes=("float16", "bfloat16", "float32", "float64"),
        devices=("cpu", "cuda", "xpu", "npu", "mps", "hpu"),
        max_head_dim=None,
    )
    renamed = {"s_aux": "learnable_sink"} if "learnable_sink" in parameters else {}
    if "page_table" in _parameters(raw["flash_attn_with_kvcache"]):
        renamed["block_table"] = "page_table"
    window = parameters["window_size"].default if "window_size" in parameters else None
    unlimited = window[0] if isinstance(window, tuple) else -1
    provider = Provider(
        name,
        name,
        declared or everything,
        "",
        renamed=renamed,
        unlimited=unlimited,
        bundled=True,
        declared=declared is not None,
    )
    kernel = Kernel(name, (provider,))
    kernel.preload(*adapt(name, raw, provider.features, provider))
    return kernel


def _parameters(function: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()
