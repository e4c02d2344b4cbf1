"""The attention function of every registered name: transformers' arguments become an `AttentionCall`, and a kernel computes it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedFeatureError
from ..kernels import Kernel
from ..kernels.catalog import instead
from ..kernels.memo import fixed_shapes, memoised
from .boundaries import Sequences, require_agreement, sequences_of_positions, sequences_of_segments
from .call import AttentionCall, PackedLengths, check_heads, unsupported_argument
from .forward_context import ForwardContext, current_context, require_open
from .mask_reduction import ReducedMask, reduce_mask, require_own_keys, visible_and_bias
from .padding import padding_segments
from .roles import (
    ATTENTION_ARGUMENTS,
    BIAS,
    CAUSALITY,
    KEY_LENGTH,
    KEY_OFFSETS,
    LAYER_INDEX,
    LAYER_SETTINGS,
    LAYER_TYPES,
    LOCAL_WINDOW,
    PAGES,
    QUERY_DIM,
    READ,
    SCALE,
    SINKS,
    SOFTCAP,
    VALUE_DIM,
    WINDOW,
    Role,
)
from .tensors import constant, require_readable, same_storage
from .varlen import packed_attention, padded_attention, paged_attention, sequences_attention

__all__ = ["attention_forward", "flash_attention", "target_dtype"]


class _Omitted:
    """The value of an argument that a layer omits."""


_OMITTED: Any = _Omitted()


def attention_forward(kernel: Kernel, name: str, records_masks: bool = False) -> Callable[..., tuple[Tensor, None]]:
    """The attention function that transformers calls for a registered name.

    Args:
        kernel: what computes it; loaded at the first call.
        name: for error messages.
        records_masks: whether the name's mask function is `attention_mask_function`, which records every mask, None included.
    """

    def forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = _OMITTED,
        softcap: float | None = _OMITTED,
        is_causal: bool | None = None,
        s_aux: Tensor | None = _OMITTED,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | Tensor | None = None,
        max_length_k: int | Tensor | None = None,
        deterministic: bool | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if argument := unsupported_argument(kwargs):
            raise UnsupportedFeatureError(argument, name, "No kernel does: use attn_implementation='eager'.")
        _require_known(kwargs, name)
        # Continuous batching, from transformers 5.19 on. The cache writes a layer's lengths and pages into its arguments: up to
        # 5.23, where the lengths of each type of layer arrive, here; from 5.24 on in the layer.
        paging = kwargs
        if isinstance(cu_seq_lens_k, dict):
            paging = {KEY_OFFSETS.named(): cu_seq_lens_k, KEY_LENGTH.named(): max_length_k, **kwargs}
            key, value = cache.update(
                key_states=key, value_states=value, layer_idx=LAYER_INDEX.attribute_of(module), kwargs=paging
            )
            cu_seq_lens_k, max_length_k = KEY_OFFSETS.of(paging), KEY_LENGTH.of(paging)
        in_pages = PAGES.of(paging) is not None
        if not in_pages:
            value = _unpadded(module, query, value)
        dtype = None if in_pages else target_dtype(query, module)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if dtype is not None:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        lengths = None
        if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
            lengths = PackedLengths(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        call = AttentionCall(
            query,
            key,
            value,
            CAUSALITY.attribute_of(module) if is_causal is None else is_causal,
            attention_mask,
            scale=_setting(module, SCALE, scaling, query.shape[-1] ** -0.5),
            softcap=_setting(module, SOFTCAP, softcap),
            sinks=_setting(module, SINKS, s_aux),
            dropout=dropout,
            deterministic=deterministic,
            sliding_window=kwargs[passed] if (passed := WINDOW.spelled(kwargs)) else _window_of(module),
            local_window=LOCAL_WINDOW.of(kwargs),
            positions=position_ids,
            bias=BIAS.of(kwargs),
            lengths=lengths,
        )
        if current_context() is None:
            require_open()
        if in_pages:
            return paged_attention(kernel, call, paging), None
        if attention_mask is None and cu_seq_lens_q is None:
            _require_mask(module, call, records_masks)
        return flash_attention(kernel, call), None

    forward.__name__ = forward.__qualname__ = f"attention_forward[{name}]"
    return forward


def _require_known(arguments: dict[str, Any], name: str) -> None:
    """Check that a layer passes no arguments of its own that nothing is known of; raises UnsupportedFeatureError if it does."""
    for argument, value in arguments.items():
        if argument in ATTENTION_ARGUMENTS or value is None or value is False:
            continue
        context = current_context()
        if context is None or argument not in context.given:
            raise UnsupportedFeatureError(
                f"the argument {argument!r} of a layer's attention",
                name,
                "It may change the scores. Upgrade kernel-compat, or use attn_implementation='eager'.",
            )


def _setting(module: torch.nn.Module, argument: Role, value: Any, default: float | None = None) -> Any:
    """A setting that a layer passes to its attention; None if it is omitted.

    Raises:
        ValueError: it is omitted, and the layer has it as an attribute, other than the default.
    """
    if not isinstance(value, _Omitted):  # by its type: Dynamo can't compare a symbolic number with an object
        return value
    attribute = LAYER_SETTINGS[argument]
    own = attribute.attribute_of(module)
    if own is not None and (default is None or own != default):
        raise ValueError(
            f"{type(module).__name__} has an attribute {attribute.named()!r}, but passes no {argument.named()!r} to its "
            "attention: nothing says whether the scores need it. Pass it, if only as None, or set the attribute to None"
        )
    return None


def _unpadded(module: torch.nn.Module, query: Tensor, value: Tensor) -> Tensor:
    """The value of multi-head latent attention without the zeros that older releases pad it with for every flash attention.

    They take as many dimensions of the output as the value had.
    """
    dims = (QUERY_DIM.attribute_of(module), VALUE_DIM.attribute_of(module))
    padded = dims[0] == query.shape[-1] == value.shape[-1] and isinstance(dims[1], int) and dims[1] < dims[0]
    return value[..., : dims[1]] if padded else value


def _require_mask(module: torch.nn.Module, call: AttentionCall, records_masks: bool) -> None:
    """Check a layer that is causal or has a window, and gets no mask: eager attention would hide nothing from it.

    Raises:
        ValueError: no mask function of its model left the mask out, and it isn't left out for flash attention.
    """
    q_len, kv_len, causal, window = call.query.shape[1], call.key.shape[1], call.causal, call.sliding_window
    if (causal and q_len == 1) or not (causal or (window and window < kv_len)):
        return
    context = current_context()
    if causal and q_len != kv_len and (context is None or context.cache is None):  # Kosmos-2's over its image
        raise ValueError(
            f"a causal layer with {q_len} queries, {kv_len} keys, no cache and no mask: nothing says which query sees which "
            "key. Pass a 4D mask, or use attn_implementation='eager'"
        )
    if not records_masks or context is None or context.has_record(q_len, kv_len):
        return
    if context.masks_by_layer_type or context.mask is not None or context.length not in (0, q_len):
        return  # the masks were made before the call, or the layer has other tokens
    if not _makes_masks(type(module)):
        return
    if causal:  # Moshi's and Kyutai's
        words, advice = "it is causal", "Pass an attention_mask of ones for causal attention"
    else:  # DiffusionGemma's decoder
        words, advice = f"it has a window of {window}", "Use attn_implementation='eager' or 'sdpa'"
    raise ValueError(
        f"{type(module).__name__} says that {words}, but its model has made no mask for it, and eager attention sees "
        f"every key then. {advice}"
    )


@constant
def _makes_masks(layer: type) -> bool:
    """Whether the models in a layer's module make their masks by transformers' functions, or only if they get a mask."""
    module = sys.modules[layer.__module__]
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        source = ""
    only_given = re.search(r"if attention_mask is not None:\s+causal_mask = self\._update_causal_mask\(", source)
    return hasattr(module, "create_causal_mask") or only_given is not None


def _window_of(module: torch.nn.Module) -> int | None:
    """The window of a layer that doesn't pass it, as Qwen2-MoE's: it is in the layer's mask, which a flash kernel doesn't get."""
    window: int | None = WINDOW.attribute_of(module)
    layer_types = LAYER_TYPES.attribute_of(getattr(module, "config", None))
    index = LAYER_INDEX.attribute_of(module)
    if window and layer_types and index is not None and layer_types[index] != "sliding_attention":
        return None
    return window


def target_dtype(query: Tensor, module: torch.nn.Module) -> torch.dtype | None:
    """The dtype to which float32 inputs are cast: autocast's, or that of the module's weights; None for no cast.

    PEFT keeps norms in float32, so that the inputs of a bfloat16 model's attention arrive in float32.
    """
    if query.dtype != torch.float32:
        return None
    device = query.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    for parameter in module.parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            return parameter.dtype
    config = getattr(module, "config", None)
    if getattr(config, "_is_quantized", False) or hasattr(config, "_pre_quantization_dtype"):
        return getattr(config, "dtype", None) or getattr(config, "_pre_quantization_dtype", None)
    return None


def flash_attention(kernel: Kernel, call: AttentionCall) -> Tensor:
    """Compute a call by a kernel, with the masks and sequences of the model's forward in progress.

    Returns:
        (batch, q_len, heads, value's head_dim). Padding queries are zero.

    Raises:
        UnsupportedFeatureError: the kernel lacks a feature that the call needs.
        ValueError: the arguments contradict each other.
    """
    functions = kernel.load()
    check_heads(call.query.shape[2], call.key.shape[2], call.sinks)
    if call.bias is not None and functions.masked_attention is None:
        raise UnsupportedFeatureError(
            "a bias of the scores (position_bias)", kernel.name, instead(kernel.name, "masks")
        )
    _check_bias(call)
    context = current_context()
    require_readable(READ, (call.mask, call.positions, *(call.lengths or ())))
    in_full = functions.masked_attention is not None and call.mask is not None and call.mask.ndim == 4
    if in_full and not (call.bias is None and _reducible(call, context)):
        return _any_mask(functions.masked_attention, call, context)
    reduced, own = _resolve_mask(call, context)
    if reduced.from_4d and own is not None and call.query.shape[1] > 1 and _made_in_full(call, own):
        _require_separation(call, own)  # chunks, say, which are counted along the row, look like packed sequences
    if reduced.kv_len != call.key.shape[1]:
        call = call._replace(key=call.key[:, : reduced.kv_len], value=call.value[:, : reduced.kv_len])
    window = reduced.window
    if call.local_window and call.local_window < reduced.kv_len:
        window = (min(call.local_window - 1, window[0] if window[0] >= 0 else reduced.kv_len), 0)
    options = call.options(reduced.causal, window)
    if call.bias is not None and functions.masked_attention is not None:
        return _biased(functions.masked_attention, call, reduced, own, options)
    packed = own.lengths if call.lengths is None and own is not None else call.lengths
    if packed is not None:
        _check_lengths(packed, call, reduced, own)
        return packed_attention(functions, call, packed, options)
    sequences = _sequences(call, reduced, own)
    if sequences is not None:
        return sequences_attention(functions, call, sequences, sequences, options)
    if reduced.padding is not None:
        return padded_attention(functions, call, reduced.padding, reduced.padded_queries, options)
    output: Tensor = functions.flash_attn_func(call.query, call.key, call.value, **options)
    return output


def _check_bias(call: AttentionCall) -> None:
    """Raises ValueError if a bias isn't for the call's queries and keys: cut to fewer keys it would be for other ones."""
    if call.bias is None:
        return
    (batch, q_len, heads), kv_len, shape = call.query.shape[:3], call.key.shape[1], tuple(call.bias.shape)
    sizes = (batch, heads, q_len, kv_len)
    if len(shape) > 4 or any(n not in (1, size) for n, size in zip(reversed(shape), reversed(sizes), strict=False)):
        raise ValueError(
            f"a bias of the scores of shape {shape} does not fit {batch} rows, {heads} heads, {q_len} queries and {kv_len} keys"
        )


def _any_mask(masked: Callable[..., Any] | None, call: AttentionCall, context: ForwardContext | None) -> Tensor:
    """A call with a 4D mask, by a kernel with masks of any kind."""
    (batch, q_len), kv_len = call.query.shape[:2], call.key.shape[1]
    own = None
    if context is not None and context.covers(batch, q_len, kv_len, bool(call.causal)):
        own = context
    assert call.mask is not None
    assert masked is not None
    visible, bias = visible_and_bias(call.mask, q_len, kv_len)
    if call.causal and q_len == kv_len > 1 and call.mask.dtype == torch.bool and not fixed_shapes(visible):
        require_own_keys(visible)
    if call.bias is not None:
        bias = call.bias if bias is None else call.bias + bias
    if q_len > 1 and not (own is not None and own.has_4d_mask):  # the model's, which may not know of packed sequences
        _require_separation(call, own)
    window = (call.local_window - 1, 0) if call.local_window and call.local_window < kv_len else (-1, -1)
    options = call.options(False, window)
    inputs = (call.query, call.key, call.value)
    output: Tensor = masked(*inputs, visible=visible, bias=bias, **options)
    return output


def _require_separation(call: AttentionCall, own: ForwardContext | None) -> None:
    """Check that a mask that the model made separates the packed sequences of its forward, if there are any.

    Raises:
        UnsupportedFeatureError: it isn't known to.
    """
    packed = call.lengths is not None or (
        own is not None and (own.lengths is not None or own.sequences(True) is not None)
    )
    if packed and not (own is not None and _made_in_full(call, own, separating=True)):
        raise UnsupportedFeatureError(
            "packed sequences",
            "a mask with a pattern of the model's own",
            "transformers separates them without a KV cache: pass use_cache=False. Or pass the sequences as rows of a batch.",
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


def _biased(
    masked: Callable[..., Any],
    call: AttentionCall,
    reduced: ReducedMask,
    own: ForwardContext | None,
    options: dict[str, Any],
) -> Tensor:
    """A call with a bias and no 4D mask, by a kernel with masks of any kind."""
    assert call.bias is not None
    batch, q_len = call.query.shape[:2]
    if call.lengths is not None or (own is not None and (own.lengths is not None or own.sequences(True) is not None)):
        raise UnsupportedFeatureError(
            "packed sequences", "a bias of the scores", "Pass the sequences as rows of a batch."
        )
    segments = (
        None if reduced.padding is None else padding_segments(reduced.padding, batch, q_len, reduced.padded_queries)
    )
    inputs = (call.query, call.key, call.value)
    output: Tensor = masked(*inputs, bias=call.bias[..., : reduced.kv_len], segments=segments, **options)
    return output


def _resolve_mask(call: AttentionCall, context: ForwardContext | None) -> tuple[ReducedMask, ForwardContext | None]:
    """The call's mask in the terms of a kernel; and the context, if this is attention within the tokens of its forward."""
    (batch, q_len), kv_len = call.query.shape[:2], call.key.shape[1]
    mask, causal = call.mask, call.causal
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
        if mask is None and causal and kv_len > q_len and context is not None and context.static_without_mask:
            raise ValueError("a static cache without a mask: nothing says where its keys end. Pass an attention_mask")
        window = call.window(causal)
    if context is not None and context.covers(batch, q_len, kv_len, causal):
        own = context
        if mask is None and record is None and own.tokens_only:
            mask = own.mask  # which the model didn't pass to the layer
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
    if own is not None and own.offsets is offsets:
        own.check_offsets()
        _require_positions(own)
    elif reduced.padding is not None:
        require_agreement(offsets, reduced.padding, None, batch, q_len)
    if reduced.segment_ids is not None:
        require_agreement(offsets, reduced.segment_ids, None, batch, q_len)


def _require_positions(context: ForwardContext) -> None:
    if not context.takes_positions:
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
    complete = reduced.from_4d and (own is None or own.has_4d_mask)  # unless the model made the mask itself
    if reduced.segment_ids is not None:
        others = None if own is None or complete else own.sequences(reduced.causal)
        return sequences_of_segments(reduced.segment_ids, others)
    batch, q_len = call.query.shape[:2]
    if q_len == 1 or complete:
        return None
    if own is not None:
        sequences = own.sequences(reduced.causal)
        if sequences is not None:
            _require_positions(own)
            if reduced.padding is not None and own.mask is None:
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
