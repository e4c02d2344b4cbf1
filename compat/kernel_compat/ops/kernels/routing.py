"""Which rows go to which expert, for kernels that take them sorted. Nothing is read back from the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """Every (token, expert) pair as a row, sorted by expert; what no expert of these gets comes last.

    Attributes:
        token: of each row, (tokens * k).
        row: of each pair as they were, (tokens, k).
        starts: the first row of each expert, and one more: the first that is no expert's. int32, (experts + 1).
    """

    token: Tensor
    row: Tensor
    starts: Tensor


def counted(top_k_index: Tensor, experts: int) -> Tensor:
    """Which ids are those of experts; with experts on several ranks, the others stand for another rank's."""
    return (top_k_index >= 0) & (top_k_index < experts)


def sort(top_k_index: Tensor, experts: int) -> Routing:
    """Sort the pairs, those of one expert in the order of their tokens."""
    ids = top_k_index.where(counted(top_k_index, experts), experts).flatten()
    found, order = ids.sort(stable=True)
    bounds = torch.arange(experts + 1, device=ids.device, dtype=ids.dtype)
    starts = torch.searchsorted(found, bounds, out_int32=True)
    row = torch.empty_like(order)
    row[order] = torch.arange(len(order), device=ids.device)
    return Routing(order // top_k_index.shape[-1], row.view(top_k_index.shape), starts)


__all__ = ["Routing", "counted", "sort"]
