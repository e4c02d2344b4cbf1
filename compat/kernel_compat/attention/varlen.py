"""An `AttentionCall` computed by a kernel, whichever way its tokens are laid out: packed, padded or in pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedFeatureError
from ..kernels import Kernel
from ..kernels.catalog import instead
from ..kernels.indices import true_first
from ..kernels.memo import fixed_shapes
from .boundaries import Sequences, longest, require_total
from .call import AttentionCall, PackedLengths
from .padding import padding, padding_segments, query_mask, runs
from .roles import KEY_OFFSETS, PAGES, QUERY_OFFSETS
from .tensors import offsets_of

__all__ = ["packed_attention", "padded_attention", "paged_attention", "sequences_attention"]


def packed_attention(functions: Any, call: AttentionCall, lengths: PackedLengths, options: dict[str, Any]) -> Tensor:
    """Attention within the sequences of given offsets. Padding, if there is any, is in sequences of its own.

    Args:
        functions: a kernel's `Functions`.
        options: the keywords of `AttentionCall.options`.

    Returns:
        (batch, q_len, heads, value's head_dim), as from all functions of this module but `paged_attention`.

    Raises:
        ValueError: the offsets of a batch of several rows don't end with the tokens.
    """
    batch, q_len = call.query.shape[:2]
    q_tokens, k_tokens = batch * q_len, batch * call.key.shape[1]
    (cu_q, cu_k), max_q, max_k = lengths.offsets(), lengths.longest_q, lengths.longest_k
    if fixed_shapes(call.query):  # values can't be read: any upper bound is right
        max_q = max_q if isinstance(max_q, int) else q_tokens
        max_k = max_k if isinstance(max_k, int) else k_tokens
        if batch > 1:
            for offsets, tokens in ((cu_q, q_tokens), (cu_k, k_tokens)):
                torch._assert_async(offsets[-1] == tokens, "cu_seq_lens_* don't end where the batch does")
    else:
        max_q = longest(cu_q) if max_q is None or isinstance(max_q, Tensor) else int(max_q)
        max_k = longest(cu_k) if max_k is None or isinstance(max_k, Tensor) else int(max_k)
        if batch > 1:  # packed sequences are usually in one row: offsets may be meant for each row
            require_total(cu_q, q_tokens, QUERY_OFFSETS.named())
            require_total(cu_k, k_tokens, KEY_OFFSETS.named())
    queries = Sequences(None, cu_q.to(torch.int32), max_q)
    # The same offsets for both: torch 2.15 chooses its fastest backend by that.
    keys = Sequences(None, queries.cu_seqlens if cu_k is cu_q else cu_k.to(torch.int32), max_k)
    return sequences_attention(functions, call, queries, keys, options)


def sequences_attention(
    functions: Any, call: AttentionCall, queries: Sequences, keys: Sequences, options: dict[str, Any]
) -> Tensor:
    """Attention within sequences. Queries that are in none are zero.

    Raises:
        ValueError: a sliding window over interior padding.
    """
    if keys.interior_padding and options["window_size"] != (-1, -1):
        raise ValueError(
            "a sliding window over a mask with padding between tokens: distances would shrink with the padding. "
            f"{instead('', 'masks')}"
        )
    query = call.query
    batch, q_len, heads = query.shape[:3]
    same = keys.cu_seqlens is queries.cu_seqlens
    queries, keys = queries.to(query.device), keys.to(query.device)
    flat = [x.flatten(0, 1) for x in (query, call.key, call.value)]
    if queries.indices is not None:
        if not queries.max_seqlen:
            return query.new_zeros(batch, q_len, heads, call.value.shape[-1])
        flat = [flat[0][queries.indices], flat[1][keys.indices], flat[2][keys.indices]]
    output: Tensor = functions.flash_attn_varlen_func(
        *flat,
        cu_seqlens_q=queries.cu_seqlens,
        cu_seqlens_k=queries.cu_seqlens if same else keys.cu_seqlens,
        max_seqlen_q=queries.max_seqlen,
        max_seqlen_k=keys.max_seqlen,
        **options,
    )
    if queries.indices is not None:
        output = query.new_zeros(batch * q_len, *output.shape[1:]).index_copy(0, queries.indices, output)
    return output.unflatten(0, (batch, q_len))


def padded_attention(
    functions: Any, call: AttentionCall, mask: Tensor, padded_queries: bool, options: dict[str, Any]
) -> Tensor:
    """Attention over a padded batch. Padding queries are zero.

    Args:
        mask: (batch or 1, kv_len), 1 or True for tokens.
        padded_queries: whether the mask applies to the queries too.

    Raises:
        ValueError: the mask doesn't fit the batch, or a sliding window over interior padding, by a kernel without masks of any kind.
    """
    (batch, q_len), kv_len = call.query.shape[:2], call.key.shape[1]
    if mask.shape[0] != batch:
        if mask.shape[0] != 1:
            raise ValueError(f"an attention mask for {mask.shape[0]} sequences does not fit a batch of {batch}")
        mask = mask.expand(batch, -1)
    if padded_queries and kv_len < q_len:
        raise ValueError(f"an attention mask of length {kv_len} does not fit {q_len} queries")
    if fixed_shapes(call.query):
        return _padded_by_sorting(functions, call, mask.bool(), padded_queries, options)
    found = padding(mask, q_len, padded_queries)
    if found is None:
        output: Tensor = functions.flash_attn_func(call.query, call.key, call.value, **options)
        return output
    if found[1].interior_padding and options["window_size"] != (-1, -1) and functions.masked_attention is not None:
        segments = padding_segments(mask, batch, q_len, padded_queries)
        masked: Tensor = functions.masked_attention(call.query, call.key, call.value, segments=segments, **options)
        return masked
    return sequences_attention(functions, call, *found, options)


def _padded_by_sorting(
    functions: Any, call: AttentionCall, mask: Tensor, padded_queries: bool, options: dict[str, Any]
) -> Tensor:
    """`padded_attention` in fixed shapes: the tokens of each row come first, and its padding is a sequence of its own."""
    query, key, value = call.query, call.key, call.value
    (batch, q_len), kv_len = query.shape[:2], key.shape[1]
    queries = query_mask(mask, q_len, padded_queries)
    if options["window_size"] != (-1, -1):
        torch._assert_async((runs(mask) <= 1).all(), "a sliding window over a mask with padding between tokens")

    def offsets(valid: Tensor) -> Tensor:
        lengths = valid.sum(1, dtype=torch.int32)
        return offsets_of(torch.stack([lengths, valid.shape[1] - lengths], 1).flatten())

    def sort(x: Tensor, order: Tensor) -> Tensor:
        return x.gather(1, order[:, :, None, None].expand_as(x))

    k_order, _ = true_first(mask)
    q_order, q_place = true_first(queries)
    packed = functions.flash_attn_varlen_func(
        sort(query, q_order).flatten(0, 1),
        sort(key, k_order).flatten(0, 1),
        sort(value, k_order).flatten(0, 1),
        cu_seqlens_q=offsets(queries),
        cu_seqlens_k=offsets(mask),
        max_seqlen_q=q_len,
        max_seqlen_k=kv_len,
        **options,
    )
    output = sort(packed.unflatten(0, (batch, q_len)), q_place)
    return torch.where(queries[:, :, None, None], output, 0)


def paged_attention(kernel: Kernel, call: AttentionCall, paging: dict[str, Any]) -> Tensor:
    """One new token for each sequence, over a cache in pages.

    Args:
        call: query, key and value of shape (1, sequences, heads, head_dim), and the lengths of the keys.
        paging: the arguments of transformers' paged cache: ``k_cache``, ``v_cache``, ``block_table``.

    Returns:
        (1, sequences, heads, head_dim).

    Raises:
        UnsupportedFeatureError: the kernel has no paged cache.
    """
    kvcache = kernel.load().flash_attn_with_kvcache
    if kvcache is None:
        raise UnsupportedFeatureError("a paged cache", kernel.name, instead(kernel.name, "paged"))
    query, key, value = (x.transpose(0, 1) for x in (call.query, call.key, call.value))
    offsets = None if call.lengths is None else call.lengths.offsets_k
    if offsets is None:
        raise ValueError(f"a paged cache without {KEY_OFFSETS.named()}")
    sequences, window = query.shape[0], call.sliding_window
    output: Tensor = kvcache(
        query,
        paging["k_cache"],
        paging["v_cache"],
        key,
        value,
        cache_seqlens=(offsets[1 : sequences + 1] - offsets[:sequences] - 1).to(torch.int32),
        block_table=paging[PAGES.named(paging)],
        softmax_scale=call.scale,
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
        softcap=call.softcap or 0.0,
        s_aux=None if call.sinks is None else call.sinks.to(query.dtype),
    )
    return output.transpose(0, 1)
