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
from torch.autograd.function import once_differentiable

from ...kernels import Functions, Kernel
from ...kernels.memo import fixed_shapes, memoised
from ...kernels.options import Mask
from ..boundaries import offsets_on_host
from ..call import AttentionCall, check_heads
from ..forward import attention_forward
from ..forward_context import current_context
from ..layout import MaskedLayout, PackedLayout, SequenceLayout
from ..mask_reduction import visible_and_bias
from ..resolution import layout_of
from ..roles import CAUSALITY, KEY_OFFSETS, LENGTHS, POSITIONS, QUERY_OFFSETS
from ..tensors import require, same_storage
from .checks import counts_from_padding, on_every_rank, require_positions, require_shares, unspread
from .columns import counts_columns, of_columns
from .exchange import Transfer
from .groups import Ranks
from .plan import AttentionPlan, Spread, spread_of
from .runs import Run, indices_of
from .sharding import ContextParallel
from .split import Interval, overlaps, rows_of
from .text_model import attends_to_encoder, is_unsplit
from .ulysses import slice_of

__all__ = ["SpreadLayout", "over_ranks", "require_positions_of", "sequences_between"]

#: Pairs of a query and a key, times heads, from which on heads are computed in two parts: what the second needs travels meanwhile, and
#: less memory is used at once. Less work makes two kernels slower than one, by more than what travels takes.
_LEAST_WORK = 1 << 33
#: Arguments of a layer that say how its tokens see each other.
_OF_TOKENS = frozenset(spelling for role in (*LENGTHS, POSITIONS, CAUSALITY) for spelling in role.spellings)


@dataclass(frozen=True, eq=False)
class SpreadLayout(SequenceLayout):
    """A rank's share of the queries, with the keys of all ranks that they see.

    Attributes:
        spread: the batch over ranks.
        ranks: which they are.
        mask: of all tokens; None for causality and the window alone.
    """

    spread: Spread
    ranks: Ranks
    mask: Mask | None

    def attend(self, functions: Functions, call: AttentionCall) -> Tensor:
        """See `SequenceLayout.attend`: of the rank's tokens; there is no bias."""
        assert call.bias is None
        plan = self._plan(call)
        has_parts = self.mask is None and call.key.shape[2] // plan.units[1] % 2 == 0
        in_parts = has_parts and self.spread.pairs * call.query.shape[2] >= _LEAST_WORK
        return _Attention(functions, call, self, plan, 2 if in_parts else 1).output()

    def digest(self) -> int:
        """A number of what every rank must have alike: the sequences, and how many pairs each row and column of a mask shows. Synchronises."""
        shown = []
        if self.mask is not None and (visible := self.mask.visible) is not None:
            counts = [visible.sum(dim).flatten() for dim in (-1, -2)]
            shown = [int((n * torch.arange(1, len(n) + 1, device=n.device)).sum()) for n in counts]
        return hash((self.spread.key, *shown))

    def _plan(self, call: AttentionCall) -> AttentionPlan:
        heads = call.query.shape[2], call.key.shape[2]
        shared = self.ranks.head_ranks or self.spread.head_ranks(*heads)
        return self.spread.plan(dist.get_rank(self.ranks.group), shared, heads[1], call.query.device)


