"""Masks for torch's flex_attention, as tensors: one compiled kernel serves every mask, and computes the blocks that are seen."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .indices import sequence_numbers, true_first
from .memo import fixed_shapes, memoised_of_all

__all__ = ["FlexMask", "any_mask", "equal_lengths", "packed_sequences"]

#: Queries and keys of a block.
BLOCK = 128
#: A window's side without a limit.
_UNLIMITED = 2**30

Window = tuple[int, int]


class FlexMask(NamedTuple):
    """Which query sees which key: one of its own sequence, within a window, and where `visible` is given by that as well.

    Attributes:
        q_sequence, k_sequence: (batch or 1, length) int32, the sequence of each token; negative for a token in none.
        q_position, k_position: (batch or 1, length) int32. A query is at the distance q_position - k_position from a key.
        left, right: (1,) int32, the greatest distance to keys on the left and on the right.
        visible: (batch or 1, heads or 1, q_len, kv_len) bool, or None.
        partial, full: (batch or 1, heads or 1, q_blocks, kv_blocks) bool, the blocks of which some pairs or all are visible.
            Where it isn't known, a block is partial.
        blocks: from `partial` and `full`, what a ``BlockMask`` is made of.
    """

    q_sequence: Tensor
    k_sequence: Tensor
    q_position: Tensor
    k_position: Tensor
    left: Tensor
    right: Tensor
    visible: Tensor | None
    partial: Tensor
    full: Tensor
    blocks: tuple[Tensor, ...]


def equal_lengths(q_len: int, kv_len: int, causal: bool, window: Window, device: torch.device) -> FlexMask | None:
    """The mask of rows of equal lengths, aligned to the bottom right; None if every query sees every key."""
    window = _limits(causal, window)
    if window == (_UNLIMITED, _UNLIMITED) or (q_len == 1 and window[0] >= kv_len):
        return None
    make = _equal_lengths.__wrapped__ if _must_not_keep(device) else _equal_lengths
    mask: FlexMask = make(q_len, kv_len, window, device)
    return mask


@lru_cache(maxsize=16)
def _equal_lengths(q_len: int, kv_len: int, window: Window, device: torch.device) -> FlexMask:
    with torch.inference_mode(False):
        q_position = torch.arange(kv_len - q_len, kv_len, dtype=torch.int32, device=device)[None]
        k_position = torch.arange(kv_len, dtype=torch.int32, device=device)[None]
        return _mask(torch.zeros_like(q_position), torch.zeros_like(k_position), q_position, k_position, window)


def packed_sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tokens: tuple[int, int], causal: bool, window: Window
) -> FlexMask:
    """The mask of packed sequences, each aligned to the bottom right. Made once a forward for a pair of offsets.

    Args:
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,).
        tokens: how many queries and keys there are. Those behind the last offset are in no sequence.
    """

    def make() -> FlexMask:
        with torch.inference_mode(False):
            # Offsets decrease where transformers 5.0 to 5.5 appends padding: such sequences have no token.
            q_offsets, k_offsets = (x.to(torch.int32).cummax(0).values for x in (cu_seqlens_q, cu_seqlens_k))
            q_index, k_index = (torch.arange(total, dtype=torch.int32, device=q_offsets.device) for total in tokens)
            q_sequence, k_sequence = map(sequence_numbers, (q_offsets, k_offsets), tokens)
            ends = (k_offsets - q_offsets)[1:]
            q_position = q_index + ends[q_sequence.clamp(max=len(ends) - 1)]
            q_sequence = q_sequence.where(q_sequence < len(ends), -1)
            k_sequence = k_sequence.where(k_sequence < len(ends), -2)
            of_queries, of_keys = (x[None].to(torch.int32) for x in (q_sequence, k_sequence))
            return _mask(of_queries, of_keys, q_position[None], k_index[None], _limits(causal, window))

    return memoised_of_all((cu_seqlens_q, cu_seqlens_k), ("flex", *tokens, causal, window), make)


def any_mask(
    visible: Tensor | None,
    segments: tuple[Tensor, Tensor] | None,
    shape: tuple[int, int],
    causal: bool,
    window: Window,
    device: torch.device,
) -> FlexMask | None:
    """A mask of equal lengths that hides the pairs of `visible` and of different segments as well. Made once a forward.

    Args:
        visible: (batch or 1, heads or 1, q_len, kv_len) bool.
        segments: (batch, q_len) and (batch, kv_len); negative for a token that sees nothing, and that nothing sees.
        shape: q_len and kv_len.
    """
    if visible is None and segments is None:
        return equal_lengths(*shape, causal, window, device)

    def make() -> FlexMask:
        with torch.inference_mode(False):
            q_position, k_position = (
                torch.arange(shape[1] - n, shape[1], dtype=torch.int32, device=device)[None] for n in shape
            )
            numbers = segments or (torch.zeros_like(q_position), torch.zeros_like(k_position))
            q_segment, k_segment = (x.to(torch.int32) for x in numbers)
            mask = _mask(q_segment, k_segment, q_position, k_position, _limits(causal, window))
            return mask if visible is None else _hiding(mask, visible)

    tensors = (*(segments or ()), *(() if visible is None else (visible,)))
    return memoised_of_all(tensors, ("flex", *shape, causal, window), make)


def _hiding(structure: FlexMask, visible: Tensor) -> FlexMask:
    q_len, kv_len = visible.shape[-2:]
    padded = pad(visible, (0, -kv_len % BLOCK, 0, -q_len % BLOCK))
    blocks = padded.unflatten(-2, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    some, every = blocks.any(-1).any(-2), blocks.all(-1).all(-2)
    full = structure.full & every
    partial = (structure.partial | structure.full) & some & ~full
    return structure._replace(visible=visible, partial=partial, full=full, blocks=_block_lists(partial, full))


def _must_not_keep(device: torch.device) -> bool:
    return fixed_shapes(torch.empty(0, device=device))


def _limits(causal: bool, window: Window) -> Window:
    left, right = (_UNLIMITED if side < 0 else side for side in window)
    return left, 0 if causal else right


def _mask(q_sequence: Tensor, k_sequence: Tensor, q_position: Tensor, k_position: Tensor, window: Window) -> FlexMask:
    (q_first, q_last), (k_first, k_last) = (_range_of_blocks(x) for x in (q_sequence, k_sequence))
    (q_low, q_high), (k_low, k_high) = (_range_of_blocks(x) for x in (q_position, k_position))
    left, right = window

    def pairs(compare: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor) -> Tensor:
        return compare(q[:, None, :, None], k[:, None, None, :])

    # A pair of blocks is left out if no pair of values in their ranges is visible.
    some = pairs(torch.ge, q_last, k_first) & pairs(torch.le, q_first, k_last)
    some &= pairs(torch.le, q_low - left, k_high) & pairs(torch.ge, q_high + right, k_low)
    every = pairs(torch.eq, q_first, k_last) & pairs(torch.eq, q_last, k_first)
    every &= pairs(torch.le, q_high - left, k_low) & pairs(torch.ge, q_low + right, k_high)
    # A block at the end of a row may have less than its number of tokens.
    q_whole, k_whole = (_whole_blocks(x) for x in (q_sequence, k_sequence))
    full = some & every & pairs(torch.logical_and, q_whole, k_whole)
    partial = some & ~full
    lists = _block_lists(partial, full)
    on_left, on_right = (torch.full((1,), side, dtype=torch.int32, device=q_sequence.device) for side in window)
    return FlexMask(q_sequence, k_sequence, q_position, k_position, on_left, on_right, None, partial, full, lists)


def _range_of_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of each block: (rows, length) to (rows, blocks)."""
    last = values[:, -1:].expand(-1, -values.shape[1] % BLOCK)
    blocks = torch.cat([values, last], 1).unflatten(1, (-1, BLOCK))
    return blocks.amin(-1), blocks.amax(-1)


def _whole_blocks(sequence: Tensor) -> Tensor:
    return pad(sequence >= 0, (0, -sequence.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK)).all(-1)


def _block_lists(partial: Tensor, full: Tensor) -> tuple[Tensor, ...]:
    """For each row of blocks how many there are and which, partial and full; then the same for each column."""
    lists: list[Tensor] = []
    for blocks in (partial, full, partial.mT, full.mT):
        lists += [blocks.sum(-1, dtype=torch.int32), true_first(blocks)[0].to(torch.int32).contiguous()]
    return tuple(lists)
