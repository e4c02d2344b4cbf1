"""The all-to-all of DeepSpeed-Ulysses: from slices of the tokens to slices of the heads, and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch's documentation has them as the differentiable and traceable collectives; up to 2.15 the module has this name.
from torch.distributed import _functional_collectives as collectives

__all__ = ["all_to_all", "exchanged_evenly", "gather_heads", "gather_mask", "scatter_heads"]


def all_to_all(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Send slice i of the first dimension to rank i; slice i of the result comes from rank i. Has no gradient."""
    received = collectives.all_to_all_single(x, None, None, dist.group.WORLD if group is None else group)
    # Waits on the stream, not on the host.
    return received.wait() if isinstance(received, collectives.AsyncCollectiveTensor) else received


class _AllToAll(torch.autograd.Function):  # type: ignore[misc]
    """`all_to_all` with a gradient.

    Not ``all_to_all_single_autograd``: its result is an AsyncCollectiveTensor, whose address a kernel reads without waiting.
    Not ``dist.all_to_all_single``: compiled by torch 2.11, its gradients are zero (they are right on 2.10 and 2.12 to 2.15).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradient.contiguous(), ctx.group), None


def exchanged_evenly(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`all_to_all` with a gradient."""
    received: Tensor = _AllToAll.apply(x.contiguous(), group)
    return received


def scatter_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup | None, ranks: int
) -> tuple[Tensor, ...]:
    """From (batch, heads, length, head_dim) to (batch, heads / ranks, ranks * length, head_dim), all three in one all-to-all."""
    if (times := ranks // key.shape[1]) > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    inputs = (query, key, value)
    parts = [x.unflatten(1, (ranks, -1)).permute(1, 0, 3, 2, 4).flatten(3) for x in inputs]
    # Different dtypes are promoted to one that holds them all.
    received = _AllToAll.apply(torch.cat(parts, -1), group)  # (ranks, batch, length, features)
    joined = received.transpose(0, 1).flatten(1, 2).split([part.shape[-1] for part in parts], -1)
    return tuple(
        y.unflatten(-1, (-1, x.shape[-1])).transpose(1, 2).to(x.dtype) for x, y in zip(inputs, joined, strict=True)
    )


def gather_heads(output: Tensor, group: dist.ProcessGroup | None, ranks: int) -> Tensor:
    """From (batch, ranks * length, heads / ranks, head_dim) to (batch, length, heads, head_dim)."""
    received = _AllToAll.apply(output.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous(), group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def gather_mask(mask: Tensor, group: dist.ProcessGroup | None, ranks: int) -> Tensor:
    """From (batch, length) on each rank to (batch, ranks * length) bool on all."""
    slices = all_to_all(mask.to(torch.uint8).expand(ranks, -1, -1).contiguous(), group)
    return slices.transpose(0, 1).flatten(1).bool()
