"""Which keys get to the ranks whose queries see them, and what each rank computes with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ...kernels.options import Lengths
from .exchange import Exchange, Selection
from .runs import Run, indices_of, tokens_of
from .split import Interval, TokenSplit, joined, overlaps, size, within

T = TypeVar("T")

__all__ = ["AttentionPlan", "Halo", "KernelCall", "Spread", "plan_halo", "spread_of"]

#: Keys that several parts of a rank's queries see are copied for each, up to this many times all keys; further parts get views of them.
_COPIES = 1.5


class KernelCall(NamedTuple):
    """What one kernel call computes: parts of sequences whose queries this rank has, each with the keys that they see.

    Attributes:
        queries, keys: from where to where they are among the plan's.
        lengths: of the parts.
        window: as the kernel takes it, which aligns the last query of a part with its last key.
    """

    queries: Interval
    keys: Interval
    lengths: Lengths
    window: tuple[int, int]


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """What a rank sends and computes for layers with one number of heads.

    A row is a token's part of the heads. `units` says into how many parts the heads of queries and those of keys are cut: the rows of a token
    follow each other.

    Attributes:
        units: for queries, and for keys and values.
        to_heads: the exchange of the rows of queries; None if each rank computes all heads of its own tokens.
        to_queries: the exchange of the rows of keys and values.
        queries, keys: which of the rows that have come the calls compute; None for all of them in order.
        calls: of the kernel.
        columns: (tokens,) int64, those of each row's queries, under a mask. There are no calls then: queries come row by row in the order
            of the columns, and keys are whole rows.
    """

    units: tuple[int, int]
    to_heads: Exchange | None
    to_queries: Exchange
    queries: Selection | None
    keys: Selection | None
    calls: tuple[KernelCall, ...]
    columns: Tensor | None = None


class _Part(NamedTuple):
    """Queries of one sequence that a rank has, the keys that they see, in the flattened batch, and the kernel's window."""

    queries: Interval
    keys: Interval
    window: tuple[int, int]


