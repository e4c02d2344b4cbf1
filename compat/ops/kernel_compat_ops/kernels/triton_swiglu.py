"""The backward of ``silu(gate) * up`` in Triton: reads three tensors, writes two new ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def swiglu_backward(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, computed in float32 and rounded once.

    Args:
        gate: of any shape and floating dtype; `up` and `gradient`, that of the product, are like it.
    """
    gate, up, gradient = gate.contiguous(), up.contiguous(), gradient.contiguous()
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    size = gate.numel()
    if size:
        with torch.cuda.device_of(gate):
            grid = (triton.cdiv(size, _BLOCK),)
            _backward_kernel[grid](gate, up, gradient, d_gate, d_up, size, BLOCK=_BLOCK)
    return d_gate, d_up


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    gradient: tl.tensor,
    d_gate: tl.tensor,
    d_up: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program computes `BLOCK` of the `size` elements, which are in the same order in all five tensors."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gate + at, mask=inside).to(tl.float32)
    u = tl.load(up + at, mask=inside).to(tl.float32)
    d = tl.load(gradient + at, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    tl.store(d_gate + at, d * (silu * (1 - sigmoid) + sigmoid) * u, mask=inside)
    tl.store(d_up + at, d * silu, mask=inside)


__all__ = ["swiglu_backward"]
