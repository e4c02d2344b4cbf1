"""From the masks and position ids transformers hands over to the sequence lengths that varlen kernels take.

What reads values off the device is done once for a tensor, not once for a layer: the result is kept for as long as the
tensor lives and isn't written to. Tensors made in inference mode are asked each time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")

__all__ = [
    "Padding",
    "Reduced",
    "as_int",
    "fixed_shapes",
    "longest",
    "on_host",
    "once",
    "padding",
    "query_mask",
    "reduce_mask",
    "require",
    "require_total",
    "runs",
]


class Padding(NamedTuple):
    """Where the tokens of a padded batch are: indices into the flattened (batch, length), and sequence lengths."""

    q_index: Tensor
    k_index: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    holes: bool


class Reduced(NamedTuple):
    """What a 4D mask says, when it says no more than a varlen kernel can.

    Attributes:
        padding: (batch, kv_len) bool, True for keys that are there; None where all are.
        padded_queries: whether `padding` is about the queries as well (self-attention), or the keys alone.
        kv_len: keys behind this one are behind every query: room of a static cache.
        causal, window: as the kernels take them.
        numbers: (batch, kv_len) int64, which sequence each token belongs to, 0 for padding; None for one a row.
    """

    padding: Tensor | None
    padded_queries: bool
    kv_len: int
    causal: bool
    window: tuple[int, int]
    numbers: Tensor | None = None


def fixed_shapes(tensor: Tensor) -> bool:
    """Whether shapes must not depend on values here: under torch.compile, and while a CUDA graph is captured."""
    if torch.compiler.is_compiling():
        return True
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


_memo = WeakIdKeyDictionary()
_memo_lock = threading.Lock()
_MEMO_SIZE = 8


def once(tensor: Tensor, purpose: tuple[Any, ...], compute: Callable[[], T]) -> T:
    """`compute()`, or what it answered for this very tensor, if nobody has written to it since.

    Layers are often given views of their own of one mask, so a view counts as its base with an offset. Writes are told by
    the version counter, which writes through ``.data`` or a shared numpy array go past.
    """
    if tensor.is_inference():  # has no version counter: a write to it would go unnoticed
        return compute()
    base = tensor if tensor._base is None else tensor._base
    geometry = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    key = (purpose, geometry, tensor._version)
    with _memo_lock:
        known = _memo.get(base)
        if known is not None and key in known:
            remembered: T = known[key]
            return remembered
    value = compute()
    with _memo_lock:
        known = _memo.setdefault(base, {})
        while len(known) >= _MEMO_SIZE:
            del known[next(iter(known))]
        known[key] = value
    return value


def padding(mask: Tensor, q_len: int, padded_queries: bool) -> Padding | None:
    """The tokens of a padded batch; None where there is no padding. Synchronises with the device once a mask.

    Args:
        mask: (batch, kv_len), 1 or True for tokens that are there. Queries stand at its last q_len places.
        padded_queries: False for cross-attention, whose queries are all there.

    Raises:
        ValueError: the mask holds other values than 0 and 1.
    """
    return once(mask, ("padding", q_len, padded_queries), lambda: _padding(mask, q_len, padded_queries))


def _padding(mask: Tensor, q_len: int, padded_queries: bool) -> Padding | None:
    there = mask.bool()
    queries = query_mask(there, q_len, padded_queries)
    k_lens, q_lens = there.sum(1, dtype=torch.int32), queries.sum(1, dtype=torch.int32)
    strange = (there != mask).any()
    facts = torch.stack([k_lens.sum(), k_lens.max(), q_lens.sum(), q_lens.max(), runs(there).max(), strange])
    k_total, k_max, q_total, q_max, most_runs, is_strange = facts.tolist()
    if is_strange:
        raise ValueError(
            "a 2D attention mask must hold 1 for tokens and 0 for padding, and this one holds other values"
        )
    if k_total == there.numel():
        return None
    same = queries.shape == there.shape and padded_queries and q_len > 1
    q_index, cu_seqlens_q = _true_indices(queries, q_total), _offsets(q_lens)
    return Padding(
        q_index,
        q_index if same else _true_indices(there, k_total),
        cu_seqlens_q,
        cu_seqlens_q if same else _offsets(k_lens),
        q_max,
        k_max,
        most_runs > 1,
    )


def query_mask(there: Tensor, q_len: int, padded_queries: bool) -> Tensor:
    """(batch, q_len) bool: which queries are there, of a bool mask (batch, kv_len) over the keys.

    A single query is always there: a mask as long as a static cache ends in zeros that are not about it.
    """
    if padded_queries and q_len > 1:
        return there[:, there.shape[1] - q_len :]
    return there.new_ones(there.shape[0], q_len)


def runs(there: Tensor) -> Tensor:
    """(batch,): how many runs of tokens each row of a bool mask has; more than one means padding between them."""
    return there[:, :1].sum(1) + (there[:, 1:] & ~there[:, :-1]).sum(1)


def _true_indices(mask: Tensor, count: int) -> Tensor:
    """The indices of the True ones in order; unlike ``nonzero``, without asking the device how many they are."""
    return torch.argsort(~mask.flatten(), stable=True)[:count]


def places_before(real: Tensor) -> Tensor:
    """Index of the last token before each position of a row, -1 if there is none. Shape (batch, length), int64.

    Args:
        real: (batch, length) bool, False for padding.
    """
    place = torch.arange(real.shape[1], device=real.device)
    return torch.nn.functional.pad(torch.where(real, place, -1).cummax(1).values, (1, -1), value=-1)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def on_host(cu_seqlens: Tensor) -> list[int]:
    """The offsets of packed sequences as ints. Attention and mixers share them. Synchronises once a tensor."""
    return once(cu_seqlens, ("on host",), cu_seqlens.tolist)


def longest(cu_seqlens: Tensor) -> int:
    """The longest of the sequences between these offsets. Synchronises once a tensor."""

    def compute() -> int:
        return max((stop - start for start, stop in itertools.pairwise(on_host(cu_seqlens))), default=0)

    return once(cu_seqlens, ("longest",), compute)


def require_total(cu_seqlens: Tensor, tokens: int, name: str) -> None:
    """Offsets must end where the tokens do. Synchronises once a tensor.

    Raises:
        ValueError: they don't.
    """
    total = on_host(cu_seqlens)[-1]
    if total != tokens:
        raise ValueError(f"{name} ends at {total}, and there are {tokens} tokens in the batch")


def require(holds: Tensor, message: str) -> None:
    """Check a condition on the device without waiting for it.

    Args:
        holds: one bool.

    Raises:
        ValueError: it doesn't hold; on a GPU and where shapes are fixed the device's assertion fails instead.
    """
    if holds.is_cuda or fixed_shapes(holds):
        torch._assert_async(holds, message)
    elif not bool(holds):
        raise ValueError(message)


def as_int(length: Any) -> int:
    """An int, or the value of a tensor with one element. Synchronises once a tensor."""
    if isinstance(length, Tensor):
        return int(once(length, ("int",), length.item))
    return int(length)


#: An additive mask hides a key by any number from here down: some models use -1e4 and -1e9, most the dtype's least.
_HIDDEN = -1e4


@torch.compiler.disable  # type: ignore[untyped-decorator]
def reduce_mask(mask: Tensor, q_len: int, kv_len: int) -> Reduced:
    """What a 4D mask says, proved once a mask: padding, causality, a window and packed sequences, and nothing besides.

    A query whose own key nobody sees counts as padding, as in the mask of a batch padded on the right: its output is zero.

    Args:
        mask: (batch or 1, heads or 1, q_len, kv_len or more), bool (True: visible) or float (added to the scores).

    Raises:
        ValueError: the mask says something else, such as a prefix or a bias.
    """
    return once(mask, ("reduce", q_len, kv_len), lambda: _reduce(mask, q_len, kv_len))


def _reduce(mask: Tensor, q_len: int, kv_len: int) -> Reduced:
    if mask.shape[-2] != q_len or mask.shape[-1] < kv_len:
        raise ValueError(
            f"a 4D attention mask of shape {tuple(mask.shape)} does not fit {q_len} queries and {kv_len} keys"
        )
    everything = _visible(mask)
    if bool(everything[..., kv_len:].any()):  # a cache that drops its oldest keys, as one of a sliding window does
        raise ValueError(
            f"a 4D attention mask of shape {tuple(mask.shape)} shows keys behind the last of {kv_len}: which key is which "
            "can't be told"
        )
    visible = everything[..., :kv_len]
    if visible.shape[1] > 1 and not bool((visible == visible[:, :1]).all()):
        raise ValueError(
            "a 4D attention mask that differs between heads can't be reduced to padding, causality and window"
        )
    visible = visible[:, 0]
    keys = visible.any(1)  # (batch, keys)
    width = visible.shape[2]

    # Every query sees the same keys: padding of the keys alone, as in cross-attention.
    if bool((visible == visible[:, :1]).all()):
        return Reduced(None if bool(keys.all()) else keys, False, width, False, (-1, -1))

    # A causal query that is there sees up to its own key, so the masks of a static cache tell where its room begins.
    last = torch.where(visible, torch.arange(width, device=visible.device), -width).amax(-1)  # (batch, queries)
    end = int((last - torch.arange(q_len, device=visible.device)).max()) + q_len
    for kv in dict.fromkeys((end, width)):
        if not q_len <= kv <= width:
            continue
        reduced = _as_causal_or_window(visible[..., :kv], keys[:, :kv], q_len, kv)
        if reduced is not None:
            return reduced
    if q_len == width:
        reduced = _as_causal_or_window(visible, keys, q_len, width, _blocks(visible, keys))
        if reduced is not None:
            return reduced
    raise ValueError(
        "this 4D attention mask is not what padding, causality, a sliding window and packed sequences make: a flash kernel "
        "can't honour it. Use attn_implementation='sdpa' or 'eager'"
    )


def _blocks(visible: Tensor, keys: Tensor) -> Tensor:
    """The numbers of sequences, of which each begins with a token that doesn't see the one before; padding goes with it."""
    before = places_before(keys)
    sees_it = visible.gather(2, before.clamp(min=0)[..., None])[..., 0] & (before >= 0)
    return (keys & ~sees_it).cumsum(1)