class Spread:
    """A batch over ranks, for layers of one causality and window.

    Args:
        split: which rank holds which tokens.
        sequences: in the flattened batch, sorted, each within a row. Tokens in none of them are padding.
        batch: the number of rows.
        pattern: the causality and the window; None for a mask, under which a query may see all keys of its row.
    """

    def __init__(
        self,
        split: TokenSplit,
        sequences: Sequence[Interval],
        batch: int,
        pattern: tuple[bool, tuple[int, int]] | None,
    ) -> None:
        self._sequences, self._pattern, self._is_masked = sequences, pattern or (False, (-1, -1)), pattern is None
        self._length = split.length
        #: What it is of, in numbers alone: up to Python 3.11 other processes have another hash of None.
        self.key = (split, tuple(sequences), batch, self._pattern, self._is_masked)
        self._held = [split.held(rank, batch) for rank in range(len(split.runs))]
        self._tokens = size(self._held[0])
        #: Pairs of a query and a key that it sees, on the average rank.
        self.pairs = sum(_pairs(stop - start, self._pattern) for start, stop in sequences) // len(self._held)
        self._plans: dict[tuple[int, int, int, torch.device], AttentionPlan] = {}
        self._head_ranks: dict[tuple[int, int], int] = {}
        self._shares: dict[int, tuple[list[list[_Part]], list[list[Interval]]]] = {}

    def head_ranks(self, heads: int, kv_heads: int) -> int:
        """How many neighbouring ranks share the heads of their tokens, such that as little as possible travels."""
        if (heads, kv_heads) not in self._head_ranks:
            choices = self.choices(heads, kv_heads)
            self._head_ranks[heads, kv_heads] = min(choices, key=lambda n: (self.traffic(n, heads, kv_heads), n))
        return self._head_ranks[heads, kv_heads]

    def choices(self, heads: int, kv_heads: int) -> list[int]:
        """The numbers of neighbouring ranks that can share heads, in ascending order."""
        ranks = len(self._held)
        return [n for n in range(1, ranks + 1) if not (ranks % n or heads % n or (kv_heads % n and n % kv_heads))]

    def traffic(self, head_ranks: int, heads: int, kv_heads: int) -> int:
        """What all ranks send each other in a layer's forward: tokens times heads, of queries, keys, values and outputs.

        In the backward pass their gradients travel, as much again.
        """
        needed = self._share(head_ranks)[1]
        kept = sum(size(within(own, needed[rank // head_ranks])) for rank, own in enumerate(self._held))
        keys = head_ranks * sum(map(size, needed)) - kept
        queries = len(self._held) * self._tokens * (head_ranks - 1) * heads // head_ranks
        return 2 * queries + 2 * keys * max(kv_heads // head_ranks, 1)

    def plan(self, rank: int, head_ranks: int, kv_heads: int, device: torch.device) -> AttentionPlan:
        """The plan of a rank.

        Args:
            head_ranks: how many neighbouring ranks share the heads of their tokens. Each computes an equal part of the heads.
        """
        key = rank, head_ranks, kv_heads, device
        if key not in self._plans:
            with torch.inference_mode(False):  # a kernel of the next forward may save them for its backward
                self._plans[key] = self._plan(*key)
        return self._plans[key]

    def _plan(self, rank: int, head_ranks: int, kv_heads: int, device: torch.device) -> AttentionPlan:
        parts, needed = self._share(head_ranks)
        group, units, rows = rank // head_ranks, min(head_ranks, kv_heads), self._tokens
        to_heads, arrived = None, self._held[rank]
        if head_ranks > 1:
            first, member = group * head_ranks, rank % head_ranks
            of_units = _own_first([[(unit, rows)] for unit in range(head_ranks)], member)
            share = [rows * (other // head_ranks == group) for other in range(len(self._held))]
            to_heads = Exchange(_selection(of_units, rows, head_ranks, device), share, share)
            arrived = [run for held in _own_first(self._held[first : first + head_ranks], member) for run in held]
        columns, calls = None, tuple[KernelCall, ...]()
        if self._is_masked:
            keys = needed[group]
            queries = joined(sorted(part.queries for part in parts[group]))
            columns = self._columns(queries, device)
        else:
            calls, queries, keys = _calls(parts[group], device)
        to_queries, came = _exchange(self._held, needed, rank, units, device)
        return AttentionPlan(
            (head_ranks, units),
            to_heads,
            to_queries,
            _selection([_Places(arrived).runs(queries)], size(arrived), 1, device),
            _selection([came.runs(keys)], sum(to_queries.receives), 1, device),
            calls,
            columns,
        )

    def columns(self, rank: int, device: torch.device) -> Tensor:
        """(tokens,) int64: the columns of a rank."""
        return self._columns(self._held[rank], device)

    def _columns(self, tokens: Iterable[Interval], device: torch.device) -> Tensor:
        """Of tokens that are in the same columns of each row: those in the first one."""
        return tokens_of(within(tokens, [(0, self._length)]), device)

    def _share(self, head_ranks: int) -> tuple[list[list[_Part]], list[list[Interval]]]:
        """Of each group of ranks that share heads: the parts of its queries, and the keys that it needs."""
        if head_ranks not in self._shares:
            together = [
                joined(sorted(run for held in self._held[first : first + head_ranks] for run in held))
                for first in range(0, len(self._held), head_ranks)
            ]
            parts = [[*_parts(tokens, self._sequences, *self._pattern)] for tokens in together]
            self._shares[head_ranks] = parts, [joined(sorted(part.keys for part in some)) for some in parts]
        return self._shares[head_ranks]


# Types of layers with other windows, and the next steps, often have the same. A plan of a million tokens has up to 64 MiB.
@lru_cache(4)
def spread_of(
    split: TokenSplit, sequences: tuple[Interval, ...], batch: int, pattern: tuple[bool, tuple[int, int]] | None
) -> Spread:
    """A `Spread`, kept with its plans for the next forward."""
    return Spread(split, sequences, batch, pattern)


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
    wanted = [joined(sorted((p.keys[0], p.queries[0]) for p in some if p.keys[0] < p.queries[0])) for some in parts]
    exchange, received = _exchange(held, wanted, rank, 1, device)
    own, tokens = _Places(held[rank]), size(held[rank])
    zero = tokens + sum(exchange.receives)
    sources: list[Run] = []
    targets: list[Run] = []
    end = 0
    for part in parts[rank]:
        (first, stop), start = part.queries, part.keys[0]
        sources += [(zero, 1)] * (before - (first - start))
        sources += [(tokens + place, count) for place, count in received.runs([(start, first)])]
        sources += own.runs([(first, stop)])
        targets.append((end + before, stop - first))
        end += before + stop - first
    return Halo(exchange, indices_of(sources, device), indices_of(targets, device))


def _exchange(
    held: Sequence[Sequence[Interval]],
    needed: Sequence[Sequence[Interval]],
    rank: int,
    units: int,
    device: torch.device,
) -> tuple[Exchange, _Places]:
    """The exchange of a rank, and the places of the tokens that it gets.

    Args:
        held: the tokens of each rank.
        needed: the tokens that each group of ranks needs. Groups have equal numbers of neighbouring ranks.
        units: of a token's rows, of which each rank of a group gets one.
    """
    ranks, own = len(held) // len(needed), _Places(held[rank])
    goes = [own.runs(within(held[rank], some)) for some in needed]
    sent = [
        [(first * units + unit * units // ranks, count) for first, count in runs]
        for runs in goes
        for unit in range(ranks)
    ]
    comes = [within(some, needed[rank // ranks]) for some in held]
    rows = _selection(_own_first(sent, rank), size(held[rank]), units, device)
    places = _Places(run for some in _own_first(comes, rank) for run in some)
    return Exchange(rows, [*map(_count, sent)], [*map(size, comes)]), places


def _pairs(length: int, pattern: tuple[bool, tuple[int, int]]) -> int:
    """About how many pairs of a query and a key that it sees a sequence has."""
    causal, window = pattern
    left, right = (length if side < 0 else min(side, length) for side in window)
    return length * (
        (left if left < length else length // 2) + (0 if causal else right if right < length else length // 2)
    )


def _parts(
    held: Iterable[Interval], sequences: Sequence[Interval], causal: bool, window: tuple[int, int]
) -> Iterator[_Part]:
    """The parts of sequences among a rank's tokens."""
    left, right = window
    for run in held:
        for queries, (first, end) in overlaps(run, sequences):
            start = first if left < 0 else max(first, queries[0] - left)
            # Kernels without windows are causal by themselves: causality is no limit to the right.
            stop = queries[1] if causal else end if right < 0 else min(end, queries[1] + right)
            beyond = stop - queries[1]
            limits = (-1 if left < 0 else left + beyond, right if causal or right < 0 else right - beyond)
            yield _Part(queries, (start, stop), limits)


def _calls(
    parts: Iterable[_Part], device: torch.device
) -> tuple[tuple[KernelCall, ...], list[Interval], list[Interval]]:
    """The kernel's calls for parts, and the tokens of their queries and keys in order."""
    windows: dict[tuple[int, int], list[_Part]] = {}
    for part in parts:
        windows.setdefault(part.window, []).append(part)
    calls: list[KernelCall] = []
    queries: list[Interval] = []
    keys: list[Interval] = []
    asked = kept = 0
    for window, some in windows.items():
        copied, covers = _copied(some)
        places, end = {}, kept
        for part in copied:
            places[part] = end
            end += part.keys[1] - part.keys[0]
        views = [(part, places[cover] + part.keys[0] - cover.keys[0]) for part, cover in covers.items()]
        for together, first in ((copied, kept), *(([part], first) for part, first in views)):
            q, k = [part.queries for part in together], [part.keys for part in together]
            calls.append(KernelCall((asked, asked + size(q)), (first, first + size(k)), _lengths(q, k, device), window))
            queries += q
            asked += size(q)
        keys += [part.keys for part in copied]
        kept = end
    return tuple(calls), queries, keys


def _copied(parts: Sequence[_Part]) -> tuple[list[_Part], dict[_Part, _Part]]:
    """The parts that get keys of their own, in order, and of each other one a part whose keys include its keys."""
    covers: dict[_Part, _Part] = {}
    widest = None
    for part in sorted(parts, key=lambda part: (part.keys[0], -part.keys[1])):
        if widest is not None and part.keys[1] <= widest.keys[1]:
            covers[part] = widest
        else:
            widest = part
    room = _COPIES * size(joined(sorted(part.keys for part in parts)))
    room -= sum(part.keys[1] - part.keys[0] for part in parts if part not in covers)
    for part in sorted(covers, key=lambda part: part.keys[1] - part.keys[0]):
        if (room := room - (part.keys[1] - part.keys[0])) < 0:
            break
        del covers[part]
    return [part for part in parts if part not in covers], covers


def _lengths(queries: Sequence[Interval], keys: Sequence[Interval], device: torch.device) -> Lengths:
    q_lengths, k_lengths = ([stop - start for start, stop in some] for some in (queries, keys))
    q_offsets, k_offsets = (
        torch.tensor([0, *accumulate(some)], dtype=torch.int32, device=device) for some in (q_lengths, k_lengths)
    )
    # torch 2.15 chooses its fastest backend by the identity of the two.
    return Lengths(q_offsets, q_offsets if k_lengths == q_lengths else k_offsets, max(q_lengths), max(k_lengths))


def _selection(parts: Sequence[Sequence[Run]], tokens: int, units: int, device: torch.device) -> Selection | None:
    """The selection of runs of rows, of which a token has as many as there are units; None for all rows in order."""
    runs = [run for part in parts for run in part if run[1]]
    covered = [
        joined(sorted((a // units, a // units + n) for a, n in runs if a % units == unit)) for unit in range(units)
    ]
    once = _count(runs) == tokens * units and all(some == [(0, tokens)] for some in covered)
    if once and units == 1 and all(a[0] + a[1] == b[0] for a, b in pairwise(runs)):
        return None
    return Selection.of(indices_of(runs, device, units), tokens * units, once)


def _own_first(of_ranks: Sequence[T], rank: int) -> list[T]:
    """In the order of an exchange's rows."""
    return [of_ranks[rank], *of_ranks[:rank], *of_ranks[rank + 1 :]]


def _count(runs: Iterable[Run]) -> int:
    return sum(count for _, count in runs)


class _Places:
    """Where the tokens of disjoint intervals are, one interval after the other."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self._starts: dict[Interval, int] = {}
        end = 0
        for start, stop in intervals:
            self._starts[start, stop] = end
            end += stop - start
        self._sorted = sorted(self._starts)

    def runs(self, intervals: Iterable[Interval]) -> list[Run]:
        """The places of the tokens of intervals, each of which may lie in several ones here."""
        return [
            (self._starts[bound] + start - bound[0], stop - start)
            for interval in intervals
            for (start, stop), bound in overlaps(interval, self._sorted)
        ]
