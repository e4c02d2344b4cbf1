"""The exchange of sequence parallelism, and what has to hold of a call before it: a rank that fails in it lets the others wait."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

# torch's documentation has them as the differentiable and traceable collectives; up to 2.15 the module has this name.
from torch.distributed import _functional_collectives as collectives

from ...errors import UnsupportedFeatureError
from ..boundaries import current
from ..forward import _NO_KERNEL_HAS
from ..mask_function import handed_on, plain_mask_function
from ..padding import fixed_shapes, once

__all__ = ["gathering_mask_function", "spread"]

T = TypeVar("T")

_NAME = "sequence parallelism"


def spread(forward: Callable[..., Any], group: dist.ProcessGroup | None) -> Callable[..., Any]:
    """`kernel_compat.ulysses`, whose docstring says what it does, over a process group; None is the default one."""
    # The first call reads off the device what it checks, and the ranks tell each other what they found: most mistakes are
    # made in every call. Later ones cost neither.
    first = True

    @wraps(forward)
    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        skip_sequence_parallel: bool = False,
        skip_ulysses: bool = False,
        **kwargs: Any,
    ) -> Any:
        nonlocal first
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if ranks == 1:
            return forward(module, query, key, value, attention_mask, **kwargs)
        if skip_sequence_parallel or skip_ulysses:
            return forward(module, query, key, value, _slice_of(attention_mask, key.shape[2], ranks, rank), **kwargs)

        batch, heads, length = query.shape[:3]
        kwargs = _with_what_the_model_was_given(kwargs, batch, length, key.shape[2])
        call = (module, query, key, value, attention_mask, kwargs, ranks, rank)
        if first and not fixed_shapes(query):
            attention_mask, kwargs = _agreed(lambda: _for_all_tokens(*call, wait=True), query, group, ranks)
            first = False
        else:
            attention_mask, kwargs = _for_all_tokens(*call, wait=False)
        query, key, value = _scatter_heads(query, key, value, group, ranks)
        output = forward(module, query, key, value, attention_mask, **kwargs)[0]
        if output.shape[:3] != (batch, ranks * length, heads // ranks):
            raise ValueError(
                f"{forward!r} answers the shape {tuple(output.shape)} for a query of shape {tuple(query.shape)}: it must "
                "be (batch, length, heads, head_dim)"
            )
        return _gather_heads(output, group, ranks), None

    attention.ulysses_group = group  # type: ignore[attr-defined]
    return attention


def _with_what_the_model_was_given(kwargs: dict[str, Any], batch: int, length: int, kv_length: int) -> dict[str, Any]:
    """The keywords of a layer, with the lengths and positions that its model keeps from it."""
    forward = current()
    if forward is None or not forward.describes(batch, length, kv_length):
        return kwargs
    given = {**forward.lengths, **({} if forward.positions is None else {"position_ids": forward.positions})}
    return {**given, **{name: value for name, value in kwargs.items() if name not in given or value is not None}}


class _AllToAll(torch.autograd.Function):  # type: ignore[misc]
    """Slice i along the first dimension goes to rank i; slice i of the result comes from there.

    Not `all_to_all_single_autograd`: its result waits for its first use, and a kernel that asks for its address is none.
    Not ``dist.all_to_all_single``: compiled by torch 2.11, it has gradients of zero (and none of the others, 2.10 to 2.15).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradient.contiguous(), ctx.group), None


