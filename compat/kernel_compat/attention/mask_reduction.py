"""4D masks proven to be made of padding, causality, a window and packed sequences, which varlen kernels take."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.catalog import instead
from ..kernels.memo import fixed_shapes, memoised
from .tensors import previous_token

__all__ = ["ReducedMask", "reduce_mask", "require_own_keys", "visible_and_bias"]

#: An additive mask hides a key by any number up to this: some models use -1e4 and -1e9, most the dtype's lowest.
_HIDDEN = -1e4
#: Beside it a score vanishes, as beside the dtype's lowest; and a kernel may multiply it.
_SWAMPS = -1e30


class ReducedMask(NamedTuple):
    """A mask in the terms of a varlen kernel.

    Attributes:
        padding: (batch, kv_len) bool, False for padding; None for a batch without padding.
        padded_queries: whether `padding` applies to the queries too (self-attention), or to the keys alone.
        kv_len: how many keys are used. The rest are unused room of a static cache.
        causal, window: as in `MaskRecord`.
        segment_ids: (batch, kv_len) int64, the packed sequence of each token, 0 for padding; None for one sequence a row.
        from_4d: whether it comes from a 4D mask.
    """

    padding: Tensor | None
    padded_queries: bool
    kv_len: int
    causal: bool
    window: tuple[int, int]
    segment_ids: Tensor | None = None
    from_4d: bool = False


@torch.compiler.disable  # type: ignore[untyped-decorator]
def reduce_mask(mask: Tensor, q_len: int, kv_len: int) -> ReducedMask:
    """Prove, once a forward, that a 4D mask is made of padding, causality, a window and packed sequences alone.

    A query whose own key is hidden from every query counts as padding, as in a batch padded on the right: its output is zero.

    Args:
        mask: (batch or 1, heads or 1, q_len, kv_len or more), bool (True: visible) or float (added to the scores).

    Raises:
        ValueError: the mask is something else, such as a prefix or a bias, or it needs a gradient, which the numbers of a bias have,
            zeros included.
    """
    if mask.requires_grad:
        raise ValueError(f"a 4D attention mask that needs a gradient is a bias of the scores. {instead('', 'masks')}")
    return memoised(mask, ("reduce", q_len, kv_len), lambda: _reduce(mask, q_len, kv_len))


def _reduce(mask: Tensor, q_len: int, kv_len: int) -> ReducedMask:
    _check_shape(mask, q_len, kv_len)
    everything = _visible(mask)
    _require_no_more_keys(mask, everything, kv_len)
    visible = everything[..., :kv_len]
    if visible.shape[1] > 1 and not bool((visible == visible[:, :1]).all()):
        raise ValueError(
            "a 4D attention mask that differs between heads can't be reduced to padding, causality and window. "
            f"{instead('', 'masks')}"
        )
    visible = visible[:, 0]
    keys = visible.any(1)  # (batch, keys)
    width = visible.shape[2]

    # Every query sees the same keys: padding of the keys alone, as in cross-attention.
    if bool((visible == visible[:, :1]).all()):
        return ReducedMask(None if bool(keys.all()) else keys, False, width, False, (-1, -1), None, True)

    # A causal query that is no padding sees up to its own key, which shows where the unused room of a static cache begins.
    last = torch.where(visible, torch.arange(width, device=visible.device), -width).amax(-1)  # (batch, queries)
    end = int((last - torch.arange(q_len, device=visible.device)).max()) + q_len
    for kv in dict.fromkeys((end, width)):
        if not q_len <= kv <= width:
            continue
        reduced = _as_causal_or_window(visible[..., :kv], keys[:, :kv])
        if reduced is not None:
            return reduced
    if q_len == width:
        # A segment begins with each token that doesn't see the token before it. Padding has the id before it.
        before = previous_token(keys)
        continues = visible.gather(2, before.clamp(min=0)[..., None])[..., 0] & (before >= 0)
        reduced = _as_causal_or_window(visible, keys, (keys & ~continues).cumsum(1))
        if reduced is not None:
            return reduced
    raise ValueError(
        "this 4D attention mask is not made of padding, causality, a sliding window and packed sequences alone: a flash kernel "
        f"can't honour it. {instead('', 'masks')} Or use attn_implementation='sdpa' or 'eager'"
    )


def visible_and_bias(mask: Tensor, q_len: int, kv_len: int) -> tuple[Tensor, Tensor | None]:
    """A 4D mask as a bool mask of the visible keys and a bias of the scores, None if it has none. Synchronises once a forward for a mask.

    Args:
        mask: (batch or 1, heads or 1, q_len, kv_len or more), bool (True: visible) or float (added to the scores).

    Raises:
        ValueError: its shape or dtype doesn't fit, or it shows keys after the last one.
    """
    _check_shape(mask, q_len, kv_len)

    def split() -> tuple[Tensor, Tensor | None]:
        visible = mask if mask.dtype == torch.bool else mask > _HIDDEN
        if mask.shape[-1] > kv_len and not fixed_shapes(mask):
            _require_no_more_keys(mask, visible, kv_len)
        visible = visible[..., :kv_len]
        if mask.dtype == torch.bool:
            return visible, None
        numbers = mask[..., :kv_len]
        bias = numbers.masked_fill(~visible, 0)
        # A bias that needs a gradient must not be kept: its graph lasts for one backward.
        if not (fixed_shapes(mask) or mask.requires_grad or bool(bias.any())):
            return visible, None
        # Eager attention adds numbers, not minus infinity: where a row hides all keys, as Parakeet's do for padding, it sees them all.
        hidden = ~visible.any(-1, keepdim=True)
        wide = numbers.float() if numbers.dtype == torch.float16 else numbers
        lowest = wide.masked_fill(numbers <= torch.finfo(numbers.dtype).min, _SWAMPS)
        return visible | (hidden & (numbers > -math.inf)), torch.where(hidden, lowest, bias)

    return split() if mask.requires_grad else memoised(mask, ("visible", kv_len), split)


def require_own_keys(visible: Tensor) -> None:
    """Check that True in a causal layer's mask means visible. Synchronises once a forward for a mask.

    Args:
        visible: (batch or 1, heads or 1, length, length) bool.

    Raises:
        ValueError: a query sees later keys, and not its own, which others see.
    """

    def find() -> bool:
        own = visible.diagonal(dim1=-2, dim2=-1)
        return bool((visible.any(-2) & visible.triu(1).any(-1) & ~own).any())

    if memoised(visible, ("without its own",), find):
        raise ValueError(
            "a bool attention mask of a causal layer in which tokens see later tokens and not themselves: nothing says whether its "
            "True means hidden. Pass True for visible keys, or use attn_implementation='eager'"
        )


def _check_shape(mask: Tensor, q_len: int, kv_len: int) -> None:
    if mask.shape[-2] != q_len or mask.shape[-1] < kv_len:
        raise ValueError(
            f"a 4D attention mask of shape {tuple(mask.shape)} does not fit {q_len} queries and {kv_len} keys"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"a 4D attention mask must be bool or float, not {mask.dtype}: 1 may mean either there")


def _require_no_more_keys(mask: Tensor, visible: Tensor, kv_len: int) -> None:
    if bool(visible[..., kv_len:].any()):  # a cache that drops its oldest keys, as a sliding window's does
        raise ValueError(
            f"a 4D attention mask of shape {tuple(mask.shape)} shows keys after the last of {kv_len}: it doesn't say which key "
            "each column stands for"
        )


def _visible(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    if not bool((visible | (mask <= _HIDDEN)).all()):
        raise ValueError(
            "a 4D attention mask that holds a bias, numbers besides 0 and minus infinity, can't be honoured by flash kernels. "
            f"{instead('', 'masks')}"
        )
    return visible


def _as_causal_or_window(visible: Tensor, keys: Tensor, segment_ids: Tensor | None = None) -> ReducedMask | None:
    """The reduction of (batch, q_len, kv_len) to padding, causality and a window within the segments; None if it is more."""
    q_len, kv_len = visible.shape[1:]
    offset = kv_len - q_len
    # A query is padding if its own key is: its row may then be empty.
    ignored = ~keys[:, offset:] & ~visible.any(-1)
    distance = (
        torch.arange(q_len, device=visible.device)[:, None] + offset - torch.arange(kv_len, device=visible.device)[None]
    )
    lowest = torch.iinfo(torch.int64).min
    left = int(torch.where(visible, distance, lowest).max())
    right = int(torch.where(visible, -distance, lowest).max())
    causal = right <= 0

    def matches(left: int | None, right: int | None) -> bool:
        expected = keys[:, None, :]
        if segment_ids is not None:
            expected = expected & (segment_ids[:, :, None] == segment_ids[:, None, :])
        if left is not None:
            expected = expected & (distance <= left)
        if right is not None:
            expected = expected & (-distance <= right)
        return bool(((expected == visible).all(-1) | ignored).all())

    # The weakest exact description: a window only if one is needed.
    if matches(None, 0 if causal else None):
        window = (-1, -1)
    elif left >= 0 and matches(left, 0 if causal else right):  # kernels take a negative limit for none
        window = (left, 0 if causal else right)
    else:
        return None
    segment_ids = None if segment_ids is None else torch.where(keys, segment_ids, 0)
    return ReducedMask(None if bool(keys.all()) else keys, True, kv_len, causal, window, segment_ids, True)
