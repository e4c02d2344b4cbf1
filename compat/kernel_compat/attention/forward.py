"""The attention function behind every registered name: from what transformers hands over to a kernel's keywords."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedFeatureError
from ..kernels import Kernel
from ..kernels.catalog import instead
from .boundaries import Forward, Restarts, Sequences, current, packed_sequences, require_agreement, restarts_of
from .padding import fixed_shapes, longest, once, padding, query_mask, reduce_mask, require_total, runs

__all__ = ["attention_forward", "flash_attention"]

#: Arguments some models pass that change the scores in ways no flash kernel has.
_NO_KERNEL_HAS = ("head_mask", "position_bias", "attention_bias", "sinks", "indices", "block_indices")


def attention_forward(kernel: Kernel, name: str, notes: bool = False) -> Callable[..., tuple[Tensor, None]]:
    """The attention function transformers calls for a registered name.

    Args:
        kernel: what computes it; loaded at the first call.
        name: for error messages.
        notes: whether the name's masks are made by our mask function, which notes each, the omitted ones too.
    """

    def forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | Tensor | None = None,
        max_length_k: int | Tensor | None = None,
        deterministic: bool | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        for unknown in _NO_KERNEL_HAS:
            if kwargs.get(unknown) is not None:
                raise UnsupportedFeatureError(
                    unknown, name, "No flash kernel does: use attn_implementation='eager' for this model."
                )
        if kwargs.get("output_attentions"):
            raise UnsupportedFeatureError(
                "output_attentions=True", name, "No flash kernel computes them: use attn_implementation='eager'."
            )
        sliding_window = kwargs["sliding_window"] if "sliding_window" in kwargs else _window_of(module)
        if cache is not None:
            # Continuous batching, from transformers 5.19 on. The cache picks this layer's lengths and pages in place.
            paging = {"cu_seq_lens_k": cu_seq_lens_k, "max_length_k": max_length_k, **kwargs}
            key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=paging)
            cu_seq_lens_k, max_length_k = paging["cu_seq_lens_k"], paging["max_length_k"]
            if paging.get("block_table") is not None:
                return _paged(kernel, query, key, value, paging, scaling, sliding_window, softcap, s_aux), None
        if is_causal is None:
            is_causal = getattr(module, "is_causal", None)
        if attention_mask is None and cu_seq_lens_q is None:
            _require_mask(module, query.shape[2], key.shape[2], is_causal, sliding_window, notes)
        dtype = target_dtype(query, module)
        query, key, value = (
            x.transpose(1, 2) if dtype is None else x.transpose(1, 2).to(dtype) for x in (query, key, value)
        )
        output = flash_attention(
            kernel,
            query,
            key,
            value,
            attention_mask,
            causal=is_causal,
            scale=scaling,
            dropout=dropout,
            sliding_window=sliding_window,
            local_window=kwargs.get("local_window"),
            softcap=softcap,
            sinks=s_aux,
            deterministic=deterministic,
            position_ids=position_ids,
            cu_seq_lens_q=cu_seq_lens_q,
            cu_seq_lens_k=cu_seq_lens_k,
            max_length_q=max_length_q,
            max_length_k=max_length_k,
        )
        return output, None

    forward.__name__ = forward.__qualname__ = f"attention_forward[{name}]"
    return forward


def _require_mask(
    module: torch.nn.Module, q_len: int, kv_len: int, causal: bool | None, sliding_window: int | None, notes: bool
) -> None:
    """Check a layer that says it is causal or has a window and is given no mask: eager attention hides nothing then.

    Raises:
        ValueError: no mask function of its model has left the mask out, and it isn't left out for flash attention.
    """
    if (causal and q_len == 1) or not (causal or (sliding_window and sliding_window < kv_len)):
        return
    forward = current()
    if causal and q_len != kv_len and (forward is None or forward.cache is None):  # Kosmos-2's over its image
        raise ValueError(
            f"a causal layer with {q_len} queries, {kv_len} keys, no cache and no mask: which query sees which key can't be "
            "told. Pass a 4D mask, or use attn_implementation='eager'"
        )
    if not notes or forward is None or forward.has_pattern(q_len, kv_len):
        return
    if forward.given_masks or forward.mask is not None or forward.length not in (0, q_len):
        return  # masks that were given, or tokens of others
    if not _has_mask_functions(type(module)):
        return
    if causal:  # Moshi's and Kyutai's
        words, advice = "it is causal", "Pass an attention_mask of ones for causal attention"
    else:  # DiffusionGemma's decoder
        words, advice = f"it has a window of {sliding_window}", "Use attn_implementation='eager' or 'sdpa'"
    raise ValueError(
        f"{type(module).__name__} says that {words}, but its model has made no mask for it, and eager attention sees "
        f"every key then. {advice}"
    )


_mask_functions: dict[type, bool] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_mask_functions(layer: type) -> bool:
    """Whether the models in a layer's module make their masks by transformers' functions, or only of a mask that is given."""
    if layer not in _mask_functions:
        module = sys.modules[layer.__module__]
        try:
            source = inspect.getsource(module)
        except (OSError, TypeError):
            source = ""
        of_given = re.search(r"if attention_mask is not None:\s+causal_mask = self\._update_causal_mask\(", source)
        _mask_functions[layer] = hasattr(module, "create_causal_mask") or of_given is not None
    return _mask_functions[layer]


def _window_of(module: torch.nn.Module) -> int | None:
    """The window of a layer that doesn't pass it, as Qwen2-MoE's: its mask has it, which a flash kernel isn't given."""
    window: int | None = getattr(module, "sliding_window", None)
    layer_types = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if window and layer_types and index is not None and layer_types[index] != "sliding_attention":
        return None
    return window


