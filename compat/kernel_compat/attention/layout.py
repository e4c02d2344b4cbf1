"""Where the sequences of a batch lie: one frozen value for a forward and a type of layer, which computes the attention of a layer.

`resolution` makes them. A layer's own tensors come in at `SequenceLayout.attend`, so that another way to lay out sequences is another
subclass, and no layer and no kernel changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import Functions
from ..kernels.options import Lengths, Mask
from .boundaries import Sequences
from .call import AttentionCall

__all__ = ["MaskedLayout", "PackedLayout", "PagedLayout", "SequenceLayout", "SortedLayout"]


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """Rows without padding: each is a sequence.

    Attributes:
        causal: whether a query sees no later key, aligned to the bottom right.
        window: how many keys to the left and to the right of its own a query sees; -1 for no limit.
        kv_length: how many keys are used. The rest are unused room of a static cache.
    """

    causal: bool
    window: tuple[int, int]
    kv_length: int

    def attend(self, functions: Functions, call: AttentionCall) -> Tensor:
        """The attention of one layer.

        Args:
            functions: of the kernel.
            call: of the layer; this layout's causality and window count, and not the call's.

        Returns:
            (batch, q_length, heads, value's head_dim). Queries that are in no sequence are zero.
        """
        key, value, options = self._used(call.key), self._used(call.value), call.options(self.causal, self.window)
        if call.bias is None:
            return functions.attend(call.query, key, value, options)
        return functions.attend(call.query, key, value, options, mask=Mask(bias=call.bias[..., : self.kv_length]))

    def _used(self, x: Tensor) -> Tensor:
        return x if x.shape[1] == self.kv_length else x[:, : self.kv_length]


@dataclass(frozen=True, eq=False)
class PackedLayout(SequenceLayout):
    """Sequences of any length: packed ones, the rows of a padded batch without their padding, or both.

    Attributes:
        queries, keys: the sequences in the flattened rows. The i-th of both belong together.
    """

    queries: Sequences
    keys: Sequences

    def attend(self, functions: Functions, call: AttentionCall) -> Tensor:
        """See `SequenceLayout.attend`; there is no bias."""
        assert call.bias is None
        queries, keys, query = self.queries, self.keys, call.query
        batch, q_length = query.shape[:2]
        q, k, v = query.flatten(0, 1), self._used(call.key).flatten(0, 1), self._used(call.value).flatten(0, 1)
        if queries.indices is not None:
            if not queries.max_seqlen:  # every token is padding
                return query.new_zeros(batch, q_length, query.shape[2], v.shape[-1])
            q, k, v = q[queries.indices], k[keys.indices], v[keys.indices]
        lengths = Lengths(queries.cu_seqlens, keys.cu_seqlens, queries.max_seqlen, keys.max_seqlen)
        out = functions.attend(q, k, v, call.options(self.causal, self.window), lengths)
        if queries.indices is not None:
            out = query.new_zeros(batch * q_length, *out.shape[1:]).index_copy(0, queries.indices, out)
        return out.unflatten(0, (batch, q_length))


@dataclass(frozen=True, eq=False)
class SortedLayout(SequenceLayout):
    """A padded batch in shapes that don't depend on the mask's values: in each row the tokens come first, and then padding.

    Attributes:
        q_order, k_order: (batch, length) int64, the indices of a row's tokens, then those of its padding.
        q_places: (batch, q_length) int64, the inverse of `q_order`.
        is_query: (batch, q_length) bool, False for padding.
        lengths: of the rows' tokens and of the rows' padding, in turn.
    """

    q_order: Tensor
    k_order: Tensor
    q_places: Tensor
    is_query: Tensor
    lengths: Lengths

    def attend(self, functions: Functions, call: AttentionCall) -> Tensor:
        """See `SequenceLayout.attend`; there is no bias."""
        assert call.bias is None
        q = _sorted(call.query, self.q_order).flatten(0, 1)
        k, v = (_sorted(self._used(x), self.k_order).flatten(0, 1) for x in (call.key, call.value))
        out = functions.attend(q, k, v, call.options(self.causal, self.window), self.lengths)
        out = _sorted(out.unflatten(0, call.query.shape[:2]), self.q_places)
        return torch.where(self.is_query[:, :, None, None], out, 0)


def _sorted(x: Tensor, order: Tensor) -> Tensor:
    """(batch, length, heads, head_dim), with each row's tokens in another order."""
    return x.gather(1, order[:, :, None, None].expand_as(x))


@dataclass(frozen=True, eq=False)
class MaskedLayout(SequenceLayout):
    """Rows under a mask of any kind, for kernels that take one.

    Attributes:
        mask: besides causality and the window.
    """

    mask: Mask

    def attend(self, functions: Functions, call: AttentionCall) -> Tensor:
        """See `SequenceLayout.attend`."""
        mask, key, value = self.mask, self._used(call.key), self._used(call.value)
        if call.bias is not None:
            bias = call.bias[..., : self.kv_length]
            mask = mask._replace(bias=bias if mask.bias is None else bias + mask.bias)
        return functions.attend(call.query, key, value, call.options(self.causal, self.window), mask=mask)


@dataclass(frozen=True, eq=False)
class PagedLayout(SequenceLayout):
    """One new token of each sequence, over one layer's cache in pages.

    Attributes:
        k_cache, v_cache: (pages, tokens of a page, kv_heads, head_dim).
        cache_seqlens: (sequences,) int32, the numbers of tokens in the cache.
        pages: (sequences, pages of a sequence) int32, the pages of each sequence.
    """

    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    pages: Tensor

    def attend(self, functions: Functions, call: AttentionCall) -> Tensor:
        """See `SequenceLayout.attend`: of one row, (1, sequences, heads, head_dim); there is no bias."""
        assert functions.attend_paged is not None
        q, k, v = (x.transpose(0, 1) for x in (call.query, call.key, call.value))
        pages = (self.cache_seqlens, self.pages)
        options = call.options(self.causal, self.window)
        return functions.attend_paged(q, self.k_cache, self.v_cache, k, v, *pages, options).transpose(0, 1)
