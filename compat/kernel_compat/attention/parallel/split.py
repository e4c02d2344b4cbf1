"""Which tokens of a batch each rank holds, such that all have as many tokens and as much attention to compute."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["Interval", "TokenSplit", "joined", "overlaps", "rows_of", "size", "within"]

#: Tokens from the first to before the second.
Interval = tuple[int, int]

#: Of the most loaded rank over the average.
_TOLERANCE = 0.03


@dataclass(frozen=True)
class TokenSplit:
    """Which columns of a batch each rank holds: as many on each.

    Attributes:
        length: of the whole rows.
        runs: of each rank, its columns, in ascending order. A rank's slices of tensors have them in this order.
    """

    length: int
    runs: tuple[tuple[Interval, ...], ...]

    @classmethod
    def contiguous(cls, length: int, ranks: int) -> TokenSplit:
        """Rank r has the r-th of equal slices."""
        _require_multiple(length, ranks)
        part = length // ranks
        return cls(length, tuple(((rank * part, (rank + 1) * part),) for rank in range(ranks)))

    @classmethod
    def balanced(cls, sequences: Iterable[Interval], length: int, ranks: int, *, causal: bool = True) -> TokenSplit:
        """Chunks of equal length on each rank, with about the same number of pairs of a query and a key that it sees.

        Of one causal sequence these are the chunks r and 2 * ranks - 1 - r, as in a zigzag. Every rank computes the same split of the
        same sequences.

        Args:
            sequences: in the flattened batch, of which each is within a row.
            length: of a row; a multiple of `ranks`. Where it is a multiple of more, chunks may be shorter, and the load more even.
        """
        _require_multiple(length, ranks)
        return _balanced(tuple(sequences), length, ranks, causal)

    def held(self, rank: int, batch: int) -> list[Interval]:
        """The tokens of a rank in the flattened batch, in the order in which its slices have them."""
        return [(row * self.length + a, row * self.length + b) for row in range(batch) for a, b in self.runs[rank]]


def _require_multiple(length: int, ranks: int) -> None:
    if length % ranks:
        raise ValueError(f"a sequence of {length} tokens can't be split evenly over {ranks} ranks: pad it")


@lru_cache(256)  # layers of other types, and the next step, often have the same sequences
def _balanced(sequences: tuple[Interval, ...], length: int, ranks: int, causal: bool) -> TokenSplit:
    best: tuple[float, TokenSplit] | None = None
    for chunks in (1, 2, 4, 8, 16, 32):
        if length % (ranks * chunks):
            break
        load, split = _of_chunks(sequences, length, ranks, chunks, causal)
        if best is None or load < best[0]:
            best = load, split
        if load <= 1 + _TOLERANCE:
            break
    assert best is not None
    return best[1]


def _of_chunks(
    sequences: Sequence[Interval], length: int, ranks: int, chunks: int, causal: bool
) -> tuple[float, TokenSplit]:
    """A split of so many chunks a rank, and the load of its most loaded rank over the average.

    The largest chunk that is left goes to the rank with the least load that takes more of them.
    """
    size = length // (ranks * chunks)
    work = [0] * (ranks * chunks)
    for start, stop in sequences:
        row = start // length * length
        for chunk in range((start - row) // size, (stop - 1 - row) // size + 1):
            a, b = max(start, row + chunk * size), min(stop, row + (chunk + 1) * size)
            work[chunk] += (b - a) * (a + b + 1 - 2 * start) // 2 if causal else (b - a) * (stop - start)
    loads = [(0, rank) for rank in range(ranks)]
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for chunk in sorted(range(ranks * chunks), key=lambda chunk: -work[chunk]):
        load, rank = heapq.heappop(loads)
        owned[rank].append(chunk)
        if len(owned[rank]) < chunks:
            heapq.heappush(loads, (load + work[chunk], rank))
    most = max(sum(work[chunk] for chunk in some) for some in owned)
    runs = tuple(tuple(joined((chunk * size, (chunk + 1) * size) for chunk in sorted(some))) for some in owned)
    return (most * ranks / sum(work) if any(work) else 1.0), TokenSplit(length, runs)


def rows_of(batch: int, length: int) -> list[Interval]:
    """Each row of a batch as a sequence of its own, in the flattened batch."""
    return [(row * length, (row + 1) * length) for row in range(batch)]


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted intervals, with those that touch or overlap as one."""
    joined: list[Interval] = []
    for start, stop in intervals:
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def overlaps(interval: Interval, bounds: Sequence[Interval]) -> Iterator[tuple[Interval, Interval]]:
    """The parts of an interval that lie in sorted and disjoint bounds, each with these bounds."""
    start, stop = interval
    for index in range(max(bisect_right(bounds, interval) - 1, 0), len(bounds)):
        if (bound := bounds[index])[0] >= stop:
            return
        part = max(start, bound[0]), min(stop, bound[1])
        if part[0] < part[1]:
            yield part, bound


def within(intervals: Iterable[Interval], bounds: Sequence[Interval]) -> list[Interval]:
    """The parts of intervals that lie in sorted and disjoint bounds, in the order of the intervals."""
    return [part for interval in intervals for part, _ in overlaps(interval, bounds)]


def size(intervals: Iterable[Interval]) -> int:
    """The number of tokens in disjoint intervals."""
    return sum(stop - start for start, stop in intervals)
