"""Attention of a rank's tokens, with the keys of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import UnsupportedFeatureError
from ...kernels import Functions, Kernel
from ...kernels.memo import fixed_shapes
from ..boundaries import offsets_on_host
from ..call import AttentionCall, check_heads
from ..forward import attention_forward
from ..forward_context import current_context
from ..layout import PackedLayout, SequenceLayout
from ..resolution import layout_of
from ..roles import KEY_OFFSETS, QUERY_OFFSETS
from ..tensors import require
from .all_to_all import gather_heads, scatter_heads
from .checks import counts_from_padding, on_every_rank, require_positions, require_shares
from .exchange import Exchange, exchanged, plan_exchange
from .groups import Ranks
from .sharding import ContextParallel
from .split import Interval, rows_of
from .text_model import is_unsplit
from .ulysses import slice_of

__all__ = ["SpreadLayout", "over_ranks", "require_positions_of", "sequences_between"]


@dataclass(frozen=True, eq=False)
class SpreadLayout(SequenceLayout):
    """A rank's share of the queries, with the keys of all ranks that they see.

    Attributes:
        exchange: which keys come from which rank.
        ranks: the groups in which keys travel, and in which ranks share the heads.
    """

    exchange: Exchange
    ranks: Ranks

    def attend(self, functions: Functions, call: AttentionCall) -> Tensor:
        """See `SequenceLayout.attend`: of the rank's tokens; there is no bias."""
        assert call.bias is None
        if (group := self.ranks.heads) is None:
            return self._attend(functions, call)
        ranks = dist.get_world_size(group)
        by_heads = [x.transpose(1, 2) for x in (call.query, call.key, call.value)]
        query, key, value = (
            x.transpose(1, 2) for x in scatter_heads(by_heads[0], by_heads[1], by_heads[2], group, ranks)
        )
        sinks = None if call.sinks is None else call.sinks.chunk(ranks)[dist.get_rank(group)]
        out = self._attend(functions, call._replace(query=query, key=key, value=value, sinks=sinks))
        return gather_heads(out, group, ranks)

    def _attend(self, functions: Functions, call: AttentionCall) -> Tensor:
        """The attention of a slice."""
        batch, length = call.query.shape[:2]
        query = call.query.flatten(0, 1)
        key, value = (exchanged(x.flatten(0, 1), self.exchange, self.ranks.keys) for x in (call.key, call.value))
        out = query.new_zeros(*query.shape[:2], value.shape[-1])
        for part in self.exchange.groups:
            q = query if part.queries is None else query[part.queries]
            k, v = (x if part.keys is None else x[part.keys] for x in (key, value))
            result = functions.attend(q, k, v, call.options(self.causal, part.window), part.lengths)
            out = result if part.queries is None else out.index_copy(0, part.queries, result)
        if not self.exchange.groups:
            out = _Joined.apply(out, query, key, value)
        return out.unflatten(0, (batch, length))


