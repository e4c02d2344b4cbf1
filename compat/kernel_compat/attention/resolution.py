"""From the arguments of a layer and the forward in progress to the layout of its sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedFeatureError
from ..kernels import Functions
from ..kernels.catalog import instead
from ..kernels.indices import true_first
from ..kernels.memo import fixed_shapes, memoised
from ..kernels.options import Lengths, Mask
from .boundaries import (
    Sequences,
    longest,
    require_agreement,
    require_total,
    sequences_of_positions,
    sequences_of_segments,
)
from .call import AttentionCall, PackedLengths
from .forward_context import ForwardContext
from .layout import MaskedLayout, PackedLayout, PagedLayout, SequenceLayout, SortedLayout
from .mask_reduction import ReducedMask, reduce_mask, require_own_keys, visible_and_bias
from .padding import padding, padding_segments, query_mask, runs
from .roles import KEY_OFFSETS, PAGES, QUERY_OFFSETS, READ
from .tensors import offsets_of, require, require_readable, same_storage

__all__ = ["layout_of", "paged_layout"]

#: The first fields of a layout: causality, the window and the number of keys.
_Pattern = tuple[bool, tuple[int, int], int]


def layout_of(
    call: AttentionCall,
    functions: Functions,
    context: ForwardContext | None,
    spread: Callable[[SequenceLayout, AttentionCall], SequenceLayout] | None = None,
    chunk: int = 0,
) -> SequenceLayout:
    """The layout of a call: found once for a forward and a type of layer, as long as nothing writes into the tensors it is found in.

    Args:
        context: the forward in progress.
        spread: makes the layout of a rank's share of the tokens of that of all tokens, whose call this is.
        chunk: that `spread` cuts sequences into; 0 for none.

    Raises:
        UnsupportedFeatureError: the kernel can't compute it.
        ValueError: the arguments contradict each other.
    """

    def find() -> SequenceLayout:
        layout = _find(call, functions, context, spread is not None)
        return layout if spread is None else spread(layout, call)

    key = None if context is None else _key(call, functions, context)
    if context is None or key is None:
        return find()
    key = (*key, spread is not None, chunk)
    if (known := context.layouts.get(key)) is None:
        # What it was found in is kept, too: an id is unique only as long as its object lives.
        known = context.layouts[key] = (find(), _deciding(call))
    return known[0]


def _key(call: AttentionCall, functions: Functions, context: ForwardContext) -> tuple[Any, ...] | None:
    """What the layout of a call depends on, beside its forward; None where values can't be kept: see `memoised`."""
    query = call.query
    if fixed_shapes(query):
        return None
    key = [query.shape[:2], call.key.shape[1], query.device, functions.masks, call.bias is None, _trains(call)]
    key += [call.causal, call.sliding_window, call.local_window, len(context.records), len(context.full_masks)]
    for decides in _deciding(call):
        if isinstance(decides, Tensor):
            # The graph behind a mask that needs a gradient lasts for one backward, and a checkpoint recomputes layers in it.
            if decides.is_inference() or decides.requires_grad:
                return None
            key += [id(decides), decides._version]
        else:
            key.append(decides)
    return tuple(key)


def _trains(call: AttentionCall) -> bool:
    """Whether a call is computed with gradients, in which more is checked."""
    tensors = (call.query, call.key, call.value)
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _deciding(call: AttentionCall) -> tuple[Any, ...]:
    """The arguments whose values say where sequences and padding are."""
    return (call.mask, call.positions, *(call.lengths or ()))


