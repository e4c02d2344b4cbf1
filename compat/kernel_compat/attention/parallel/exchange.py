"""How the keys that a rank's queries see get to it: each rank sends every other one the tokens that it needs, and no others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from ...kernels.options import Lengths
from .split import Interval, TokenSplit, joined, overlaps, size, within

__all__ = ["Exchange", "Group", "Halo", "exchanged", "plan_exchange", "plan_halo"]


CPU = torch.device("cpu")


class Group(NamedTuple):
    """What one kernel call computes: parts of sequences whose queries this rank has, each with the keys that they see.

    Attributes:
        queries: (tokens,) int64, indices in the rank's flattened tokens; None for all of them in order.
        keys: (tokens,) int64, indices in the received tokens; None likewise.
        lengths: of the parts.
        window: as the kernel takes it, which aligns the last query of a part with its last key.
    """

    queries: Tensor | None
    keys: Tensor | None
    lengths: Lengths
    window: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Exchange:
    """The keys that a rank sends and receives, and the calls that it computes with them.

    Attributes:
        sent: (tokens,) int64, indices in the rank's flattened tokens, by the rank that they go to.
        sends, receives: the numbers of tokens that go to and come from each rank, itself included.
        groups: the kernel calls. None of its parts has keys of another one's in the same group.
    """

    sent: Tensor
    sends: list[int]
    receives: list[int]
    groups: tuple[Group, ...]


class _Part(NamedTuple):
    """Queries of one sequence that a rank has, the keys that they see, in the flattened batch, and the kernel's window."""

    queries: Interval
    keys: Interval
    window: tuple[int, int]


def plan_exchange(
    split: TokenSplit,
    sequences: Sequence[Interval],
    batch: int,
    rank: int,
    pattern: tuple[bool, tuple[int, int]],
    device: torch.device,
) -> Exchange:
    """The exchange of one rank, for layers of one causality and window.

    Args:
        sequences: in the flattened batch, sorted, each within a row. Tokens in none of them are padding.
        pattern: the causality and the window.
    """
    held = [split.held(other, batch) for other in range(len(split.runs))]
    parts = [[*_parts(tokens, sequences, *pattern)] for tokens in held]
    exchange, own, received = _exchange(held, [[part.keys for part in some] for some in parts], rank, device)
    return replace(exchange, groups=tuple(_group(some, own, received, device) for some in _apart(parts[rank])))


def _exchange(
    held: Sequence[Sequence[Interval]], needed: Sequence[Iterable[Interval]], rank: int, device: torch.device
) -> tuple[Exchange, _Places, _Places]:
    """The exchange of one rank without its calls, the places of its own tokens, and of those that it receives.

    Args:
        held, needed: the tokens of each rank, and those that it needs.
    """
    wanted = [joined(sorted(some)) for some in needed]
    goes = [within(held[rank], some) for some in wanted]
    comes = [within(tokens, wanted[rank]) for tokens in held]
    own, received = _Places(held[rank]), _Places(interval for some in comes for interval in some)
    sent = own.indices((interval for some in goes for interval in some), device)
    return Exchange(sent, [size(some) for some in goes], [size(some) for some in comes], ()), own, received


class Halo(NamedTuple):
    """The tokens before each run of a rank's, for a convolution.

    Attributes:
        exchange: of these tokens.
        sources: (row,) int64, the tokens of a row in which each run comes behind the tokens before it: indices in the rank's tokens, the
            received ones and a zero behind them.
        targets: (tokens,) int64, where the rank's tokens are in that row.
    """

    exchange: Exchange
    sources: Tensor
    targets: Tensor


def plan_halo(
    split: TokenSplit, sequences: Sequence[Interval], batch: int, rank: int, before: int, device: torch.device
) -> Halo:
    """The halo of one rank, whose tokens are all in sequences.

    Args:
        before: how many tokens before its own a token sees; those before the first of a sequence are zero.
    """
    held = [split.held(other, batch) for other in range(len(split.runs))]
    parts = [[*_parts(tokens, sequences, True, (before, 0))] for tokens in held]
    halos = [[(p.keys[0], p.queries[0]) for p in some if p.keys[0] < p.queries[0]] for some in parts]
    exchange, own, received = _exchange(held, halos, rank, device)
    tokens, arrived = size(held[rank]), sum(exchange.receives)
    sources, targets, end = [], [], 0
    for part in parts[rank]:
        (first, stop), start = part.queries, part.keys[0]
        sources += [
            torch.full((before - (first - start),), tokens + arrived),
            tokens + received.indices([(start, first)], CPU),
            own.indices([(first, stop)], CPU),
        ]
        targets.append(torch.arange(end + before, end + before + stop - first))
        end += before + stop - first
    return Halo(exchange, torch.cat(sources).to(device), torch.cat(targets).to(device))


