"""The kernels of this library, and how an object with FlashAttention's functions becomes one."""

from __future__ import annotations

from typing import Any

from .adapter import Functions
from .catalog import CATALOG, REFERENCE
from .flash import FLASH_ATTENTION_2, FLASH_ATTENTION_3, FLASH_ATTENTION_4
from .foreign import ForeignKernel
from .kernel import Kernel
from .provider import Features, Limit, Provider
from .torch_varlen import FLASH_ATTENTION_TORCH

__all__ = ["Features", "Functions", "Kernel", "Limit", "Provider", "as_kernel", "known_kernels"]

_REFERENCE = Kernel(REFERENCE, CATALOG[REFERENCE])
_KERNELS = (FLASH_ATTENTION_4, FLASH_ATTENTION_3, FLASH_ATTENTION_2, FLASH_ATTENTION_TORCH, _REFERENCE)


def known_kernels() -> dict[str, Kernel]:
    """The library's kernels by name, the newest FlashAttention first."""
    return {kernel.name: kernel for kernel in _KERNELS}


def as_kernel(kernel: Any) -> Kernel:
    """A kernel by its name, a `Kernel` as it is, or a kernel made from any object with FlashAttention's functions.

    The features of an object are those whose keywords are named parameters of its functions. An attribute `features`, a
    `Features`, declares them instead, which functions with ``**kwargs`` need.

    Raises:
        ValueError: no kernel has that name, or the object has no ``flash_attn_varlen_func`` that takes FA2's keywords.
        TypeError: `kernel` is none of these.
    """
    if isinstance(kernel, Kernel):
        return kernel
    if not isinstance(kernel, str):
        return ForeignKernel(kernel)
    known = known_kernels()
    if kernel not in known:
        raise ValueError(f"{kernel!r} is no kernel; there are: {', '.join(known)}")
    return known[kernel]