def _find(call: AttentionCall, functions: Functions, context: ForwardContext | None, is_spread: bool) -> SequenceLayout:
    require_readable(READ, _deciding(call))
    in_full = functions.masks and call.mask is not None and call.mask.ndim == 4
    if in_full and not (call.bias is None and _reducible(call, context)):
        return _of_any_mask(call, context, is_spread)
    reduced, own = _resolve_mask(call, context)
    if reduced.from_4d and own is not None and call.query.shape[1] > 1 and _made_in_full(call, own):
        _require_separation(call, own)  # chunks, say, which are counted along the row, look like packed sequences
    (batch, q_len), kv_len, window = call.query.shape[:2], reduced.kv_len, reduced.window
    if call.local_window and call.local_window < kv_len:
        window = (min(call.local_window - 1, window[0] if window[0] >= 0 else kv_len), 0)
    pattern = (reduced.causal, window, kv_len)
    lengths = own.arguments.lengths if call.lengths is None and own is not None else call.lengths
    if call.bias is not None:
        if lengths is not None or (_sequences(call, reduced, own) if own is None else own.sequences(True)) is not None:
            raise UnsupportedFeatureError(
                "packed sequences", "a bias of the scores", "Pass the sequences as rows of a batch."
            )
        if reduced.padding is not None:
            segments = padding_segments(reduced.padding, batch, q_len, reduced.padded_queries)
            return MaskedLayout(*pattern, Mask(segments=segments))
    elif lengths is not None:
        _check_lengths(lengths, call, reduced, own)
        if (own is None or own.has_given_offsets) and _trains(call):
            _require_covering(lengths, call)
        return _packed(pattern, call, *_given_sequences(lengths, call, kv_len))
    elif (sequences := _sequences(call, reduced, own)) is not None:
        return _packed(pattern, call, sequences, sequences)
    elif reduced.padding is not None:
        return _of_padding(pattern, call, reduced, functions)
    return SequenceLayout(*pattern)


def paged_layout(call: AttentionCall, paging: dict[str, Any], functions: Functions, kernel: str) -> PagedLayout:
    """The layout of one new token for each sequence, over a cache in pages.

    Args:
        call: query, key and value of shape (1, sequences, heads, head_dim), and the lengths of the keys.
        paging: the arguments of transformers' paged cache: ``k_cache``, ``v_cache`` and the pages.
        kernel: its name.

    Raises:
        UnsupportedFeatureError: the kernel has no paged cache.
    """
    if functions.attend_paged is None:
        raise UnsupportedFeatureError("a paged cache", kernel, instead(kernel, "paged"))
    offsets = None if call.lengths is None else call.lengths.offsets_k
    if offsets is None:
        raise ValueError(f"a paged cache without {KEY_OFFSETS.named()}")
    sequences, window = call.query.shape[1], call.sliding_window
    return PagedLayout(
        True,
        (window - 1, 0) if window else (-1, -1),
        call.key.shape[1],
        paging["k_cache"],
        paging["v_cache"],
        (offsets[1 : sequences + 1] - offsets[:sequences] - 1).to(torch.int32),
        paging[PAGES.named(paging)],
    )


# Layouts, by what says where sequences and padding are.


def _given_sequences(lengths: PackedLengths, call: AttentionCall, kv_len: int) -> tuple[Sequences, Sequences]:
    """The sequences of queries and keys between given offsets. Padding, if there is any, is in sequences of its own.

    Raises:
        ValueError: the offsets of a batch of several rows don't end with the tokens.
    """
    batch, q_len = call.query.shape[:2]
    q_tokens, k_tokens = batch * q_len, batch * kv_len
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
    return queries, Sequences(None, queries.cu_seqlens if cu_k is cu_q else cu_k.to(torch.int32), max_k)


def _require_covering(lengths: PackedLengths, call: AttentionCall) -> None:
    """Check in training that offsets leave no token out, and that no sequence is longer than is given. Never waits for a GPU.

    Kernels leave the output of tokens behind the last sequence unwritten, and their gradients. Continuous batching has such tokens, and
    doesn't read them.

    Raises:
        ValueError: they do. On a GPU and in graphs an assertion of the device fails instead.
    """
    offsets, tokens = lengths.offsets()[0], call.query.shape[0] * call.query.shape[1]
    message = (
        f"{QUERY_OFFSETS.named()} don't end at {tokens}, where the tokens do: those behind them would have no output"
    )
    require(offsets[-1] == tokens, message)
    for offsets, longest_given in zip(lengths.offsets(), lengths[2:], strict=True):
        if isinstance(longest_given, int):
            require((offsets.diff() <= longest_given).all(), "a packed sequence is longer than max_length_* says")