def _parts(
    held: Iterable[Interval], sequences: Sequence[Interval], causal: bool, window: tuple[int, int]
) -> Iterator[_Part]:
    """The parts of sequences among a rank's tokens."""
    left, right = window
    right = 0 if causal else right
    for run in held:
        for queries, (first, end) in overlaps(run, sequences):
            start = first if left < 0 else max(first, queries[0] - left)
            stop = end if right < 0 else min(end, queries[1] + right)
            beyond = stop - queries[1]
            limits = (-1 if left < 0 else left + beyond, -1 if right < 0 else right - beyond)
            yield _Part(queries, (start, stop), limits)


def _apart(parts: Iterable[_Part]) -> list[list[_Part]]:
    """Parts in as few groups as possible, of one window each, without a key that two of a group see."""
    groups: list[list[_Part]] = []
    for part in parts:
        for group in groups:
            if group[-1].window == part.window and group[-1].keys[1] <= part.keys[0]:
                group.append(part)
                break
        else:
            groups.append([part])
    return groups


def _group(parts: Sequence[_Part], own: _Places, received: _Places, device: torch.device) -> Group:
    queries, keys = [part.queries for part in parts], [part.keys for part in parts]
    q_lengths, k_lengths = ([stop - start for start, stop in some] for some in (queries, keys))
    q_offsets = torch.tensor([0, *accumulate(q_lengths)], dtype=torch.int32, device=device)
    # torch 2.15 chooses its fastest backend by the identity of the two.
    k_offsets = (
        q_offsets
        if k_lengths == q_lengths
        else torch.tensor([0, *accumulate(k_lengths)], dtype=torch.int32, device=device)
    )
    return Group(
        own.all_or_indices(queries, device),
        received.all_or_indices(keys, device),
        Lengths(q_offsets, k_offsets, max(q_lengths), max(k_lengths)),
        parts[0].window,
    )


class _Places:
    """Where the tokens of disjoint intervals are, one interval after the other."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self._starts: dict[Interval, int] = {}
        self._tokens = 0
        for start, stop in intervals:
            self._starts[start, stop] = self._tokens
            self._tokens += stop - start
        self._sorted = sorted(self._starts)

    def indices(self, intervals: Iterable[Interval], device: torch.device) -> Tensor:
        """(tokens,) int64, the places of the tokens of intervals."""
        parts = [torch.arange(start, stop) for start, stop in self._runs(intervals)]
        return torch.cat([torch.empty(0, dtype=torch.int64), *parts]).to(device)

    def all_or_indices(self, intervals: Sequence[Interval], device: torch.device) -> Tensor | None:
        """The same; None for all tokens in order."""
        runs = self._runs(intervals)
        if joined(runs) == [(0, self._tokens)] and size(runs) == self._tokens:
            return None
        return self.indices(intervals, device)

    def _runs(self, intervals: Iterable[Interval]) -> list[Interval]:
        """The places of intervals, of which each may lie in several ones here."""
        runs = []
        for interval in intervals:
            for (start, stop), bound in overlaps(interval, self._sorted):
                first = self._starts[bound] + start - bound[0]
                runs.append((first, first + stop - start))
        return runs


class _Exchanged(torch.autograd.Function):  # type: ignore[misc]
    """The tokens that an exchange brings to this rank. Gradients of a token that several ranks have got are added in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, group: dist.ProcessGroup) -> Tensor:
        ctx.exchange, ctx.group, ctx.tokens = exchange, group, x.shape[0]
        return _all_to_all(x[exchange.sent], exchange.sends, exchange.receives, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        exchange = ctx.exchange
        returned = _all_to_all(gradient.contiguous(), exchange.receives, exchange.sends, ctx.group)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = returned.new_zeros((ctx.tokens, *returned.shape[1:]), dtype=wide)
        return total.index_add_(0, exchange.sent, returned.to(wide)).to(gradient.dtype), None, None


def exchanged(x: Tensor, exchange: Exchange, group: dist.ProcessGroup) -> Tensor:
    """From a rank's flattened tokens (tokens, ...) to those that it receives, in the order of the ranks."""
    return _Exchanged.apply(x, exchange, group)


def _all_to_all(x: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
    received = collectives.all_to_all_single(x, receives, sends, group)
    return received.wait() if isinstance(received, collectives.AsyncCollectiveTensor) else received
