"""Checks of a call before the all-to-all: a rank that raises inside of it leaves the others waiting."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import UnsupportedFeatureError
from ...kernels.memo import fixed_shapes, memoised
from ..call import check_heads, unsupported_argument
from ..forward_context import ForwardContext
from ..roles import BIAS, CAUSALITY, KEY_OFFSETS, POSITIONS, POSITIONS_FROM_PADDING, QUERY_OFFSETS, SINKS
from ..tensors import constant, require
from .all_to_all import all_to_all

__all__ = [
    "Slice",
    "check_call",
    "counts_from_padding",
    "on_every_rank",
    "require_positions",
    "require_shares",
    "unspread",
    "without_positions",
]

T = TypeVar("T")


class Slice(NamedTuple):
    """The tokens of this rank.

    Attributes:
        rank, ranks: of the group.
        batch, length: of the rank's tokens.
        wait: whether checks synchronise with the device and raise.
    """

    rank: int
    ranks: int
    batch: int
    length: int
    wait: bool

    @property
    def first(self) -> int:
        """The index of the rank's first token in the full sequence."""
        return self.rank * self.length

    @property
    def tokens(self) -> int:
        """The length of the full sequence."""
        return self.ranks * self.length


def on_every_rank(
    prepare: Callable[[], T],
    sizes: tuple[int, int],
    device: torch.device,
    group: dist.ProcessGroup | None,
    digest: Callable[[T], int] = lambda _: 0,
) -> T:
    """Return ``prepare()`` if it raises on no rank and all ranks have as many tokens; else raise on every rank.

    Args:
        sizes: the batch size and the length of this rank's slice.
        digest: a number of what must be the same on every rank of what was prepared.

    Raises:
        ValueError: `prepare` raised on another rank, or another rank has another number of tokens, or another digest.
    """
    own_error, own_digest = None, 0
    try:
        prepared = prepare()
        own_digest = digest(prepared)
    except Exception as error:  # each is raised below
        own_error = error
    row = [*sizes, own_error is not None, own_digest]
    rows = all_to_all(torch.tensor([row] * dist.get_world_size(group), device=device), group).tolist()
    if own_error is not None:
        raise own_error
    if refusing := [str(rank) for rank, (_, _, refuses, _) in enumerate(rows) if refuses]:
        raise ValueError(f"rank {', '.join(refusing)} of the group refuses this call: the error there says why")
    if any(other[:2] != rows[0][:2] for other in rows):
        shapes = ", ".join(f"{batch} x {length}" for batch, length, *_ in rows)
        raise ValueError(f"every rank must have a slice of the same length, and they are (batch x length) {shapes}")
    if any(other != rows[0] for other in rows):
        raise ValueError("the ranks have other packed sequences, windows or masks: every rank must get the same batch")
    return prepared


def check_call(
    module: torch.nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    kwargs: dict[str, Any],
    own: Slice,
) -> tuple[Tensor | None, dict[str, Any]]:
    """The mask and the keywords for this rank's heads of all tokens.

    Args:
        tensors: query, key and value of the rank's tokens, of shape (batch, heads, length, head_dim).

    Raises:
        UnsupportedFeatureError: the call can't be spread over ranks.
        ValueError: the arguments contradict each other, or they are those of a slice where the full sequence's are needed.
    """
    _require_spreadable(tensors, kwargs, own.ranks)
    mask = _require_full(mask, tensors[0].shape[1], own)
    beginnings = mask
    if mask is None:  # a mask takes precedence over cu_seq_lens_*
        beginnings = QUERY_OFFSETS.of(kwargs)
        for offsets in (beginnings, KEY_OFFSETS.of(kwargs)):
            if offsets is not None:
                _require_end(offsets, own)
    positions, sinks = POSITIONS.of(kwargs), SINKS.of(kwargs)
    if positions is not None and positions.shape[-1] != own.tokens:
        causal = CAUSALITY.of(kwargs)
        if causal is None:
            causal = bool(CAUSALITY.attribute_of(module)) or not CAUSALITY.is_attribute_of(module)
        _require_positions(positions, beginnings, causal, own)
        kwargs = {name: value for name, value in kwargs.items() if name not in POSITIONS.spellings}
    if sinks is not None:
        kwargs = {**kwargs, SINKS.named(kwargs): sinks.chunk(own.ranks)[own.rank]}
    return mask, kwargs