def _visible(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise ValueError(f"a 4D attention mask must be bool or float, not {mask.dtype}: 1 may mean either there")
    visible = mask == 0
    if not bool((visible | (mask <= _HIDDEN)).all()):
        raise ValueError(
            "a 4D attention mask that holds a bias, numbers besides 0 and minus infinity, can't be honoured by flash kernels"
        )
    return visible


def _as_causal_or_window(
    visible: Tensor, keys: Tensor, q_len: int, kv_len: int, numbers: Tensor | None = None
) -> Reduced | None:
    offset = kv_len - q_len
    real = keys[:, offset:]  # a query is padding where its own key is: its row says nothing
    silent = ~real & ~visible.any(-1)
    distance = (
        torch.arange(q_len, device=visible.device)[:, None] + offset - torch.arange(kv_len, device=visible.device)[None]
    )
    lowest = torch.iinfo(torch.int64).min
    left = int(torch.where(visible, distance, lowest).max())
    right = int(torch.where(visible, -distance, lowest).max())
    causal = right <= 0

    def matches(left: int | None, right: int | None) -> bool:
        expected = keys[:, None, :]
        if numbers is not None:
            expected = expected & (numbers[:, :, None] == numbers[:, None, :])
        if left is not None:
            expected = expected & (distance <= left)
        if right is not None:
            expected = expected & (-distance <= right)
        return bool(((expected == visible).all(-1) | silent).all())

    # The weakest description that is exact: no window where none shows.
    padding = None if bool(keys.all()) else keys
    numbers_of_tokens = None if numbers is None else torch.where(keys, numbers, 0)
    if matches(None, 0 if causal else None):
        return Reduced(padding, True, kv_len, causal, (-1, -1), numbers_of_tokens)
    window = (left, 0 if causal else right)
    if left >= 0 and matches(*window):  # a kernel takes a negative limit for none
        return Reduced(padding, True, kv_len, causal, window, numbers_of_tokens)
    return None
