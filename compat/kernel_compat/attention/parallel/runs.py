"""Indices of tokens that come in runs, made on the device of runs that are known on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .split import Interval

__all__ = ["Run", "indices_of", "tokens_of"]

#: The first index, and how many there are.
Run = tuple[int, int]


def indices_of(runs: Sequence[Run], device: torch.device, step: int = 1) -> Tensor:
    """(tokens,) int64: the indices first, first + step, ... of each run, one run after the other. Doesn't wait for the device."""
    ends = [*accumulate((count for _, count in runs), initial=0)]
    # With a multiple of the place added, each token's index.
    bases = [first - end * step for (first, _), end in zip(runs, ends, strict=False)]
    table = torch.tensor([bases, [count for _, count in runs]], dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        table = table.pin_memory()
    table = table.to(device, non_blocking=True)
    places = torch.arange(ends[-1], device=device)
    return torch.repeat_interleave(table[0], table[1], output_size=ends[-1]).add_(places, alpha=step)


def tokens_of(intervals: Iterable[Interval], device: torch.device) -> Tensor:
    """(tokens,) int64: the tokens of intervals, one interval after the other."""
    return indices_of([(start, stop - start) for start, stop in intervals], device)