def require_positions(context: ForwardContext) -> None:
    """Check that a model gets the positions of its tokens: those that it counts itself begin at 0 on every rank.

    Raises:
        UnsupportedFeatureError: its forward takes none.
        ValueError: it takes positions, and got none.
    """
    arguments, name = context.arguments, POSITIONS.named()
    if arguments.drops_positions:
        raise _unsupported(
            f"a model that doesn't pass its {name} on",
            "It counts positions from 0 on every rank: use another name for it.",
        )
    if not arguments.takes_positions:
        raise without_positions()
    if arguments.positions is None:
        raise ValueError(
            f"no {name}, which a model counts from 0 on every rank then: pass those of the rank's tokens, of the whole sequence"
        )


def unspread(feature: str, advice: str) -> UnsupportedFeatureError:
    """The error of what context parallelism can't do, with what to do instead."""
    return UnsupportedFeatureError(feature, "context parallelism", advice)


def without_positions() -> UnsupportedFeatureError:
    """The error of a model that takes no positions."""
    return _unsupported(
        f"a model whose forward has no {POSITIONS.named()}",
        "It counts positions from 0 on every rank: use another name for it.",
    )


@constant
def counts_from_padding(layer: type) -> bool:
    """Whether models in a layer's module number their tokens from behind the index of padding, as RoBERTa's: not from 0."""
    names = vars(sys.modules[layer.__module__])
    return POSITIONS_FROM_PADDING in names or any(hasattr(value, POSITIONS_FROM_PADDING) for value in names.values())


def _require_spreadable(tensors: tuple[Tensor, Tensor, Tensor], kwargs: dict[str, Any], ranks: int) -> None:
    """Check shapes and keywords, which are the same on every rank: so is the error."""
    query, key, value = tensors
    skip = "Pass skip_sequence_parallel=True where every rank has all keys, or none of another's."
    # Continuous batching passes `cache` up to 5.23, and `read_index` on all releases.
    paging = next((name for name in ("cache", "read_index") if kwargs.get(name) is not None), None)
    if argument := paging or unsupported_argument(kwargs):
        raise _unsupported(f"the argument {argument}", skip)
    if BIAS.of(kwargs) is not None:
        raise _unsupported("a bias of the scores (position_bias)", skip)
    (batch, heads, length), (kv_heads, kv_length) = query.shape[:3], key.shape[1:3]
    if kv_length != length:
        raise _unsupported(
            f"{kv_length} keys beside {length} queries, as with a cache", f"Pass use_cache=False. {skip}"
        )
    if key.shape[:3] != value.shape[:3] or key.shape[0] != batch:
        raise ValueError(f"shapes that don't fit: {[tuple(x.shape) for x in tensors]}")
    check_heads(heads, kv_heads, SINKS.of(kwargs))
    require_shares(heads, kv_heads, ranks)


def require_shares(heads: int, kv_heads: int, ranks: int) -> None:
    """Check that each rank can compute as many heads; raises UnsupportedFeatureError if not."""
    if heads % ranks:
        raise _unsupported(
            f"{heads} query heads on {ranks} ranks", "The number of ranks must divide that of the query heads."
        )
    if kv_heads % ranks and ranks % kv_heads:
        advice = "The number of ranks must divide that of the key heads, or be a multiple of it."
        raise _unsupported(f"{kv_heads} key heads on {ranks} ranks", advice)


