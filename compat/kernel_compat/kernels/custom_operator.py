"""Kernels that torch.compile calls as an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["operator"]


def operator(name: str, kernel: Callable[..., Any], outputs: Callable[..., Any], schema: str | None = None) -> Any:
    """A kernel as a custom operator: for torch.compile, and for tensors on the meta device.

    `torch.library.triton_op` would work as well, but its `wrap_triton` refuses interpreted kernels, and inductor fuses nothing
    with a Triton kernel that is not its own. Eager code calls an autograd.Function: dispatching a custom operator with a
    gradient takes longer than a small kernel. Dynamo must not trace that function: it mixes up its arguments, or refuses the
    same tensor twice.

    Args:
        outputs: takes the kernel's arguments and returns results of its shapes, dtypes and strides.
        schema: torch's, as ``(Tensor x) -> Tensor``; None to read it from the kernel's annotations.
    """
    custom = torch.library.custom_op(f"kernel_compat::{name}", kernel, mutates_args=(), schema=schema)
    custom.register_fake(outputs)
    return custom
