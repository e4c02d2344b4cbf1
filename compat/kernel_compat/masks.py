"""From the masks and position ids transformers hands over to the sequence lengths that varlen kernels take.

What reads values off the device is done once for a tensor, not once for a layer: the result is kept for as long as the
tensor lives and isn't written to. Tensors made in inference mode are asked each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")

__all__ = [
    "Packing",
    "Padding",
    "Reduced",
    "as_int",
    "attention_mask_function",
    "fixed_shapes",
    "is_told",
    "longest",
    "packing",
    "padding",
    "query_mask",
    "reduce_mask",
    "require_total",
    "runs",
    "starts_of_sequences",
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


class Packing(NamedTuple):
    """Sequences joined along one row: their offsets, shape (sequences + 1,), int32, and the longest one."""

    cu_seqlens: Tensor
    max_seqlen: int


class Reduced(NamedTuple):
    """What a 4D mask says, when it says no more than a varlen kernel can.

    Attributes:
        padding: (batch, kv_len) bool, True for keys that are there; None where all are.
        padded_queries: whether `padding` is about the queries as well (self-attention), or the keys alone.
        kv_len: keys behind this one are behind every query: room of a static cache.
        causal, window: as the kernels take them.
    """

    padding: Tensor | None
    padded_queries: bool
    kv_len: int
    causal: bool
    window: tuple[int, int]


def fixed_shapes(tensor: Tensor) -> bool:
    """Whether shapes must not depend on values here: under torch.compile, and while a CUDA graph is captured."""
    if torch.compiler.is_compiling():
        return True
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


_memo = WeakIdKeyDictionary()
_memo_lock = threading.Lock()
_MEMO_SIZE = 8


def _once(tensor: Tensor, purpose: tuple[Any, ...], compute: Callable[[], T]) -> T:
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
    return _once(mask, ("padding", q_len, padded_queries), lambda: _padding(mask, q_len, padded_queries))


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


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def starts_of_sequences(position_ids: Tensor, batch: int, causal: bool) -> Tensor | None:
    """(batch, length - 1) bool: where packed position ids begin a new sequence; None where they can't.

    Positions restart at 0 there, or fall back: those of a sequence that was cut need not start at 0. The second rule, and rows
    beyond the first, are for causal attention alone: vision encoders number their patches as they like.
    """
    if position_ids.ndim == 3 and position_ids.shape[0] == 4:
        position_ids = position_ids[0]  # Qwen2-VL: text positions before those of time, height and width
    if position_ids.ndim == 1:
        position_ids = position_ids[None]
    if position_ids.ndim != 2 or position_ids.shape[1] < 2 or position_ids.shape[0] not in (1, batch):
        return None
    if not causal and batch > 1:
        return None
    now, before = position_ids[:, 1:], position_ids[:, :-1]
    begins = (now == 0) | (now < before) if causal else now == 0
    return begins.expand(batch, -1)


def packing(position_ids: Tensor, batch: int, causal: bool) -> Packing | None:
    """The packed sequences that position ids tell of; None where none do. Synchronises once a tensor."""
    return _once(position_ids, ("packing", batch, causal), lambda: _packing(position_ids, batch, causal))


def _packing(position_ids: Tensor, batch: int, causal: bool) -> Packing | None:
    begins = starts_of_sequences(position_ids, batch, causal)
    if begins is None:
        return None
    first = torch.nn.functional.pad(begins, (1, 0), value=True).flatten()
    index = torch.arange(first.numel(), device=first.device)
    start = torch.where(first, index, 0).cummax(0).values
    count, longest = torch.stack([first.sum(), (index - start).max() + 1]).tolist()
    if count == batch:
        return None
    offsets = torch.nn.functional.pad(_true_indices(first, count), (0, 1), value=first.numel())
    return Packing(offsets.to(torch.int32), longest)


def longest(cu_seqlens: Tensor) -> int:
    """The longest of the sequences between these offsets. Synchronises once a tensor."""
    return int(_once(cu_seqlens, ("longest",), lambda: cu_seqlens.diff().max().item()))


def require_total(cu_seqlens: Tensor, tokens: int, name: str) -> None:
    """Offsets must end where the tokens do. Synchronises once a tensor.

    Raises:
        ValueError: they don't.
    """
    total = _once(cu_seqlens, ("total",), cu_seqlens[-1].item)
    if total != tokens:
        raise ValueError(f"{name} ends at {total}, and there are {tokens} tokens in the batch")


def as_int(length: Any) -> int:
    """A maximum length as the int that kernels take. Synchronises once a tensor."""
    if isinstance(length, Tensor):
        return int(_once(length, ("int",), length.item))
    return int(length)


#: An additive mask hides a key by any number from here down: some models use -1e4 and -1e9, most the dtype's least.
_HIDDEN = -1e4


@torch.compiler.disable  # type: ignore[untyped-decorator]
def reduce_mask(mask: Tensor, q_len: int, kv_len: int) -> Reduced:
    """What a 4D mask says, proved once a mask: padding, causality and a window, and nothing besides.

    A query whose own key nobody sees counts as padding, as in the mask of a batch padded on the right: its output is zero.

    Args:
        mask: (batch or 1, heads or 1, q_len, kv_len or more), bool (True: visible) or float (added to the scores).

    Raises:
        ValueError: the mask says something else, such as blocks, a prefix or a bias.
    """
    return _once(mask, ("reduce", q_len, kv_len), lambda: _reduce(mask, q_len, kv_len))


def _reduce(mask: Tensor, q_len: int, kv_len: int) -> Reduced:
    if mask.shape[-2] != q_len or mask.shape[-1] < kv_len:
        raise ValueError(
            f"a 4D attention mask of shape {tuple(mask.shape)} does not fit {q_len} queries and {kv_len} keys"
        )
    visible = _visible(mask)[..., :kv_len]
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
    raise ValueError(
        "this 4D attention mask is not what padding, causality and a sliding window make: a flash kernel can't honour "
        "it. Use attn_implementation='sdpa' or 'eager', or give packed sequences as cu_seq_lens_q and cu_seq_lens_k"
    )


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


def _as_causal_or_window(visible: Tensor, keys: Tensor, q_len: int, kv_len: int) -> Reduced | None:
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
        if left is not None:
            expected = expected & (distance <= left)
        if right is not None:
            expected = expected & (-distance <= right)
        return bool(((expected == visible).all(-1) | silent).all())

    # The weakest description that is exact: no window where none shows.
    padding = None if bool(keys.all()) else keys
    if matches(None, 0 if causal else None):
        return Reduced(padding, True, kv_len, causal, (-1, -1))
    window = (left, 0 if causal else right)
    if left >= 0 and matches(*window):  # a kernel takes a negative limit for none
        return Reduced(padding, True, kv_len, causal, window)
    return None


def attention_mask_function(
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
    """The mask our attention functions are given: the padding, or None where there is none.

    Called by ``create_causal_mask`` and its like, once a forward and layer type. A pattern that is not causal, bidirectional,
    windowed or packed is built in full, for the forward to prove or refuse: upstream's own function drops it.

    Returns:
        None, (batch, length) bool with length at most kv_length, or (batch, 1, q_length, kv_length) bool.
    """
    tracing = torch.compiler.is_compiling()
    patterns = frozenset() if mask_function is None or tracing else _patterns(mask_function)
    if not is_told(mask_function, kwargs, attention_mask is not None):
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
    elif kv_length != q_length and not tracing and "bidirectional_mask_function" not in patterns:
        end = _end(cache_position, q_length, q_offset)
        if attention_mask is not None:
            attention_mask = attention_mask[:, :end]
        elif end - kv_offset < kv_length:
            device = cache_position.device if cache_position is not None else kwargs.get("device")
            attention_mask = torch.ones(batch_size, end - kv_offset, dtype=torch.bool, device=device)
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, -kv_length:]
    # Shorter than the keys: those of a static cache, which the forward cuts to the mask's length.
    if attention_mask.shape[1] < kv_length or fixed_shapes(attention_mask):
        return attention_mask
    return None if bool(attention_mask.all()) else attention_mask


def _end(cache_position: Tensor | None, q_length: int | None, q_offset: int | Tensor) -> int:
    """How many tokens there are, cached and new."""
    if cache_position is not None:
        return as_int(cache_position[-1]) + 1
    return as_int(q_offset) + (q_length or 0)


#: Mask functions of transformers.masking_utils whose meaning reaches the forward by other ways: ``is_causal``,
#: ``sliding_window``, ``position_ids``; and those that combine others.
_TOLD = frozenset(
    {
        "causal_mask_function",
        "bidirectional_mask_function",
        "sliding_window_overlay.<locals>.inner_mask",
        "sliding_window_bidirectional_overlay.<locals>.inner_mask",
        "packed_sequence_mask_function.<locals>.inner_mask",
    }
)
_COMBINING = frozenset({"and_masks.<locals>.and_mask", "remap_positions_for_packed_sequence.<locals>.inner_mask"})


def is_told(function: Callable[..., Any] | None, arguments: dict[str, Any], masked: bool) -> bool:
    """Whether the forward is told by other ways of all that a mask function means.

    Args:
        arguments: what else the mask function is called with.
        masked: whether there is a mask besides.
    """
    if function is None:
        return True
    if torch.compiler.is_compiling():
        return _told_in_a_graph(function, arguments, masked)
    return _patterns(function) <= _TOLD


def _patterns(function: Callable[..., Any]) -> frozenset[str]:
    """The names of the mask functions that one is made of; of one that isn't known, its own."""
    name = function.__qualname__
    if name not in _COMBINING:
        return frozenset({name})
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    parts = [part for cell in cells for part in (cell if isinstance(cell, tuple) else (cell,)) if callable(part)]
    return frozenset().union(*map(_patterns, parts))


def _told_in_a_graph(function: Callable[..., Any], arguments: dict[str, Any], masked: bool) -> bool:
    """Whether `_TOLD` has all, where tracing hides what a function combines: by what upstream says beside it."""
    name = function.__name__
    if name in ("causal_mask_function", "bidirectional_mask_function"):
        return True
    # A model's own pattern comes with `use_vmap` (from 5.0 on), chunks come with their size.
    chunk = getattr(arguments.get("config"), "attention_chunk_size", None)
    # Before, beside a mask: packed sequences are looked for where there is none, windows come with their size.
    untold = masked and "local_size" not in arguments
    return (
        name == "and_mask"
        and not arguments.get("use_vmap", untold)
        and (chunk is None or arguments.get("local_size", chunk) != chunk)
    )


def _in_full(**arguments: Any) -> Tensor:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**{**arguments, **skips})
    return mask