def _all_to_all(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    received = collectives.all_to_all_single(x, None, None, dist.group.WORLD if group is None else group)
    # Waits on the stream, not on the host.
    return received.wait() if isinstance(received, collectives.AsyncCollectiveTensor) else received


def _scatter_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup | None, ranks: int
) -> tuple[Tensor, ...]:
    """From (batch, heads, length, head_dim) each to (batch, heads / ranks, ranks * length, head_dim), all in one exchange."""
    if (times := ranks // key.shape[1]) > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    given = (query, key, value)
    parts = [x.unflatten(1, (ranks, -1)).permute(1, 0, 3, 2, 4).flatten(3) for x in given]
    # Where the dtypes differ, all travel in one that holds them all.
    received = _AllToAll.apply(torch.cat(parts, -1), group)  # (ranks, batch, length, features)
    joined = received.transpose(0, 1).flatten(1, 2).split([part.shape[-1] for part in parts], -1)
    return tuple(
        y.unflatten(-1, (-1, x.shape[-1])).transpose(1, 2).to(x.dtype) for x, y in zip(given, joined, strict=True)
    )


def _gather_heads(output: Tensor, group: dist.ProcessGroup | None, ranks: int) -> Tensor:
    """From (batch, ranks * length, heads / ranks, head_dim) to (batch, length, heads, head_dim)."""
    received = _AllToAll.apply(output.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous(), group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def gathering_mask_function(group: dist.ProcessGroup | None) -> Callable[..., Tensor | None]:
    """`plain_mask_function` for tokens spread over a group: a padding mask's slices become that of the full sequence.

    The mask functions are called at the same places on every rank, and that is where ranks may talk to each other: whether
    a slice has padding is no rank's to decide alone. Every rank must be given a mask, or none.
    """

    def mask_function(**given: Any) -> Tensor | None:
        mask: Tensor | None = given.get("attention_mask")
        queries = given.get("cache_position")
        ranks, length = dist.get_world_size(group), given["q_length"] if queries is None else queries.shape[0]
        if ranks == 1 or mask is None or mask.shape[1] not in (length, ranks * length):
            return plain_mask_function(**given)
        # As many keys as queries: there is no cache. Other patterns are built in full, from slices: the forward refuses them.
        if given["kv_length"] not in (length, mask.shape[1]) or not handed_on(given):
            return plain_mask_function(**given)
        if mask.shape[1] == length:
            slices = _all_to_all(mask.to(torch.uint8).expand(ranks, -1, -1).contiguous(), group)
            mask = slices.transpose(0, 1).flatten(1).bool()
        return None if not fixed_shapes(mask) and bool(mask.all()) else mask

    return mask_function


def _slice_of(mask: Tensor | None, length: int, ranks: int, rank: int) -> Tensor | None:
    """Of a padding mask that was gathered, what the rank had."""
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] == ranks * length:
        return mask[:, rank * length : (rank + 1) * length]
    return mask


def _agreed(prepare: Callable[[], T], query: Tensor, group: dist.ProcessGroup | None, ranks: int) -> T:
    """What `prepare` returns, if it does on every rank, and all have as many tokens; else an error on every rank.

    Raises:
        ValueError: another rank refuses, or has another number of tokens.
    """
    refusal = None
    try:
        prepared = prepare()
    except Exception as error:  # each goes to its caller below
        refusal = error
    mine = [query.shape[0], query.shape[2], refusal is not None]
    said = _all_to_all(torch.tensor([mine] * ranks, device=query.device), group).tolist()
    if refusal is not None:
        raise refusal
    if refusing := [str(rank) for rank, (_, _, refuses) in enumerate(said) if refuses]:
        raise ValueError(f"rank {', '.join(refusing)} of the group refuses this call: the error there says why")
    if any(told != said[0] for told in said):
        shapes = ", ".join(f"{batch} x {length}" for batch, length, _ in said)
        raise ValueError(f"every rank must have a slice of the same length, and they are (batch x length) {shapes}")
    return prepared


def _for_all_tokens(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
    ranks: int,
    rank: int,
    wait: bool,
) -> tuple[Tensor | None, dict[str, Any]]:
    """The mask and the keywords for this rank's heads of all tokens; an error where they can't be right."""
    _require_spreadable(query, key, value, kwargs, ranks)
    batch, heads, length = query.shape[:3]
    mask = _require_full(mask, heads, ranks * length, ranks, rank)
    beginnings = mask
    if mask is None:  # which goes before cu_seq_lens_*
        beginnings = kwargs.get("cu_seq_lens_q")
        for offsets in (beginnings, kwargs.get("cu_seq_lens_k")):
            if offsets is not None:
                _require_end(offsets, batch * ranks * length, wait)
    positions, sinks = kwargs.get("position_ids"), kwargs.get("s_aux")
    if positions is not None and positions.shape[-1] != ranks * length:
        causal = kwargs.get("is_causal")
        causal = bool(getattr(module, "is_causal", True)) if causal is None else causal
        _require_positions(positions, beginnings, batch, length, ranks, rank, causal, wait)
        kwargs = {name: value for name, value in kwargs.items() if name != "position_ids"}
    if sinks is not None:
        kwargs = {**kwargs, "s_aux": sinks.chunk(ranks)[rank]}
    return mask, kwargs


def _require_spreadable(query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any], ranks: int) -> None:
    """Shapes and keywords, which are the same on every rank: so is the error."""
    skip = "Pass skip_sequence_parallel=True where every rank has all keys, or none of another's."
    for name in ("cache", "output_attentions", *_NO_KERNEL_HAS):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise UnsupportedFeatureError(f"the argument {name}", _NAME, skip)
    (batch, heads, length), (kv_heads, kv_length) = query.shape[:3], key.shape[1:3]
    if kv_length != length:
        raise UnsupportedFeatureError(
            f"{kv_length} keys beside {length} queries, as with a cache", _NAME, f"Pass use_cache=False. {skip}"
        )
    if key.shape[:3] != value.shape[:3] or key.shape[0] != batch:
        raise ValueError(f"shapes that don't fit: {[tuple(x.shape) for x in (query, key, value)]}")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} key heads")
    if heads % ranks:
        raise UnsupportedFeatureError(
            f"{heads} query heads on {ranks} ranks", _NAME, "The number of ranks must divide that of the query heads."
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise UnsupportedFeatureError(
            f"{kv_heads} key heads on {ranks} ranks",
            _NAME,
            "The number of ranks must divide that of the key heads, or be a multiple of it.",
        )
    sinks = kwargs.get("s_aux")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks of shape {tuple(sinks.shape)} are not one for each of {heads} heads")


def _require_full(mask: Any, heads: int, tokens: int, ranks: int, rank: int) -> Tensor | None:
    """A mask of the full sequence; where it differs between heads, the part of this rank's."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        raise UnsupportedFeatureError(
            f"a mask of {type(mask).__name__}", _NAME, "It takes tensors of 2 or 4 dimensions."
        )
    if mask.ndim == 2 and mask.shape[1] != tokens:
        raise UnsupportedFeatureError(
            f"a padding mask of {mask.shape[1]} tokens for a sequence of {tokens}",
            _NAME,
            "Pass that of the full sequence, or register the name with sequence_parallel=, whose mask function gathers it.",
        )
    if mask.ndim == 2:
        return mask
    if mask.shape[2:] != (tokens, tokens) or mask.shape[1] not in (1, heads):
        raise UnsupportedFeatureError(
            f"a mask of shape {tuple(mask.shape)} for {heads} heads and a sequence of {tokens}",
            _NAME,
            "A 4D mask must be that of the full sequence; patterns besides padding, causality and a window come as one.",
        )
    return mask if mask.shape[1] == 1 else mask.chunk(ranks, 1)[rank]


def _require_end(offsets: Tensor, tokens: int, wait: bool) -> None:
    """Offsets of a rank's slice end with it; and tokens behind the end would have no output."""
    message = (
        f"cu_seq_lens_* don't end at {tokens}, where the full sequence does: pass those of all ranks' tokens, padding as a "
        "sequence of its own"
    )
    _require(offsets, ("ends", tokens), lambda: offsets[-1] == tokens, message, wait)


def _require_positions(
    positions: Tensor,
    beginnings: Tensor | None,
    batch: int,
    length: int,
    ranks: int,
    rank: int,
    causal: bool,
    wait: bool,
) -> None:
    """Position ids must be those of the rank's slice: transformers' default begins at 0 on every rank.

    Where nothing else tells of packed sequences they would, and a rank can't know whether one begins with another's slice:
    only positions that are certainly those of one sequence will do.

    Args:
        beginnings: a mask or cu_seq_lens_q, which tell where sequences begin; None where there is neither.
    """
    if positions.ndim == 3 and positions.shape[0] == 4:
        positions = positions[0]  # Qwen2-VL: text positions before those of time, height and width
    if positions.ndim == 1:
        positions = positions[None]
    if positions.ndim != 2 or positions.shape[1] != length or (beginnings is not None and beginnings.ndim == 4):
        return
    first = rank * length
    message = f"position_ids on rank {rank}, which has tokens {first} to {first + length - 1}, "

    if beginnings is None:
        if not causal and batch > 1:  # vision encoders number their patches as they like
            return

        def one_sequence() -> Tensor:
            index = torch.arange(first, first + length, device=positions.device)
            return (positions == index if causal else (positions != 0) | (index == 0)).all()

        message += (
            "are not those of one sequence. Pass them sliced as the tokens are (by default they begin at 0 on every rank), "
            "and packed sequences as cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k of them all"
        )
        _require(positions, ("one sequence", first, causal), one_sequence, message, wait)
    elif rank:

        def at_a_beginning() -> Tensor:
            default = (positions == torch.arange(length, device=positions.device)).all(1)
            if beginnings.ndim == 1:
                row = torch.arange(batch, device=beginnings.device) * ranks * length
                begins = (beginnings == (row + first)[:, None]).any(1)
            else:
                mask = beginnings.bool()
                begins = ~(mask[:, first] & mask[:, :first].any(1))
            return (begins | ~default).all()

        message += "begin at 0 in the middle of a sequence. Pass them sliced as the tokens are"
        _require(positions, ("begin", first, weakref.ref(beginnings)), at_a_beginning, message, wait)


#: What a device can print of an assertion.
_LONGEST = 254


def _require(tensor: Tensor, purpose: tuple[Any, ...], holds: Callable[[], Tensor], message: str, wait: bool) -> None:
    """Check what is on the device, once for a tensor; without waiting for the answer unless it is to `wait`, or on a CPU."""
    if fixed_shapes(tensor):
        torch._assert_async(holds(), message[:_LONGEST])
        return

    def check() -> None:
        if not wait and tensor.device.type != "cpu":
            torch._assert_async(holds(), message[:_LONGEST])
        elif not bool(holds()):
            raise ValueError(message)

    once(tensor, purpose, check)
