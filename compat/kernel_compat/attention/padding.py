"""Padded batches: from a 2D mask to the sequences of its rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.memo import memoised
from .boundaries import Sequences
from .tensors import offsets_of, true_indices

__all__ = ["padding", "padding_segments", "query_mask", "runs"]


def padding(mask: Tensor, q_len: int, padded_queries: bool) -> tuple[Sequences, Sequences] | None:
    """The sequences of the queries and of the keys, a row each; None if there is no padding. Synchronises once a forward for a mask.

    Args:
        mask: (batch, kv_len), 1 or True for tokens. The queries are its last q_len columns.
        padded_queries: whether the mask applies to the queries too; False for cross-attention.

    Raises:
        ValueError: the mask holds other values than 0 and 1.
    """
    return memoised(mask, ("padding", q_len, padded_queries), lambda: _padding(mask, q_len, padded_queries))


def _padding(mask: Tensor, q_len: int, padded_queries: bool) -> tuple[Sequences, Sequences] | None:
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
    of_keys = Sequences(true_indices(valid, k_total), offsets_of(k_lens), k_max, most_runs > 1)
    if padded_queries and q_len == valid.shape[1] > 1:
        return of_keys, of_keys
    return Sequences(true_indices(queries, q_total), offsets_of(q_lens), q_max, False), of_keys


def padding_segments(mask: Tensor, batch: int, q_len: int, padded_queries: bool) -> tuple[Tensor, Tensor]:
    """0 for tokens and a negative number for padding, for the queries and for the keys: (batch, length), int32.

    Args:
        mask: (batch or 1, kv_len), 1 or True for tokens.
    """

    def find() -> tuple[Tensor, Tensor]:
        keys = mask.bool().expand(batch, -1)
        queries = query_mask(keys, q_len, padded_queries)
        return queries.to(torch.int32) - 1, 2 * (keys.to(torch.int32) - 1)

    return memoised(mask, ("segments", batch, q_len, padded_queries), find)


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
