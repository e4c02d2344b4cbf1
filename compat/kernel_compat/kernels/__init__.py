"""The kernels of this library, and how an object with FlashAttention's functions becomes one."""

from __future__ import annotations

from typing import Any

from .catalog import CATALOG, FLEXIBLE
from .foreign import ForeignKernel, ForwardOnly
from .kernel import Kernel
from .layered import LayeredKernel
from .needs import Needs, unmet
from .options import Functions
from .provider import Features, Limit, Provider

__all__ = [
    "Features",
    "ForwardOnly",
    "Functions",
    "Kernel",
    "LayeredKernel",
    "Limit",
    "Needs",
    "Provider",
    "as_kernel",
    "known_kernels",
    "unmet",
]

_KERNELS = {name: Kernel(name, packages) for name, packages in CATALOG.items()}


def known_kernels() -> dict[str, Kernel]:
    """The library's kernels by name, the newest FlashAttention first."""
    return dict(_KERNELS)


def as_kernel(kernel: Any) -> Kernel:
    """A kernel by its name, a `Kernel` as it is, or a kernel made from any object with FlashAttention's functions.

    A list of these, or ``"auto"`` for all of the library's in their order, is a kernel that gives each call to the first of them
    that computes it.

    Raises:
        ValueError: no kernel has that name, the list is empty, or the object has no ``flash_attn_varlen_func`` that takes FA2's
            keywords.
        TypeError: `kernel` is none of these.
    """
    if isinstance(kernel, Kernel):
        return kernel
    if kernel == "auto":
        # On a CPU the reference kernel is faster than torch's flex_attention, and has gradients.
        return LayeredKernel("auto", sorted(_KERNELS.values(), key=lambda kernel: kernel.name == FLEXIBLE))
    if isinstance(kernel, (list, tuple)):
        members = [as_kernel(member) for member in kernel]
        return LayeredKernel("+".join(member.name for member in members), members)
    if not isinstance(kernel, str):
        return ForeignKernel(kernel)
    if kernel not in _KERNELS:
        raise ValueError(f"{kernel!r} is no kernel; there are: {', '.join(_KERNELS)}, and 'auto'")
    return _KERNELS[kernel]
