"""Padded batches: from a 2D mask to the indices and lengths that varlen kernels take."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .tensors import memoised, offsets_of, true_indices

__all__ = ["Padding", "padding", "query_mask", "runs"]


class Padding(NamedTuple):
    """The tokens of a padded batch.

    Attributes:
        q_index, k_index: (tokens,) int64, their indices in the flattened (batch, length).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32.
        max_seqlen_q, max_seqlen_k: length of the longest row.
        interior: whether there is padding between two tokens of a row.
    """

    q_index: Tensor
    k_index: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    interior: bool


def padding(mask: Tensor, q_len: int, padded_queries: bool) -> Padding | None:
    """The tokens of a padded batch; None if there is no padding. Synchronises once a mask.

    Args:
        mask: (batch, kv_len), 1 or True for tokens. The queries are its last q_len columns.
        padded_queries: whether the mask applies to the queries too; False for cross-attention.

    Raises:
        ValueError: the mask holds other values than 0 and 1.
    """
    return memoised(mask, ("padding", q_len, padded_queries), lambda: _padding(mask, q_len, padded_queries))


def _padding(mask: Tensor, q_len: int, padded_queries: bool) -> Padding | None:
    valid = mask.bool()
    queries = query_mask(valid, q_len, padded_queries)
    k_lens, q_lens = valid.sum(1, dtype=torch.int32), queries.sum(1, dtype=torch.int32)
    invalid = (valid != mask).any()
    facts = torch.stack([k_lens.sum(), k_lens.max(), q_lens.sum(), q_lens.max(), runs(valid).max(), invalid])
    k_total, k_max, q_total, q_max, most_runs, is_invalid = facts.tolist()
    if is_invalid:
        raise ValueError(
            "a 2D attention mask must hold 1 for tokens and 0 for padding, and this one holds other values"
        )
    if k_total == valid.numel():
        return None
    same = queries.shape == valid.shape and padded_queries and q_len > 1
    q_index, cu_seqlens_q = true_indices(queries, q_total), offsets_of(q_lens)
    return Padding(
        q_index,
        q_index if same else true_indices(valid, k_total),
        cu_seqlens_q,
        cu_seqlens_q if same else offsets_of(k_lens),
        q_max,
        k_max,
        most_runs > 1,
    )


def query_mask(valid: Tensor, q_len: int, padded_queries: bool) -> Tensor:
    """(batch, q_len) bool, False for padding queries, from a bool mask (batch, kv_len) of the keys.

    A single query is never padding: a mask as long as a static cache ends in zeros that don't refer to it.
    """
    if padded_queries and q_len > 1:
        return valid[:, valid.shape[1] - q_len :]
    return valid.new_ones(valid.shape[0], q_len)


def runs(valid: Tensor) -> Tensor:
    """(batch,): how many runs of tokens each row of a bool mask has. More than one means padding between tokens."""
    return valid[:, :1].sum(1) + (valid[:, 1:] & ~valid[:, :-1]).sum(1)