def _require_full(mask: Any, heads: int, own: Slice) -> Tensor | None:
    """A mask of the full sequence; of one that differs between heads, the part for this rank's heads."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        raise _unsupported(f"a mask of {type(mask).__name__}", "It takes tensors of 2 or 4 dimensions.")
    if mask.ndim == 2:
        if mask.shape[1] == own.tokens:
            return mask
        raise _unsupported(
            f"a padding mask of {mask.shape[1]} tokens for a sequence of {own.tokens}",
            "Pass that of the full sequence, or register the name with sequence_parallel=, whose mask function gathers it.",
        )
    if mask.shape[2:] != (own.tokens, own.tokens) or mask.shape[1] not in (1, heads):
        raise _unsupported(
            f"a mask of shape {tuple(mask.shape)} for {heads} heads and a sequence of {own.tokens}",
            "A 4D mask must be that of the full sequence; patterns besides padding, causality and a window come as one.",
        )
    return mask if mask.shape[1] == 1 else mask.chunk(own.ranks, 1)[own.rank]


def _unsupported(feature: str, advice: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(feature, "sequence parallelism", advice)


def _require_end(offsets: Tensor, own: Slice) -> None:
    """Check that offsets are not those of a rank's slice. Tokens after the last offset would have no output."""
    tokens = own.batch * own.tokens
    message = (
        f"cu_seq_lens_* don't end at {tokens}, where the full sequence does: pass those of all ranks' tokens, padding as a "
        "sequence of its own"
    )
    _require_once(offsets, ("ends", tokens), lambda: offsets[-1] == tokens, message, own.wait)


def _require_positions(positions: Tensor, beginnings: Tensor | None, causal: bool, own: Slice) -> None:
    """Check that position ids are those of the rank's slice: transformers' default begins at 0 on every rank.

    Without a mask or offsets, a rank can't know whether a packed sequence begins in another's slice: its positions must then
    be those of one sequence for certain.

    Args:
        beginnings: a mask or cu_seq_lens_q, which say where sequences begin; None if there is neither.
    """
    if positions.ndim == 3 and positions.shape[0] == 4:
        positions = positions[0]  # Qwen2-VL: the positions in the text come before those of time, height and width
    if positions.ndim == 1:
        positions = positions[None]
    if positions.ndim != 2 or positions.shape[1] != own.length or (beginnings is not None and beginnings.ndim == 4):
        return
    first, length = own.first, own.length

    def of_one_sequence() -> Tensor:
        index = torch.arange(first, first + length, device=positions.device)
        return (positions == index if causal else (positions != 0) | (index == 0)).all()

    def at_a_beginning() -> Tensor:
        assert beginnings is not None
        default = (positions == torch.arange(length, device=positions.device)).all(1)
        if beginnings.ndim == 1:
            row = torch.arange(own.batch, device=beginnings.device) * own.tokens
            begins = (beginnings == (row + first)[:, None]).any(1)
        else:
            mask = beginnings.bool()
            begins = ~(mask[:, first] & mask[:, :first].any(1))
        return (begins | ~default).all()

    message = f"position_ids on rank {own.rank}, which has tokens {first} to {first + length - 1}, "
    if beginnings is not None:
        if own.rank:
            message += "begin at 0 in the middle of a sequence. Pass them sliced as the tokens are"
            _require_once(positions, ("begin", first, weakref.ref(beginnings)), at_a_beginning, message, own.wait)
    elif causal or own.batch == 1:  # else vision encoders number their patches in their own ways
        message += (
            "are not those of one sequence. Pass them sliced as the tokens are (by default they begin at 0 on every rank), "
            "and packed sequences as cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k of them all"
        )
        _require_once(positions, ("one sequence", first, causal), of_one_sequence, message, own.wait)


def _require_once(
    tensor: Tensor, purpose: tuple[Any, ...], holds: Callable[[], Tensor], message: str, wait: bool
) -> None:
    """`require` of a condition on a tensor, checked once a forward; in a graph each time."""
    if fixed_shapes(tensor):
        require(holds(), message)
    else:
        memoised(tensor, purpose, lambda: require(holds(), message, wait))
