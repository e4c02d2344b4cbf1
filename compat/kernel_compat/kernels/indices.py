"""Indices of tokens and blocks, by operations that torch.compile compiles rightly and soon."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sequence_numbers", "true_first"]


def sequence_numbers(offsets: Tensor, tokens: int) -> Tensor:
    """The packed sequence of each token, (tokens,) int64; the number of sequences for a token after the last one.

    Args:
        offsets: (sequences + 1,), beginning with 0. One that is less than those before it ends a sequence without tokens.
    """
    index = torch.arange(tokens, dtype=offsets.dtype, device=offsets.device)
    # Not the slice ``offsets[1:]``: compiled for a GPU it is searched from the tensor's first element (pytorch/pytorch#160964).
    return (torch.bucketize(index, offsets.cummax(0).values, right=True) - 1).clamp(min=0)


def true_first(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The stable order of the last dimension that puts the true elements first, and its inverse; int64, of the mask's shape.

    Counted, not sorted: compiling a kernel that sorts takes minutes.
    """
    count = mask.sum(-1, keepdim=True)
    place = torch.where(mask, mask.cumsum(-1), count + (~mask).cumsum(-1)) - 1
    index = torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape)
    return torch.empty_like(place).scatter(-1, place, index), place