def target_dtype(query: Tensor, module: torch.nn.Module) -> torch.dtype | None:
    """The dtype float32 inputs are meant to have: autocast's, or that of the module's weights.

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


def flash_attention(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    causal: bool | None,
    scale: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    local_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    deterministic: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
) -> Tensor:
    """Attention as transformers asks for it, by a kernel.

    Args:
        query: (batch, q_len, heads, head_dim).
        key, value: (batch, kv_len, kv_heads, head_dim); the value's head_dim may be smaller.
        attention_mask: None; (batch, length) with 1 for tokens and 0 for padding, or a 4D mask that says no more than
            padding, causality, a window and packed sequences.
        causal: aligned to the bottom right where q_len and kv_len differ. A 4D mask decides itself, and so does one
            that our mask function made, whatever the layer says. None where the layer doesn't say.
        sliding_window: a query sees this many keys, itself included; to both sides where not causal.
        local_window: a causal window that the layer has besides its mask, as GPT-Neo's.
        position_ids: (batch or 1, q_len): where they restart, a new packed sequence begins. Those of the model's own
            forward count before them.
        cu_seq_lens_q, cu_seq_lens_k: offsets of packed sequences, shape (sequences + 1,); where missing, those of the
            model's own forward. Masks and positions beside them must agree with them.
        max_length_q, max_length_k: length of the longest sequence, or an upper bound. If it is missing or a tensor, it is
            computed from the offsets; under torch.compile and in CUDA graphs it is the number of tokens.

    Returns:
        (batch, q_len, heads, value's head_dim). Padding queries are zero.

    Raises:
        UnsupportedFeatureError: the kernel can't do what is asked.
        ValueError: the arguments contradict each other.
    """
    functions = kernel.load()
    q_len, kv_len = query.shape[1], key.shape[1]
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"{query.shape[2]} query heads are not a multiple of {key.shape[2]} key heads")
    if sinks is not None:
        if sinks.shape != query.shape[2:3]:
            raise ValueError(f"sinks of shape {tuple(sinks.shape)} are not one for each of {query.shape[2]} heads")
        sinks = sinks.to(query.dtype)

    batch = query.shape[0]
    forward = current()
    if causal is None:
        causal = _causal_by_default(forward, attention_mask, q_len, kv_len)
    pattern = None if forward is None else forward.pattern(attention_mask, q_len, kv_len, causal, sliding_window)
    if pattern is None:
        static = forward is not None and not forward.given_masks and getattr(forward.cache, "is_compileable", False)
        if attention_mask is None and causal and static and kv_len > q_len:
            raise ValueError("a static cache without a mask: where its keys end can't be told. Pass an attention_mask")
        window = _window(sliding_window, causal, kv_len)
    else:  # what the mask means decides over what the layer says
        causal, window, attention_mask = pattern.causal, pattern.window, pattern.padding
        window = window if max(window) + 1 < kv_len else (-1, -1)
    own = None  # the forward, if this is attention within its tokens
    if forward is not None and forward.describes(batch, q_len, kv_len) and (causal or not forward.has_others):
        own = forward
    if own is not None and attention_mask is None and pattern is None and own.alone:
        attention_mask = own.mask  # which the model has kept from the layer
    # Padding tells of the queries only where they are the last of the keys' tokens: never in cross-attention, which
    # isn't causal and may have as many queries as keys. A window is aligned by them, so that they must be told of.
    padded_queries = causal or window != (-1, -1)
    decided = False
    numbers = None
    if attention_mask is not None and attention_mask.ndim == 4:
        reduced = reduce_mask(attention_mask, q_len, kv_len)
        attention_mask, padded_queries = reduced.padding, reduced.padded_queries
        causal, window, kv_len = reduced.causal, reduced.window, reduced.kv_len
        key, value = key[:, :kv_len], value[:, :kv_len]
        numbers = reduced.numbers
        decided = own is None or own.decided
    elif attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(f"an attention mask must have 2 or 4 dimensions, not the shape {tuple(attention_mask.shape)}")
    elif attention_mask is not None and not causal:
        if attention_mask.shape[1] != kv_len:
            raise ValueError(f"an attention mask for {attention_mask.shape[1]} keys does not fit {kv_len}")
        if padded_queries and q_len != kv_len:
            raise ValueError("a window to both sides over padded keys that are not the queries' own")
    if local_window and local_window < kv_len:
        window = (min(local_window - 1, window[0] if window[0] >= 0 else kv_len), 0)
    if deterministic is None:
        deterministic = _deterministic_by_default()

    options: dict[str, Any] = {
        "dropout_p": dropout,
        "softmax_scale": scale,
        "causal": causal,
        "window_size": window,
        "softcap": softcap or 0.0,
        "deterministic": deterministic,
        "s_aux": sinks,
    }
    if cu_seq_lens_q is None and cu_seq_lens_k is None and own is not None:
        cu_seq_lens_q, cu_seq_lens_k = (own.lengths.get(f"cu_seq_lens_{side}") for side in "qk")
        max_length_q, max_length_k = (own.lengths.get(f"max_length_{side}") for side in "qk")
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if cu_seq_lens_q is None or cu_seq_lens_k is None:
            raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be given together")
        if own is not None and own.lengths.get("cu_seq_lens_q") is cu_seq_lens_q:
            own.agree()
            _require_positions(own)
        elif attention_mask is not None:
            require_agreement(cu_seq_lens_q, attention_mask, None, batch, q_len)
        if numbers is not None:
            require_agreement(cu_seq_lens_q, numbers, None, batch, q_len)
        return _packed(functions, query, key, value, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, options)
    sequences = None
    if numbers is not None:
        of_model = None if own is None or decided else own.sequences(causal)
        sequences = once(numbers, ("sequences", of_model is None), lambda: _sequences_of(_finer(numbers, of_model)))
    elif q_len > 1 and not decided:
        if own is not None:
            sequences = own.sequences(causal)
            if sequences is not None:
                _require_positions(own)
            if sequences is not None and attention_mask is not None and own.mask is None:
                raise ValueError("packed sequences beside a mask with padding that the model has made itself")
        elif position_ids is not None and attention_mask is None:
            sequences = _sequences_of_positions(position_ids, batch, q_len, causal)
            if sequences is not None and kv_len != q_len:
                raise ValueError("packed position_ids together with cached keys: which key is whose can't be told")
    if sequences is not None:
        return _in_sequences(functions, query, key, value, sequences, options)
    if attention_mask is not None:
        return _padded(functions, query, key, value, attention_mask, padded_queries, options)
    output: Tensor = functions.flash_attn_func(query, key, value, **options)
    return output


def _causal_by_default(forward: Forward | None, mask: Tensor | None, q_len: int, kv_len: int) -> bool:
    """For a layer that doesn't say whether it is causal: its mask decides, and where nothing hangs on it the value is True.

    Outside a model's forward it is causal within its own keys, as upstream's flash attention has it.

    Raises:
        ValueError: there is no such mask. Eager attention isn't causal then, unless the model leaves its mask out for
            flash attention.
    """
    told = q_len == kv_len if forward is None else forward.has_pattern(q_len, kv_len)
    if q_len > 1 and not told and (mask is None or mask.ndim != 4):
        raise ValueError(
            "neither the layer nor a mask of its model says whether it is causal: set its is_causal, or use "
            "attn_implementation='eager'"
        )
    return True


def _require_positions(forward: Forward) -> None:
    if not forward.takes_positions:
        raise UnsupportedFeatureError(
            "packed sequences",
            "a model whose forward has no position_ids",
            "Its positions run on from one sequence into the next. Pass the sequences as rows of a padded batch.",
        )


def _sequences_of_positions(positions: Tensor, batch: int, length: int, causal: bool) -> Sequences | None:
    """The packed sequences that a layer's own positions tell of. Synchronises once a tensor."""
    restarts = restarts_of(positions, batch, length, causal)
    if restarts is None:  # of another shape
        return None

    return once(
        positions, ("sequences", batch, causal), lambda: _sequences_of(torch.ones_like(restarts.zero), restarts)
    )


def _sequences_of(mask: Tensor, restarts: Restarts | None = None) -> Sequences | None:
    found = packed_sequences(mask, restarts)
    return None if found is None else found.sequences


def _finer(numbers: Tensor, sequences: Sequences | None) -> Tensor:
    """Numbers of sequences that begin where one of (batch, length) numbers does, or one of `sequences`."""
    if sequences is None:
        return numbers
    first = sequences.cu_seqlens[:-1].long()
    first = first if sequences.places is None else sequences.places[first]
    begun = torch.zeros_like(numbers).flatten().index_fill(0, first.to(numbers.device), 1).cumsum(0).view_as(numbers)
    return torch.where(numbers == 0, 0, numbers * (numbers.numel() + 1) + begun)


def _in_sequences(
    functions: Any, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, options: dict[str, Any]
) -> Tensor:
    """Attention within packed sequences; padding queries are zero."""
    if sequences.holes:
        _require_no_window(options)
    batch, q_len = query.shape[:2]
    flat = [x.flatten(0, 1) for x in (query, key, value)]
    index = sequences.places
    if index is not None:
        index = index.to(query.device)
        flat = [x[index] for x in flat]
    offsets = sequences.cu_seqlens.to(query.device)
    output: Tensor = functions.flash_attn_varlen_func(
        *flat,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_seqlen_q=sequences.max_seqlen,
        max_seqlen_k=sequences.max_seqlen,
        **options,
    )
    if index is not None:
        output = query.new_zeros(batch * q_len, *output.shape[1:]).index_copy(0, index, output)
    return output.unflatten(0, (batch, q_len))


def _window(sliding_window: int | None, causal: bool, kv_len: int) -> tuple[int, int]:
    if not sliding_window:  # upstream takes 0 for no window as well
        return (-1, -1)
    if not isinstance(sliding_window, int) or isinstance(sliding_window, bool):
        raise TypeError(f"sliding_window must be a number of keys, not {sliding_window!r}")
    if sliding_window < 0:
        raise ValueError(f"sliding_window must be positive, not {sliding_window}")
    if sliding_window >= kv_len:  # hides nothing
        return (-1, -1)
    return (sliding_window - 1, 0 if causal else sliding_window - 1)


def _paged(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    paging: dict[str, Any],
    scale: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One new token for each sequence, against pages: query, key and value of shape (1, heads, sequences, head_dim)."""
    kvcache = kernel.load().flash_attn_with_kvcache
    if kvcache is None:
        raise UnsupportedFeatureError("a paged cache", kernel.name, instead(kernel.name, "paged"))
    q, k, v = (x.squeeze(0).transpose(0, 1).unsqueeze(1) for x in (query, key, value))
    sequences = q.shape[0]
    offsets = paging["cu_seq_lens_k"]
    output: Tensor = kvcache(
        q,
        paging["k_cache"],
        paging["v_cache"],
        k,
        v,
        cache_seqlens=(offsets[1 : sequences + 1] - offsets[:sequences] - 1).to(torch.int32),
        block_table=paging["block_table"],
        softmax_scale=scale,
        causal=True,
        window_size=(sliding_window - 1, 0) if sliding_window else (-1, -1),
        softcap=softcap or 0.0,
        s_aux=sinks if sinks is None else sinks.to(q.dtype),
    )
    return output.squeeze(1).unsqueeze(0)


def _deterministic_by_default() -> bool:
    return os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"


def _packed(
    functions: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_length_q: int | Tensor | None,
    max_length_k: int | Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    batch, q_len = query.shape[:2]
    if fixed_shapes(query):
        # Asking the device is impossible here; any upper bound is right.
        max_q = max_length_q if isinstance(max_length_q, int) else batch * q_len
        max_k = max_length_k if isinstance(max_length_k, int) else batch * key.shape[1]
        if batch > 1:
            for given, tokens in ((cu_seqlens_q, batch * q_len), (cu_seqlens_k, batch * key.shape[1])):
                torch._assert_async(given[-1] == tokens, "cu_seq_lens_* don't end where the batch does")
    else:
        max_q = longest(cu_seqlens_q) if max_length_q is None or isinstance(max_length_q, Tensor) else int(max_length_q)
        max_k = longest(cu_seqlens_k) if max_length_k is None or isinstance(max_length_k, Tensor) else int(max_length_k)
        if batch > 1:  # packed sequences stand in one row; over several, the offsets may not mean what they should
            require_total(cu_seqlens_q, batch * q_len, "cu_seq_lens_q")
            require_total(cu_seqlens_k, batch * key.shape[1], "cu_seq_lens_k")
    offsets = cu_seqlens_q.to(torch.int32)
    output: Tensor = functions.flash_attn_varlen_func(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        cu_seqlens_q=offsets,
        # One tensor stays one: torch 2.15 chooses its fastest backend by that.
        cu_seqlens_k=offsets if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k.to(torch.int32),
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        **options,
    )
    return output.unflatten(0, (batch, q_len))


def _require_no_window(options: dict[str, Any]) -> None:
    if options["window_size"] != (-1, -1):
        raise ValueError(
            "a sliding window over a mask with padding between tokens: distances would shrink with the padding"
        )


def _padded(
    functions: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    padded_queries: bool,
    options: dict[str, Any],
) -> Tensor:
    batch, q_len = query.shape[:2]
    kv_len = key.shape[1]
    if mask.shape[0] != batch:
        if mask.shape[0] != 1:
            raise ValueError(f"an attention mask for {mask.shape[0]} sequences does not fit a batch of {batch}")
        mask = mask.expand(batch, -1)
    if mask.shape[1] > kv_len:
        mask = mask[:, -kv_len:]
    elif mask.shape[1] < kv_len:  # a static cache's room behind the last key
        kv_len = mask.shape[1]
        key, value = key[:, :kv_len], value[:, :kv_len]
    if padded_queries and kv_len < q_len:
        raise ValueError(f"an attention mask of length {kv_len} does not fit {q_len} queries")
    if fixed_shapes(query):
        return _padded_by_sorting(functions, query, key, value, mask.bool(), padded_queries, options)
    found = padding(mask, q_len, padded_queries)
    if found is None:
        output: Tensor = functions.flash_attn_func(query, key, value, **options)
        return output
    if found.holes:
        _require_no_window(options)
    flat = query.new_zeros(batch * q_len, *query.shape[2:-1], value.shape[-1])
    if not found.max_seqlen_q:
        return flat.unflatten(0, (batch, q_len))
    packed = functions.flash_attn_varlen_func(
        query.flatten(0, 1)[found.q_index],
        key.flatten(0, 1)[found.k_index],
        value.flatten(0, 1)[found.k_index],
        cu_seqlens_q=found.cu_seqlens_q,
        cu_seqlens_k=found.cu_seqlens_k,
        max_seqlen_q=found.max_seqlen_q,
        max_seqlen_k=found.max_seqlen_k,
        **options,
    )
    return flat.index_copy(0, found.q_index, packed).unflatten(0, (batch, q_len))


def _padded_by_sorting(
    functions: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    padded_queries: bool,
    options: dict[str, Any],
) -> Tensor:
    """As `_padded`, in shapes that don't depend on values: tokens to the front of each row, the padding as a sequence of its own."""
    batch, q_len = query.shape[:2]
    kv_len = key.shape[1]
    queries = query_mask(mask, q_len, padded_queries)
    if options["window_size"] != (-1, -1):
        torch._assert_async((runs(mask) <= 1).all(), "a sliding window over a mask with padding between tokens")

    def offsets(there: Tensor) -> Tensor:
        lengths = there.sum(1, dtype=torch.int32)
        pairs = torch.stack([lengths, there.shape[1] - lengths], 1).flatten()
        return torch.nn.functional.pad(pairs.cumsum(0, dtype=torch.int32), (1, 0))

    def sort(x: Tensor, order: Tensor) -> Tensor:
        return x.gather(1, order[:, :, None, None].expand_as(x))

    k_order = torch.argsort(~mask, dim=1, stable=True)
    q_order = torch.argsort(~queries, dim=1, stable=True)
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
    output = sort(packed.unflatten(0, (batch, q_len)), torch.argsort(q_order, dim=1))
    return torch.where(queries[:, :, None, None], output, 0)