class _Attention:
    """The attention of one layer, one part of the heads after the other.

    Args:
        parts: into how many the heads that a rank computes are cut.
    """

    def __init__(
        self, functions: Functions, call: AttentionCall, layout: SpreadLayout, plan: AttentionPlan, parts: int
    ) -> None:
        self._functions, self._call, self._layout, self._plan = functions, call, layout, plan
        self._group = layout.ranks.group
        q_units, kv_units = plan.units
        self._inputs = (
            _parts_of(call.query, q_units, parts),
            _parts_of(call.key, kv_units, parts),
            _parts_of(call.value, kv_units, parts),
        )
        self._sinks: Sequence[Tensor | None] = [None] * parts
        if call.sinks is not None:
            own = call.sinks.unflatten(0, (q_units, parts, -1))[dist.get_rank(self._group) % q_units]
            self._sinks = own.unbind(0)

    def output(self) -> Tensor:
        """(batch, length, heads, value's head dimension), of the rank's tokens."""
        # In the backward pass these steps are taken in reverse: gradients of one part travel while those of another are computed.
        under_way = [self._launch(*part) for part in zip(*self._inputs, strict=True)]
        outputs = [self._attend(part, sinks) for part, sinks in zip(under_way, self._sinks, strict=True)]
        batch, length = self._call.query.shape[:2]
        # Each (batch, length, units, heads, head dimension).
        parts = [self._back(x).unflatten(0, (batch, length, -1)) for x in outputs]
        out = parts[0] if len(parts) == 1 else torch.stack(parts, 3).flatten(3, 4)
        return out.flatten(2, 3)

    def _launch(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor | Transfer, ...]:
        to_heads, to_queries = self._plan.to_heads, self._plan.to_queries
        sent = query if to_heads is None else to_heads.launch(query, self._group)
        return sent, to_queries.launch(key, self._group), to_queries.launch(value, self._group)

    def _arrived(self, under_way: tuple[Tensor | Transfer, ...]) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (x.arrived() if isinstance(x, Transfer) else x for x in under_way)
        queries, keys = self._plan.queries, self._plan.keys
        if keys is not None:
            key, value = keys.take(key), keys.take(value)
        return query if queries is None else queries.take(query), key, value

    def _attend(self, under_way: tuple[Tensor | Transfer, ...], sinks: Tensor | None) -> Tensor | Transfer:
        """The output of a part, on its way to the ranks whose tokens it is of."""
        (query, key, value), plan, causal = self._arrived(under_way), self._plan, self._layout.causal
        call, results = self._call._replace(sinks=sinks), []
        if plan.columns is not None:
            results.append(self._under_mask(query, key, value, call, plan.columns))
        for part in plan.calls:
            q, k, v = _between(query, part.queries), _between(key, part.keys), _between(value, part.keys)
            results.append(self._functions.attend(q, k, v, call.options(causal, part.window), part.lengths))
        if not results:
            out = _Joined.apply(query.new_zeros(0, query.shape[1], value.shape[2]), query, key, value)
        else:
            out = results[0] if len(results) == 1 else torch.cat(results)
        out = out if plan.queries is None else plan.queries.put(out)
        return out if plan.to_heads is None else plan.to_heads.launch_back(out, self._group)

    def _under_mask(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, columns: Tensor) -> Tensor:
        """Of a part of the queries of each row, (tokens, heads, head_dim), and the keys of whole rows."""
        whole, units = self._layout.mask, self._plan.units[0]
        assert whole is not None
        assert whole.visible is not None

        def of_rank(mask: Tensor) -> Tensor:
            own = mask if mask.shape[1] == 1 else mask.chunk(units, 1)[dist.get_rank(self._group) % units]
            return own.index_select(2, columns)

        visible, bias = memoised(whole.visible, ("of a rank", units), partial(of_rank, whole.visible)), whole.bias
        if bias is not None:
            bias = of_rank(bias)
        q, k, v = (x.unflatten(0, (call.query.shape[0], -1)) for x in (query, key, value))
        return self._functions.attend(q, k, v, call.options(False, (-1, -1)), mask=Mask(visible, bias)).flatten(0, 1)

    def _back(self, output: Tensor | Transfer) -> Tensor:
        if isinstance(output, Transfer):
            assert self._plan.to_heads is not None
            return self._plan.to_heads.arrived_back(output)
        return output


def _between(x: Tensor, rows: Interval) -> Tensor:
    return x if rows == (0, len(x)) else x[slice(*rows)]  # a slice of everything has a gradient that is a copy


