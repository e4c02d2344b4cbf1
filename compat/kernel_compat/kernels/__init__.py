"""The kernels this library knows, and how anything else becomes one."""

from __future__ import annotations

from functools import cache
from typing import Any

from .base import Features, Functions, Kernel, Provider, adapt

__all__ = ["Features", "Functions", "Kernel", "Provider", "as_kernel", "known_kernels"]


@cache
def known_kernels() -> dict[str, Kernel]:
    """The library's kernels by name, the newest FlashAttention first."""
    from . import flash_attention_2, flash_attention_3, flash_attention_4, reference

    modules = (flash_attention_4, flash_attention_3, flash_attention_2, reference)
    return {module.KERNEL.name: module.KERNEL for module in modules}


def as_kernel(kernel: Any) -> Kernel:
    """A kernel by its name, as it is, or from any object with FlashAttention functions.

    Raises:
        ValueError: no kernel has that name, or the object has no ``flash_attn_varlen_func``.
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
    return _foreign_kernel(kernel)


def _foreign_kernel(functions: Any) -> Kernel:
    """A kernel over somebody else's functions; it can do what their signatures say, on any device and dtype they take."""
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
    provider = Provider(name, name, everything, "", renamed=_renamed(functions), bundled=True)
    raw = {field: getattr(functions, field, None) for field in Functions._fields}
    kernel = Kernel(name, (provider,))
    kernel.preload(*adapt(name, raw, everything, provider))
    return kernel


def _renamed(functions: Any) -> dict[str, str]:
    import inspect

    parameters = inspect.signature(functions.flash_attn_varlen_func).parameters
    return {"s_aux": "learnable_sink"} if "learnable_sink" in parameters else {}