def _packed(pattern: _Pattern, call: AttentionCall, queries: Sequences, keys: Sequences) -> PackedLayout:
    """The layout of sequences.

    Raises:
        ValueError: a sliding window over interior padding.
    """
    if keys.interior_padding and pattern[1] != (-1, -1):
        raise ValueError(
            "a sliding window over a mask with padding between tokens: distances would shrink with the padding. "
            f"{instead('', 'masks')}"
        )
    same, device = keys.cu_seqlens is queries.cu_seqlens, call.query.device
    queries, keys = queries.to(device), keys.to(device)
    if same and keys.cu_seqlens is not queries.cu_seqlens:
        keys = keys._replace(cu_seqlens=queries.cu_seqlens)
    return PackedLayout(*pattern, queries, keys)


def _of_padding(pattern: _Pattern, call: AttentionCall, reduced: ReducedMask, functions: Functions) -> SequenceLayout:
    """The layout of a padded batch.

    Raises:
        ValueError: the mask doesn't fit the batch, or a sliding window over interior padding, by a kernel without masks of any kind.
    """
    mask, padded_queries = reduced.padding, reduced.padded_queries
    assert mask is not None
    (batch, q_len), kv_len = call.query.shape[:2], reduced.kv_len
    if mask.shape[0] != batch:
        if mask.shape[0] != 1:
            raise ValueError(f"an attention mask for {mask.shape[0]} sequences does not fit a batch of {batch}")
        mask = mask.expand(batch, -1)
    if padded_queries and kv_len < q_len:
        raise ValueError(f"an attention mask of length {kv_len} does not fit {q_len} queries")
    if fixed_shapes(call.query):
        return _in_fixed_shapes(pattern, mask.bool(), q_len, padded_queries)
    sequences = padding(mask, q_len, padded_queries)
    if sequences is None:
        return SequenceLayout(*pattern)
    if sequences[1].interior_padding and pattern[1] != (-1, -1) and functions.masks:
        segments = padding_segments(mask, batch, q_len, padded_queries)
        return MaskedLayout(*pattern, Mask(segments=segments))
    return _packed(pattern, call, *sequences)


def _in_fixed_shapes(pattern: _Pattern, mask: Tensor, q_len: int, padded_queries: bool) -> SortedLayout:
    """The layout of a padded batch whose padding is a sequence of its own in each row.

    Args:
        mask: (batch, kv_len) bool.
    """
    is_query = query_mask(mask, q_len, padded_queries)
    if pattern[1] != (-1, -1):
        torch._assert_async((runs(mask) <= 1).all(), "a sliding window over a mask with padding between tokens")

    def offsets(valid: Tensor) -> Tensor:
        lengths = valid.sum(1, dtype=torch.int32)
        return offsets_of(torch.stack([lengths, valid.shape[1] - lengths], 1).flatten())

    k_order, _ = true_first(mask)
    q_order, q_places = true_first(is_query)
    lengths = Lengths(offsets(is_query), offsets(mask), q_len, mask.shape[1])
    return SortedLayout(*pattern, q_order, k_order, q_places, is_query, lengths)