def _parts_of(x: Tensor, units: int, parts: int) -> list[Tensor]:
    """From (batch, length, heads, head_dim) to parts of the heads of each unit, each (rows, heads, head_dim), for `AttentionPlan`."""
    rows = x.flatten(0, 1).unflatten(1, (units, parts, -1))
    # The gradient of unbind is a copy.
    return [part.flatten(0, 1) for part in (rows.unbind(2) if parts > 1 else (rows.squeeze(2),))]


class _Joined(torch.autograd.Function):  # type: ignore[misc]
    """An output that doesn't depend on tensors, whose backward is run all the same: other ranks wait in it for this one."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return out.view_as(out)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros_like(x) for x in ctx.saved_tensors)


def over_ranks(kernel: Kernel, name: str, alone: Callable[..., Any], over: ContextParallel) -> Callable[..., Any]:
    """The attention function of a name whose sequences are spread over ranks.

    Args:
        alone: computes calls without a group. In one of one rank, and with ``skip_sequence_parallel=True`` or VeOmni's
            ``skip_ulysses=True``, a rank attends to its own tokens.
    """
    attend = _attend(over)
    spread, within_rank = attention_forward(kernel, name, attend=attend), attention_forward(kernel, name)

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
        if group is None or is_unsplit():
            return alone(module, query, key, value, attention_mask, **kwargs)
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if ranks > 1 and not (skip_sequence_parallel or skip_ulysses):
            if attends_to_encoder(module, key):
                kwargs = {name: value for name, value in kwargs.items() if name not in _OF_TOKENS}
                return alone(module, query, key, value, attention_mask, **kwargs, **{CAUSALITY.named(): False})
            if counts_from_padding(type(module)):  # `ContextParallel.shard` doesn't know
                raise unspread(
                    f"positions that don't begin at 0, as {type(module).__name__}'s model counts them",
                    "Use sequence_parallel= for it, and pass them.",
                )
            of_layer = spread
            if counts_columns(module):
                of_layer = attention_forward(kernel, name, attend=partial(attend, layer=module))
            return of_layer(module, query, key, value, attention_mask, **kwargs)
        attention_mask = slice_of(attention_mask, key.shape[2], ranks, rank)
        return within_rank(module, query, key, value, attention_mask, **kwargs)

    forward.__name__ = forward.__qualname__ = spread.__name__
    return forward


def _attend(over: ContextParallel) -> Callable[..., Tensor]:
    """`forward.flash_attention` for the tokens of one of several ranks; of a layer that counts columns, with the layer."""
    # The first call waits for the device in its checks, and the ranks exchange the result, as in `ulysses`.
    is_first = True

    def attend(kernel: Kernel, call: AttentionCall, layer: torch.nn.Module | None = None) -> Tensor:
        nonlocal is_first
        ranks, functions = over.ranks(), kernel.load()
        assert ranks is not None
        share = _Share(over, ranks, is_first and not fixed_shapes(call.query))
        prepare = partial(share.layout, functions, call)
        if share.wait:
            batch, length = call.query.shape[:2]
            layout = on_every_rank(prepare, (batch, length), call.query.device, ranks.group, SpreadLayout.digest)
        else:
            layout = prepare()
        is_first = False
        if layer is not None:
            columns = layout.spread.columns(share.rank, call.query.device)
            call = call._replace(query=of_columns(layer, call.query, columns))
        return layout.attend(functions, call)

    disabled: Callable[..., Tensor] = torch.compiler.disable(attend)
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
        rank: int = dist.get_rank(self.ranks.group)
        return rank

    def layout(self, functions: Functions, call: AttentionCall) -> SpreadLayout:
        """The layout of the rank's tokens in a call.

        Raises:
            UnsupportedFeatureError: the call can't be spread.
            ValueError: its arguments contradict each other, or aren't those of all tokens.
        """
        if call.bias is not None:
            raise unspread("a bias of the scores (position_bias)", "Use sequence_parallel=None.")
        (batch, length, heads), kv_length = call.query.shape[:3], call.key.shape[1]
        check_heads(heads, call.key.shape[2], call.sinks)
        context = current_context()
        if context is not None and context.arguments.has_encoder_states and not call.causal:
            # As many of them as a rank has tokens would be taken for the tokens' own keys.
            raise unspread(
                "attention to the states of an encoder, which nothing says every rank has whole",
                "Pass the model's call what ContextParallel.shard returns of the whole batch.",
            )
        if kv_length != length:
            raise unspread(f"{kv_length} keys beside {length} queries, as with a cache", "Pass use_cache=False.")
        lengths, positions = call.lengths, call.positions if call.causal else None
        if context is not None and context.covers(batch, length, kv_length, causal=True):
            require_positions(context)
            lengths = context.arguments.lengths if lengths is None else lengths
            positions = context.arguments.positions
        ranks, head_ranks = dist.get_world_size(self.ranks.group), self.ranks.head_ranks or 1
        if ranks % head_ranks:
            raise ValueError(f"head_ranks={head_ranks} doesn't divide the number of ranks, {ranks}")
        require_shares(heads, call.key.shape[2], head_ranks)
        tokens = ranks * length
        query, key, value = (
            x.new_empty(1).expand(batch, tokens, *x.shape[2:]) for x in (call.query, call.key, call.value)
        )
        mask, chunk = call.mask, 0
        for record in () if context is None or mask is None else context.chunks:
            if same_storage(record.mask, call.mask):
                mask, chunk = record.padding, record.size
        whole = call._replace(
            query=query,
            key=key,
            value=value,
            lengths=lengths,
            positions=None,
            sinks=None,
            mask=None if mask is None else self._whole(mask, (batch, heads, tokens)),
        )
        layout = layout_of(whole, functions, context, partial(self._spread, positions, chunk), chunk)
        assert isinstance(layout, SpreadLayout)
        return layout

    def _whole(self, mask: Tensor, sizes: tuple[int, int, int]) -> Tensor:
        """A mask of all tokens in their order.

        Raises:
            UnsupportedFeatureError: it is another rank's, or of other sizes.
        """
        batch, heads, tokens = sizes
        if mask.ndim == 4 and mask.shape[2:] == (tokens, tokens):
            if mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads):
                return mask
        elif mask.ndim == 2 and mask.shape[1] == tokens:
            return memoised(mask, ("in order",), lambda: self.over.in_order(mask, rows_of(batch, tokens)))
        raise unspread(
            f"a mask of shape {tuple(mask.shape)} for a sequence of {tokens}",
            "Pass the whole batch through ContextParallel.shard.",
        )

    def _spread(
        self, positions: Tensor | None, chunk: int, layout: SequenceLayout, call: AttentionCall
    ) -> SpreadLayout:
        """The rank's share of a layout of all tokens, whose sequences are cut into chunks of a size; 0 for none."""
        batch, tokens = call.query.shape[:2]
        sequences = known = rows_of(batch, tokens)
        pattern: tuple[bool, tuple[int, int]] | None = (layout.causal, layout.window)
        mask = None
        if type(layout) is PackedLayout:
            sequences = _sequences_of(layout, batch * tokens)
        elif type(layout) is MaskedLayout and layout.mask.segments is None and pattern == (False, (-1, -1)):
            mask, pattern = layout.mask, None
        elif type(layout) is not SequenceLayout:
            raise unspread("a window over padding between tokens", "Pass the tokens without it.")
        if call.lengths is not None:  # a mask of a rank's slice says nothing of the others'
            known = sequences_between(offsets_on_host(call.lengths.offsets()[0]), batch * tokens)
        split = self.over.split_of(known, tokens)
        if positions is not None and call.mask is not None and call.mask.ndim == 4:
            self._require_no_default(positions, split.runs[self.rank][0][0], call.mask)
        elif positions is not None:
            held = split.held(self.rank, batch)
            require_positions_of(held, positions, sequences, (batch, tokens), self.rank, self.wait)
        if chunk:
            sequences = [(at, min(at + chunk, stop)) for start, stop in sequences for at in range(start, stop, chunk)]
        spread = spread_of(split, tuple(sequences), batch, pattern)
        return SpreadLayout(layout.causal, layout.window, tokens, spread, self.ranks, mask)

    def _require_no_default(self, positions: Tensor, first: int, mask: Tensor) -> None:
        """Check that positions beside a 4D mask, which may be any, don't begin at 0 behind a token that is seen.

        Args:
            first: the rank's first column.
        """
        visible, _ = visible_and_bias(mask, *mask.shape[2:])
        default = (positions == torch.arange(positions.shape[-1], device=positions.device)).all()
        require(~(default & visible[:, :, first, :first].any()), _wrong_positions(self.rank), self.wait)


