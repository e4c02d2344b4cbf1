"""The rows of each expert, for kernels that take rows sorted by expert. Nothing is read back from the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """Every (token, expert) pair as a row, sorted by expert; pairs whose id is out of range come last.

    Attributes:
        token: (tokens * k,): the token of each row.
        row: (tokens, k): the row of each pair.
        starts: (experts + 1,), int32: the first row of each expert, and the first row after the last expert.
    """

    token: Tensor
    row: Tensor
    starts: Tensor


def in_range(top_k_index: Tensor, experts: int) -> Tensor:
    """Whether each id (tokens, k) is that of an expert; with experts on several ranks, other ids belong to other ranks."""
    return (top_k_index >= 0) & (top_k_index < experts)


def sort(top_k_index: Tensor, experts: int) -> Routing:
    """Sort the pairs of `top_k_index` (tokens, k) by expert, and by token within one."""
    ids = top_k_index.where(in_range(top_k_index, experts), experts).flatten()  # (tokens * k,)
    sorted_ids, order = ids.sort(stable=True)
    bounds = torch.arange(experts + 1, device=ids.device, dtype=ids.dtype)
    starts = torch.searchsorted(sorted_ids, bounds, out_int32=True)
    row = torch.empty_like(order)
    row[order] = torch.arange(len(order), device=ids.device)
    return Routing(order // top_k_index.shape[-1], row.view(top_k_index.shape), starts)


__all__ = ["Routing", "in_range", "sort"]