def _of_any_mask(call: AttentionCall, context: ForwardContext | None, is_spread: bool) -> MaskedLayout:
    """The layout of a 4D mask of any kind. The call `is_spread` if it has the tokens of all ranks, and the context those of one."""
    (batch, q_len), kv_len = call.query.shape[:2], call.key.shape[1]
    own = None
    if context is not None and context.covers(batch, q_len, kv_len, bool(call.causal)):
        own = context
    assert call.mask is not None
    visible, bias = visible_and_bias(call.mask, q_len, kv_len)
    if call.causal and q_len == kv_len > 1 and call.mask.dtype == torch.bool and not fixed_shapes(visible):
        require_own_keys(visible)
    passed = context if is_spread else own
    if q_len > 1 and not (
        passed is not None and passed.arguments.has_4d_mask
    ):  # the model's, which may not know of packed sequences
        _require_separation(call, own)
    window = (call.local_window - 1, 0) if call.local_window and call.local_window < kv_len else (-1, -1)
    return MaskedLayout(False, window, kv_len, Mask(visible, bias))


def _require_separation(call: AttentionCall, own: ForwardContext | None) -> None:
    """Check that a mask that the model made separates the packed sequences of its forward, if there are any.

    Raises:
        UnsupportedFeatureError: it isn't known to.
    """
    packed = call.lengths is not None or (
        own is not None and (own.arguments.lengths is not None or own.sequences(True) is not None)
    )
    if packed and not (own is not None and _made_in_full(call, own, separating=True)):
        raise UnsupportedFeatureError(
            "packed sequences",
            "a mask with a pattern of the model's own",
            "transformers separates them by their position_ids alone: pass use_cache=False and no attention_mask. Or pass the sequences as rows of a batch.",
        )


def _made_in_full(call: AttentionCall, context: ForwardContext, separating: bool = False) -> bool:
    """Whether the library's mask function made a call's mask in full, or such that it separates packed sequences."""
    return any(same_storage(mask, call.mask) for mask, separates in context.full_masks if separates or not separating)


def _reducible(call: AttentionCall, context: ForwardContext | None) -> bool:
    """Whether a 4D mask is made of what every varlen kernel takes. Never attempted where the mask function has seen more."""
    mask, q_len, kv_len = call.mask, call.query.shape[1], call.key.shape[1]
    assert mask is not None
    if torch.compiler.is_compiling() or (context is not None and _made_in_full(call, context)):
        return False

    def attempt() -> bool:
        try:
            reduce_mask(mask, q_len, kv_len)
        except ValueError:
            return False
        return True

    return memoised(mask, ("reducible", q_len, kv_len), attempt)


def _resolve_mask(call: AttentionCall, context: ForwardContext | None) -> tuple[ReducedMask, ForwardContext | None]:
    """The call's mask in the terms of a kernel, and the call's own context.

    That is the context if the layer attends from the tokens of the model's call to the same tokens, so that the mask, positions and
    offsets of that call hold for it; else None.
    """
    (batch, q_len), kv_len = call.query.shape[:2], call.key.shape[1]
    mask, causal = call.mask, call.causal
    if causal is None and mask is None and context is not None and context.arguments.has_encoder_states:
        causal = False  # cross-attention: the library's mask function leaves out no causal mask there
    if causal is None:  # True, which the mask overrides, and which makes no difference to a single query
        # Outside of a model's forward a layer is causal over its own keys, as in upstream's flash attention.
        known = q_len == kv_len if context is None else context.has_record(q_len, kv_len)
        if q_len > 1 and not known and (mask is None or mask.ndim != 4):
            # Eager attention isn't causal then, unless the model leaves its mask out for flash attention.
            raise ValueError(
                "neither the layer nor a mask of its model says whether it is causal: set its is_causal, or use "
                "attn_implementation='eager'"
            )
        causal = True
    record = own = None
    if context is not None:
        record = context.find_record(mask, q_len, kv_len, causal, call.sliding_window)
    if record is not None:  # the mask overrides the layer's own arguments
        causal, window, mask = record.causal, record.window, record.padding
        window = window if max(window) + 1 < kv_len else (-1, -1)
        if causal and record.window[0] >= 0 and call.sliding_window and call.window(True) != window:
            raise ValueError(
                f"a layer with a window of {call.sliding_window} keys got a mask with one of {record.window[0] + 1}: nothing "
                "says which of them is right"
            )
    else:
        if mask is None and causal and kv_len > q_len and context is not None and context.arguments.static_without_mask:
            raise ValueError("a static cache without a mask: nothing says where its keys end. Pass an attention_mask")
        window = call.window(causal)
    if context is not None and context.covers(batch, q_len, kv_len, causal):
        own = context
        if mask is None and record is None and own.arguments.tokens_only:
            mask = own.arguments.mask  # which the model didn't pass to the layer
    if mask is None:
        return ReducedMask(None, True, kv_len, causal, window), own
    if mask.ndim == 4:
        return reduce_mask(mask, q_len, kv_len), own
    if mask.ndim != 2:
        raise ValueError(f"an attention mask must have 2 or 4 dimensions, not the shape {tuple(mask.shape)}")
    # Padding applies to the queries only if they are the last of the keys: never in cross-attention, which isn't causal and
    # may have as many queries as keys. A window is aligned by the queries, so that their padding must be known.
    padded_queries = (causal or window != (-1, -1)) and not (record is not None and record.all_queries)
    if not causal and mask.shape[1] != kv_len:
        raise ValueError(f"an attention mask for {mask.shape[1]} keys does not fit {kv_len}")
    if not causal and padded_queries and q_len != kv_len:
        raise ValueError("a window to both sides over padded keys that are not the queries' own")
    mask = mask[:, -kv_len:]
    # Keys behind a shorter mask are unused room of a static cache.
    return ReducedMask(mask, padded_queries, mask.shape[1], causal, window), own