class _Joined(torch.autograd.Function):  # type: ignore[misc]
    """An output that doesn't depend on tensors, whose backward is run all the same: other ranks wait in it for this one."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros_like(x) for x in ctx.saved_tensors)


def over_ranks(kernel: Kernel, name: str, alone: Callable[..., Any], over: ContextParallel) -> Callable[..., Any]:
    """The attention function of a name whose sequences are spread over ranks.

    Args:
        alone: computes calls without a group. In one of one rank, and with ``skip_sequence_parallel=True`` or VeOmni's
            ``skip_ulysses=True``, a rank attends to its own tokens.
    """
    spread, within_rank = attention_forward(kernel, name, attend=_attend(over)), attention_forward(kernel, name)

    def forward(
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
        group = over.source()
        if group is None:
            return alone(module, query, key, value, attention_mask, **kwargs)
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if is_unsplit():
            return alone(module, query, key, value, attention_mask, **kwargs)
        if ranks > 1 and not (skip_sequence_parallel or skip_ulysses):
            if counts_from_padding(type(module)):  # `ContextParallel.shard` doesn't know
                raise _unsupported(
                    f"positions that don't begin at 0, as {type(module).__name__}'s model counts them",
                    "Use sequence_parallel= for it, and pass them.",
                )
            return spread(module, query, key, value, attention_mask, **kwargs)
        attention_mask = slice_of(attention_mask, key.shape[2], ranks, rank)
        return within_rank(module, query, key, value, attention_mask, **kwargs)

    forward.__name__ = forward.__qualname__ = spread.__name__
    return forward


def _attend(over: ContextParallel) -> Callable[[Kernel, AttentionCall], Tensor]:
    """`forward.flash_attention` for the tokens of one of several ranks."""
    # The first call waits for the device in its checks, and the ranks exchange the result, as in `ulysses`.
    is_first = True

    def attend(kernel: Kernel, call: AttentionCall) -> Tensor:
        nonlocal is_first
        ranks, functions = over.ranks(), kernel.load()
        assert ranks is not None
        share = _Share(over, ranks, is_first and not fixed_shapes(call.query))
        prepare: Callable[[], SequenceLayout] = partial(share.layout, functions, call)
        if share.wait:
            batch, length = call.query.shape[:2]
            for group in (ranks.keys, ranks.heads):
                if group is not None:
                    prepare = partial(on_every_rank, prepare, (batch, length), call.query.device, group)
        layout = prepare()
        is_first = False
        return layout.attend(functions, call)

    disabled: Callable[[Kernel, AttentionCall], Tensor] = torch.compiler.disable(attend)
    return disabled  # which keys go where is found on the host


@dataclass(frozen=True)
class _Share:
    """One rank of a group.

    Attributes:
        wait: whether checks synchronise with the device and raise.
    """

    over: ContextParallel
    ranks: Ranks
    wait: bool

    @property
    def rank(self) -> int:
        """Of this process in the group of all."""
        rank: int = dist.get_rank(self.ranks.all)
        return rank

    def layout(self, functions: Functions, call: AttentionCall) -> SequenceLayout:
        """The layout of the rank's tokens in a call.

        Raises:
            UnsupportedFeatureError: the call can't be spread.
            ValueError: its arguments contradict each other, or aren't those of all tokens.
        """
        if call.bias is not None:
            raise _unsupported("a bias of the scores (position_bias)", "Use sequence_parallel=None.")
        (batch, length, heads), kv_length = call.query.shape[:3], call.key.shape[1]
        check_heads(heads, call.key.shape[2], call.sinks)
        context = current_context()
        if context is not None and context.arguments.has_encoder_states and not call.causal:
            # As many of them as a rank has tokens would be taken for the tokens' own keys.
            raise _unsupported("attention to the states of an encoder", "Use another name for models with an encoder.")
        if kv_length != length:
            raise _unsupported(f"{kv_length} keys beside {length} queries, as with a cache", "Pass use_cache=False.")
        lengths, positions = call.lengths, call.positions if call.causal else None
        if context is not None and context.covers(batch, length, kv_length, causal=True):
            require_positions(context)
            lengths = context.arguments.lengths if lengths is None else lengths
            positions = context.arguments.positions
        if self.ranks.heads is not None:
            require_shares(heads, call.key.shape[2], dist.get_world_size(self.ranks.heads))
        tokens = dist.get_world_size(self.ranks.all) * length
        query, key, value = (
            x.new_empty(1).expand(batch, tokens, *x.shape[2:]) for x in (call.query, call.key, call.value)
        )
        whole = call._replace(query=query, key=key, value=value, lengths=lengths, positions=None, sinks=None)
        if whole.mask is not None:
            whole = whole._replace(mask=self._in_order(whole.mask, batch, tokens))
        return layout_of(whole, functions, context, partial(self._spread, positions))

    def _in_order(self, mask: Tensor, batch: int, tokens: int) -> Tensor:
        if mask.ndim != 2 or mask.shape[1] != tokens:
            raise _unsupported(
                f"a mask of shape {tuple(mask.shape)} for a sequence of {tokens}",
                "Pass the whole batch through ContextParallel.shard.",
            )
        return self.over.in_order(mask, rows_of(batch, tokens))

    def _spread(self, positions: Tensor | None, layout: SequenceLayout, call: AttentionCall) -> SpreadLayout:
        """The rank's share of a layout of all tokens."""
        batch, tokens = call.query.shape[:2]
        rows = rows_of(batch, tokens)
        sequences = rows
        if type(layout) is PackedLayout:
            sequences = _sequences_of(layout, batch * tokens)
        elif type(layout) is not SequenceLayout:
            raise _unsupported(
                "a mask besides padding, causality and a window", "Pass packed sequences by their lengths."
            )
        # A mask of a rank's slice says nothing of the others'.
        known = rows if self.over.split == "balanced" and call.lengths is None else sequences
        held = self.over.split_of(known, tokens).held(self.rank, batch)
        if positions is not None:
            require_positions_of(held, positions, sequences, (batch, tokens), self.rank, self.wait)
        pattern = (layout.causal, layout.window)
        slices, rank = self.over.slices_of(known, tokens), dist.get_rank(self.ranks.keys)
        exchange = plan_exchange(slices, sequences, batch, rank, pattern, call.query.device)
        return SpreadLayout(*pattern, tokens, exchange, self.ranks)