def require_positions_of(
    held: Sequence[Interval],
    positions: Tensor,
    sequences: Sequence[Interval],
    sizes: tuple[int, int],
    rank: int,
    wait: bool,
) -> None:
    """Check that position ids are those of a rank's tokens: a model's default begins at 0 on every rank.

    Those of a run of a sequence are all counted in the sequence, or all in the row.

    Args:
        held: the rank's tokens, in the flattened batch of `sizes`, as `sequences` are.
        wait: whether to synchronise with the device and raise.
    """
    batch, tokens = sizes
    if positions.ndim == 3 and positions.shape[0] == 4:
        positions = positions[0]  # Qwen2-VL: those in the text
    if positions.ndim != 2 or positions.shape[0] not in (1, batch):
        return
    places: list[Run] = []
    columns: list[Run] = []
    counts: list[Run] = []
    place = 0
    for run in held:
        for (start, stop), (first, _) in overlaps(run, sequences):
            places.append((place + start - run[0], stop - start))
            columns.append((start % tokens, stop - start))
            counts.append((start - first, stop - start))
        place += run[1] - run[0]
    device = positions.device
    inside = positions.expand(batch, -1).flatten()[indices_of(places, device)]
    sizes = torch.tensor([size for _, size in places], device=device)
    parts = torch.arange(len(places), device=device).repeat_interleave(sizes, output_size=len(inside))
    # Those of padding may be counted otherwise than those of the tokens before or after it in its row.
    differs = torch.zeros(2, len(places), dtype=torch.int64, device=device)
    for number, expected in enumerate((counts, columns)):
        differs[number].index_add_(0, parts, (inside != indices_of(expected, device)).long())
    require((differs == 0).any(0).all(), _wrong_positions(rank), wait)


def _wrong_positions(rank: int) -> str:
    return (
        f"position_ids on rank {rank} are not those of its tokens. Pass the whole batch through ContextParallel.shard, or "
        "positions that are sliced as the tokens are (by default they begin at 0 on every rank)"
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
    if fixed_shapes(queries.cu_seqlens):
        raise unspread("packed sequences in fixed shapes", "Don't compile the model, or pass rows without padding.")
    offsets = offsets_on_host(queries.cu_seqlens)
    # A copy to another device makes two tensors of one.
    differ = keys.cu_seqlens is not queries.cu_seqlens and offsets_on_host(keys.cu_seqlens) != offsets
    if differ or keys.interior_padding:
        raise unspread("queries and keys of other sequences, or padding between tokens", "Pass them as rows.")
    if queries.indices is not None:
        starts = queries.indices[queries.cu_seqlens[:-1].long().clamp(max=len(queries.indices) - 1)].tolist()
        return [(start, start + b - a) for start, (a, b) in zip(starts, pairwise(offsets), strict=True) if a < b]
    return sequences_between(offsets, tokens)