def _check_lengths(
    lengths: PackedLengths, call: AttentionCall, reduced: ReducedMask, own: ForwardContext | None
) -> None:
    """Check that masks and positions agree with the given offsets; raises ValueError if not, or if one is missing."""
    (offsets, _), (batch, q_len) = lengths.offsets(), call.query.shape[:2]
    if own is not None and own.arguments.offsets is offsets:
        own.check_offsets()
        _require_positions(own)
    elif reduced.padding is not None:
        require_agreement(offsets, reduced.padding, None, batch, q_len)
    if reduced.segment_ids is not None:
        require_agreement(offsets, reduced.segment_ids, None, batch, q_len)


def _require_positions(context: ForwardContext) -> None:
    if not context.arguments.takes_positions:
        raise UnsupportedFeatureError(
            "packed sequences",
            "a model whose forward has no position_ids",
            "Its positions run on from one sequence into the next. Pass the sequences as rows of a padded batch.",
        )


def _sequences(call: AttentionCall, reduced: ReducedMask, own: ForwardContext | None) -> Sequences | None:
    """The packed sequences of a call without offsets; None if there are none.

    Raises:
        ValueError: they contradict a mask that the model made, or there are cached keys beside them.
    """
    # A 4D mask that the user passed isn't split further by position ids; one that the model made may not know of them.
    is_authoritative = reduced.from_4d and (own is None or own.arguments.has_4d_mask)
    if reduced.segment_ids is not None:
        others = None if own is None or is_authoritative else own.sequences(reduced.causal)
        return sequences_of_segments(reduced.segment_ids, others)
    batch, q_len = call.query.shape[:2]
    if q_len == 1 or is_authoritative:
        return None
    if own is not None:
        sequences = own.sequences(reduced.causal)
        if sequences is not None:
            _require_positions(own)
            if reduced.padding is not None and own.arguments.mask is None:
                raise ValueError("packed sequences beside a mask with padding that the model has made itself")
        return sequences
    if call.positions is None or reduced.padding is not None:
        return None
    sequences = sequences_of_positions(call.positions, batch, q_len, reduced.causal)
    if sequences is not None and call.key.shape[1] != q_len:
        raise ValueError(
            "packed position_ids together with cached keys: nothing says which key belongs to which sequence"
        )
    return sequences
