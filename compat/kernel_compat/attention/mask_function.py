"""The mask function of registered names: what transformers' ``create_causal_mask`` and its like call to make a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .boundaries import Forward, Pattern, current, note, same_tensor
from .padding import as_int, fixed_shapes

__all__ = ["attention_mask_function", "handed_on", "plain_mask_function"]


def attention_mask_function(**given: Any) -> Tensor | None:
    """The mask our attention functions are given: the padding, or None where there is none.

    Called by ``create_causal_mask`` and its like, once a forward and layer type. What it says besides, causality, a window
    and packed sequences, is noted in the forward in progress. Any other pattern is built in full, for the attention
    function to prove or refuse: upstream's own function for flash attention drops it.

    Args:
        given: as transformers calls the functions of ``ALL_MASK_ATTENTION_FUNCTIONS``.

    Returns:
        None, (batch, length) bool with length at most kv_length, or (batch, 1, q_length, kv_length) bool.
    """
    forward = current()
    said = _said(given)
    mask = _mask(said, forward, **given)
    if said is None or (forward is None and torch.compiler.is_compiling()):
        return mask
    positions, kv_length = given.get("cache_position"), given["kv_length"]
    q_length = given["q_length"] if positions is None else positions.shape[0]
    if said.numbers is not None and forward is not None:
        forward.number(said.numbers)
    padding = mask
    # Layers of other windows get masks of their own, and attention to an encoder gets None.
    hides = said.window != (-1, -1) and max(said.window) + 1 < kv_length
    if mask is None and (hides or (said.causal and forward is not None and forward.crosses)):
        device = given.get("device") if positions is None else positions.device
        mask = torch.ones(given["batch_size"], kv_length, dtype=torch.bool, device=device)
    elif mask is not None and forward is not None and any(same_tensor(mask, other.mask) for other in forward.patterns):
        mask = mask.clone()  # told apart from the others' by its storage
    note(Pattern(said.causal, said.window, padding, q_length, kv_length, mask))
    return mask


def plain_mask_function(**given: Any) -> Tensor | None:
    """`attention_mask_function` for forwards that know nothing of patterns: None wherever there is no padding."""
    return _mask(_said(given), current(), **given)


def handed_on(given: dict[str, Any]) -> bool:
    """Whether our attention functions know all that the mask function of a call means, beside its padding."""
    return _said(given) is not None


def _mask(
    said: _Said | None,
    forward: Forward | None,
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    **kwargs: Any,
) -> Tensor | None:
    tracing = torch.compiler.is_compiling()
    if said is None:
        given: dict[str, Any] = {"cache_position": cache_position}
        if cache_position is None:  # from 5.6 on
            given = {"q_length": q_length, "q_offset": q_offset}
        return _in_full(
            batch_size=batch_size,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **given,
            **kwargs,
        )
    if cache_position is not None:
        q_length = cache_position.shape[0]
    # A cache: a static one has room behind the last key, which must not be attended. Keys that are not the queries' own,
    # as in cross-attention, have none.
    if kv_length != q_length and tracing and attention_mask is not None and q_length != 1:
        torch._assert_async(
            attention_mask[:, -1].any(), "a mask as long as a static cache: cut it to the tokens there are"
        )
    elif kv_length != q_length and not tracing and (said.causal or said.window != (-1, -1)):
        end = _end(cache_position, q_length, q_offset)
        if attention_mask is not None:
            attention_mask = attention_mask[:, :end]
        elif end - kv_offset < kv_length:
            device = cache_position.device if cache_position is not None else kwargs.get("device")
            attention_mask = torch.ones(batch_size, end - kv_offset, dtype=torch.bool, device=device)
    if attention_mask is None:
        return None
    if isinstance(kv_offset, int):  # of a mask with more columns than keys, eager attention reads the first
        attention_mask = attention_mask[:, : kv_offset + kv_length]
    attention_mask = attention_mask[:, -kv_length:]
    # Shorter than the keys: those of a static cache, which the forward cuts to the mask's length.
    if attention_mask.shape[1] < kv_length or fixed_shapes(attention_mask):
        return attention_mask
    if forward is not None:
        return forward.padding(attention_mask, said.causal)
    return None if bool(attention_mask.all()) else attention_mask


def _end(cache_position: Tensor | None, q_length: int | None, q_offset: int | Tensor) -> int:
    """How many tokens there are, cached and new."""
    if cache_position is not None:
        return as_int(cache_position[-1]) + 1
    return as_int(q_offset) + (q_length or 0)


class _Said(NamedTuple):
    """What a mask function means.

    Attributes:
        causal: whether keys behind the query are hidden.
        window: as in `Pattern`.
        numbers: (batch, length), the number of each token's sequence; None where it speaks of none.
    """

    causal: bool
    window: tuple[int, int] = (-1, -1)
    numbers: Tensor | None = None


def _said(given: dict[str, Any]) -> _Said | None:
    """What the mask function of a call means; None where it is more than causality, a window and packed sequences."""
    function = given.get("mask_function")
    if function is None:
        return _Said(True)
    if torch.compiler.is_compiling():
        return _said_in_a_graph(function, given)
    parts = _parts(function)
    if parts is None:
        return None
    causal = "causal_mask_function" in parts
    window = (-1, -1)
    if (left := parts.get("sliding_window_overlay.<locals>.inner_mask")) is not None:
        if not causal:  # a limit to the left alone
            return None
        window = (left["sliding_window"] - 1, 0)
    if (both := parts.get("sliding_window_bidirectional_overlay.<locals>.inner_mask")) is not None:
        if causal:
            return None
        window = (both["sliding_window"], both["sliding_window"])
    packed = parts.get("packed_sequence_mask_function.<locals>.inner_mask", {})
    return _Said(causal, window, packed.get("packed_sequence_mask"))


#: Mask functions of transformers.masking_utils that can be said in other words, and those that combine others.
_KNOWN = frozenset(
    {
        "causal_mask_function",
        "bidirectional_mask_function",
        "sliding_window_overlay.<locals>.inner_mask",
        "sliding_window_bidirectional_overlay.<locals>.inner_mask",
        "packed_sequence_mask_function.<locals>.inner_mask",
    }
)
_COMBINING = frozenset({"and_masks.<locals>.and_mask", "remap_positions_for_packed_sequence.<locals>.inner_mask"})


def _parts(function: Callable[..., Any]) -> dict[str, dict[str, Any]] | None:
    """The functions that one is made of, with what each closes over, by qualified name; None where one isn't known."""
    name = function.__qualname__
    cells = function.__closure__ or ()
    closed_over = {n: cell.cell_contents for n, cell in zip(function.__code__.co_freevars, cells, strict=True)}
    if name in _KNOWN:
        return {name: closed_over}
    if name not in _COMBINING:
        return None
    parts: dict[str, dict[str, Any]] = {}
    for value in closed_over.values():
        for part in value if isinstance(value, tuple) else (value,):
            if not callable(part):
                continue
            inner = _parts(part)
            if inner is None or not inner.keys().isdisjoint(parts):  # two windows, say
                return None
            parts |= inner
    return parts


def _said_in_a_graph(function: Callable[..., Any], given: dict[str, Any]) -> _Said | None:
    """`_said` where tracing hides what a function combines: by what upstream says beside it."""
    name = function.__name__
    if name == "causal_mask_function":
        return _Said(True)
    if name == "bidirectional_mask_function":
        return _Said(False)
    # A model's own pattern comes with `use_vmap` (from 5.0 on), windows and chunks come with their size.
    size = given.get("local_size")
    chunk = getattr(given.get("config"), "attention_chunk_size", None)
    # Before, beside a mask: packed sequences are looked for where there is none.
    unknown = given.get("attention_mask") is not None and "local_size" not in given
    if name != "and_mask" or given.get("use_vmap", unknown) or (chunk is not None and (size is None or size == chunk)):
        return None
    causal = "allow_is_bidirectional_skip" not in given
    if size is None:
        return _Said(causal)
    return _Said(causal, (size - 1, 0) if causal else (size, size))


def _in_full(**arguments: Any) -> Tensor:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**{**arguments, **skips})
    return mask
