"""Multiplication in place by a number on the device, which the host doesn't wait for; by one it is next to no work."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192


def scale_(values: Tensor, factor: Tensor) -> None:
    """Multiply `values`, of any shape, by `factor`, of none."""
    if not values.is_contiguous():
        values.mul_(factor)
        return
    grid = (triton.cdiv(values.numel(), _BLOCK),)
    if values.numel():
        with torch.cuda.device_of(values):
            _scale_kernel[grid](values, factor, values.numel(), BLOCK=_BLOCK, num_warps=8)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_kernel(values: tl.tensor, factor: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    by = tl.load(factor)
    if by != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < size
        tl.store(values + offsets, tl.load(values + offsets, mask=inside) * by, mask=inside)


__all__ = ["scale_"]
