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
from .call import AttentionCall, PackedLengths, check_heads, unsupported_argument
from .forward_context import current_context, require_open
from .resolution import layout_of, paged_layout
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
    SCALE,
    SINKS,
    SOFTCAP,
    VALUE_DIM,
    WINDOW,
    Role,
)
from .tensors import constant

__all__ = ["attention_forward", "flash_attention", "target_dtype"]


class _Omitted:
    """The value of an argument that a layer omits."""


_OMITTED: Any = _Omitted()


def attention_forward(
    kernel: Kernel,
    name: str,
    records_masks: bool = False,
    attend: Callable[[Kernel, AttentionCall], Tensor] | None = None,
) -> Callable[..., tuple[Tensor, None]]:
    """The attention function that transformers calls for a registered name.

    Args:
        kernel: what computes it; loaded at the first call.
        name: for error messages.
        records_masks: whether the name's mask function is `attention_mask_function`, which records every mask, None included.
        attend: computes calls but those with a paged cache; None for `flash_attention`.
    """
    attend = attend or flash_attention

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
            value = _without_value_padding(module, query, value)
        dtype = None if in_pages else target_dtype(query, module)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if dtype is not None:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        lengths = None
        if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
            lengths = PackedLengths(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k).checked()
        passed = WINDOW.spelled(kwargs)
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
            sliding_window=_window_of(module) if passed is None else kwargs[passed],
            local_window=LOCAL_WINDOW.of(kwargs),
            positions=position_ids,
            bias=BIAS.of(kwargs),
            lengths=lengths,
        )
        if current_context() is None:
            require_open()
        if in_pages:
            functions = kernel.load()
            return paged_layout(call, paging, functions, kernel.name).attend(functions, call), None
        if attention_mask is None and cu_seq_lens_q is None:
            _require_mask(module, call, records_masks)
        return attend(kernel, call), None

    forward.__name__ = forward.__qualname__ = f"attention_forward[{name}]"
    return forward


def _require_known(arguments: dict[str, Any], name: str) -> None:
    """Check that a layer passes no arguments of its own that nothing is known of; raises UnsupportedFeatureError if it does."""
    for argument, value in arguments.items():
        if argument in ATTENTION_ARGUMENTS or value is None or value is False:
            continue
        context = current_context()
        if context is None or argument not in context.arguments.names:
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


def _without_value_padding(module: torch.nn.Module, query: Tensor, value: Tensor) -> Tensor:
    """The value of multi-head latent attention without the zeros that older releases pad it with for every flash attention.

    They take as many dimensions of the output as the value had.
    """
    dim = value.shape[-1]
    if query.shape[-1] != dim or QUERY_DIM.attribute_of(module) != dim:
        return value
    own = VALUE_DIM.attribute_of(module)
    return value[..., :own] if isinstance(own, int) and own < dim else value


def _require_mask(module: torch.nn.Module, call: AttentionCall, records_masks: bool) -> None:
    """Check a layer that is causal or has a window, and gets no mask: eager attention would hide nothing from it.

    Raises:
        ValueError: no mask function of its model left the mask out, and it isn't left out for flash attention.
    """
    q_len, kv_len, causal, window = call.query.shape[1], call.key.shape[1], call.causal, call.sliding_window
    if (causal and q_len == 1) or not (causal or (window and window < kv_len)):
        return
    context = current_context()
    if causal and q_len != kv_len and (context is None or context.arguments.cache is None):  # Kosmos-2's over its image
        raise ValueError(
            f"a causal layer with {q_len} queries, {kv_len} keys, no cache and no mask: nothing says which query sees which "
            "key. Pass a 4D mask, or use attn_implementation='eager'"
        )
    if not records_masks or context is None or context.has_record(q_len, kv_len):
        return
    if (
        context.arguments.masks_by_layer_type
        or context.arguments.mask is not None
        or context.arguments.length not in (0, q_len)
    ):
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
    if not window:
        return None
    layer_types = LAYER_TYPES.attribute_of(getattr(module, "config", None))
    index = LAYER_INDEX.attribute_of(module)
    if layer_types and index is not None and layer_types[index] != "sliding_attention":
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
    if call.bias is not None:
        if not functions.masks:
            subject = "a bias of the scores (position_bias)"
            raise UnsupportedFeatureError(subject, kernel.name, instead(kernel.name, "masks"))
        _check_bias(call)
    return layout_of(call, functions, current_context()).attend(functions, call)


def _check_bias(call: AttentionCall) -> None:
    """Raises ValueError if a bias isn't for the call's queries and keys: cut to fewer keys it would be for other ones."""
    assert call.bias is not None
    (batch, q_len, heads), kv_len, shape = call.query.shape[:3], call.key.shape[1], tuple(call.bias.shape)
    sizes = (batch, heads, q_len, kv_len)
    if len(shape) > 4 or any(n not in (1, size) for n, size in zip(reversed(shape), reversed(sizes), strict=False)):
        raise ValueError(
            f"a bias of the scores of shape {shape} does not fit {batch} rows, {heads} heads, {q_len} queries and {kv_len} keys"
        )