def require_positions_of(
    held: Sequence[Interval],
    positions: Tensor,
    sequences: Sequence[Interval],
    sizes: tuple[int, int],
    rank: int,
    wait: bool,
) -> None:
    """Check that position ids are those of a rank's tokens: a model's default begins at 0 on every rank.

    Args:
        held: the rank's tokens, in the flattened batch of `sizes`, as `sequences` are.
        wait: whether to synchronise with the device and raise.
    """
    batch, tokens = sizes
    if positions.ndim == 3 and positions.shape[0] == 4:
        positions = positions[0]  # Qwen2-VL: those in the text
    if positions.ndim != 2 or positions.shape[0] not in (1, batch):
        return
    first = torch.zeros(batch * tokens, dtype=torch.int64)
    inside = torch.zeros(batch * tokens, dtype=torch.bool)
    for start, stop in sequences:
        first[start:stop], inside[start:stop] = start, True
    at = torch.cat([torch.arange(start, stop) for start, stop in held])
    columns, counts = (x.view(batch, -1).to(positions.device) for x in (at % tokens, at - first[at]))
    known = inside[at].view(batch, -1).to(positions.device)
    holds = ((positions == counts) | ~known).all() | ((positions == columns) | ~known).all()
    require(
        holds,
        f"position_ids on rank {rank} are not those of its tokens. Pass the whole batch through ContextParallel.shard, or "
        "positions that are sliced as the tokens are (by default they begin at 0 on every rank)",
        wait,
    )


def sequences_between(offsets: Sequence[int], tokens: int) -> list[Interval]:
    """The sequences between offsets into all ranks' tokens; raises ValueError for offsets of others."""
    if offsets[-1] != tokens:
        raise ValueError(
            f"{QUERY_OFFSETS.named()} and {KEY_OFFSETS.named()} end at {offsets[-1]}, and all ranks have {tokens} tokens: pass those of "
            "all tokens, padding as a sequence of its own"
        )
    return [(a, b) for a, b in pairwise(offsets) if a < b]


def _sequences_of(layout: PackedLayout, tokens: int) -> list[Interval]:
    """The sequences of a layout as intervals of the flattened tokens. Synchronises once a forward."""
    queries, keys = layout.queries, layout.keys
    if keys.cu_seqlens is not queries.cu_seqlens or keys.interior_padding:
        raise _unsupported("queries and keys of other sequences, or padding between tokens", "Pass them as rows.")
    if fixed_shapes(queries.cu_seqlens):
        raise _unsupported("packed sequences in fixed shapes", "Don't compile the model, or pass rows without padding.")
    offsets = offsets_on_host(queries.cu_seqlens)
    if queries.indices is not None:
        starts = queries.indices[queries.cu_seqlens[:-1].long().clamp(max=len(queries.indices) - 1)].tolist()
        return [(start, start + b - a) for start, (a, b) in zip(starts, pairwise(offsets), strict=True) if a < b]
    return sequences_between(offsets, tokens)


def _unsupported(feature: str, advice: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(feature, "context parallelism", advice)
