"""Which tokens of a batch each rank holds, such that all have as many tokens and as much attention to compute."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, pairwise

__all__ = ["Interval", "TokenSplit", "joined", "overlaps", "rows_of", "size", "within"]

#: Tokens from the first to before the second.
Interval = tuple[int, int]

#: Of the most loaded rank over the average.
_TOLERANCE = 0.03
#: Of the average rank's work, the most of a piece, from the largest on: smaller ones are more even, and more of their keys travel.
_SHARES = (1.0, 0.8, 0.64, 0.5, 0.4, 0.32, 0.25)


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
        """Equal numbers of tokens on each rank, with about the same number of pairs of a query and a key that it sees.

        Packed sequences stay whole where that is even to 3%. Of one causal sequence rank r has the chunks r and 2 * ranks - 1 - r of
        2 * ranks, as in a zigzag. Every rank computes the same split of the same sequences.

        Args:
            sequences: in the flattened batch, of which each is within a row.
            length: of a row; a multiple of `ranks`. Rows with other sequences than the first are cut into equal chunks, alike in all
                rows, which may be shorter where it is a multiple of more.
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
    for load, split in _candidates(sequences, length, ranks, causal):
        if best is None or load < best[0]:
            best = load, split
        if load <= 1 + _TOLERANCE:
            break
    assert best is not None
    return best[1]


def _candidates(
    sequences: Sequence[Interval], length: int, ranks: int, causal: bool
) -> Iterator[tuple[float, TokenSplit]]:
    """Splits, each with the load of its most loaded rank over the average: first those of which less travels."""
    in_rows: dict[int, list[Interval]] = {}
    for start, stop in sequences:
        row = start // length
        in_rows.setdefault(row, []).append((start - row * length, stop - row * length))
    first, *others = in_rows.values() or [[]]
    if all(row == first for row in others):
        for share in _SHARES:
            yield _of_sequences(first, length, ranks, share, causal)
    for chunks in (1, 2, 4, 8, 16, 32):
        if length % (ranks * chunks) == 0:
            yield _of_chunks(sequences, length, ranks, chunks, causal)


def _of_sequences(
    sequences: Sequence[Interval], length: int, ranks: int, share: float, causal: bool
) -> tuple[float, TokenSplit]:
    """A split that keeps the sequences of a row whole, as far as possible: nothing of those travels.

    A long sequence is cut into pieces in a zigzag: of 2 * n chunks i and 2 * n - 1 - i are a piece. The piece with the most work that is
    left goes to the rank with the least load that has room for it, or to several if none has.

    Args:
        share: the most work of a piece, over that of the average rank.
    """
    edges = sorted({0, length, *chain.from_iterable(sequences)})
    whole = [*pairwise(edges)]  # what is in no sequence, too
    total, room = sum(_work(sequence, sequence, causal) for sequence in whole), length // ranks
    pieces: list[tuple[int, Interval, Sequence[Interval]]] = []
    for sequence in whole:
        work, tokens = _work(sequence, sequence, causal), size([sequence])
        n = min(ranks, tokens // 2, max(math.ceil(work * ranks / (share * total)), math.ceil(tokens / room)))
        cut = _in_zigzag(sequence, n) if n > 1 else [(sequence,)]
        pieces += [(sum(_work(chunk, sequence, causal) for chunk in chunks), sequence, chunks) for chunks in cut]
    holders = _Holders(ranks, room)
    for work, sequence, chunks in sorted(pieces, key=lambda piece: -piece[0]):
        if not holders.give(chunks, work):
            holders.spread(chunks, partial(_work, sequence=sequence, causal=causal))
    return holders.most * ranks / total, holders.split(length)


def _in_zigzag(sequence: Interval, pieces: int) -> list[Sequence[Interval]]:
    """The chunks of a sequence in pieces: the first with the last, the second with the one before that, and so on."""
    (start, stop), n = sequence, 2 * pieces
    chunks = [*pairwise(start + (stop - start) * i // n for i in range(n + 1))]
    return [(chunks[i], chunks[n - 1 - i]) for i in range(pieces)]


class _Holders:
    """Ranks that get tokens until none has room.

    Attributes:
        most: the work of the one that has most.
    """

    def __init__(self, ranks: int, room: int) -> None:
        self.most = 0
        self._runs: list[list[Interval]] = [[] for _ in range(ranks)]
        self._heap = [(0, rank, room) for rank in range(ranks)]

    def give(self, intervals: Sequence[Interval], work: int) -> bool:
        """Give all to the rank with the least work that has room for them; False if none has."""
        needed, passed = size(intervals), []
        while self._heap and self._heap[0][2] < needed:
            passed.append(heapq.heappop(self._heap))
        if fits := bool(self._heap):
            self._give(intervals, work, needed)
        for rank in passed:
            heapq.heappush(self._heap, rank)
        return fits

    def spread(self, intervals: Sequence[Interval], work: Callable[[Interval], int]) -> None:
        """Give them to the ranks with the least work, as far as each has room."""
        rest = [*intervals]
        while rest:
            start, stop = rest.pop()
            taken = start, min(stop, start + self._heap[0][2])
            self._give([taken], work(taken), size([taken]))
            if taken[1] < stop:
                rest.append((taken[1], stop))

    def split(self, length: int) -> TokenSplit:
        """The split of rows of a length, once all tokens are given."""
        return TokenSplit(length, tuple(tuple(joined(sorted(runs))) for runs in self._runs))

    def _give(self, intervals: Sequence[Interval], more: int, tokens: int) -> None:
        work, rank, room = heapq.heappop(self._heap)
        self._runs[rank] += intervals
        self.most = max(self.most, work + more)
        if room > tokens:
            heapq.heappush(self._heap, (work + more, rank, room - tokens))


def _work(queries: Interval, sequence: Interval, causal: bool) -> int:
    """The pairs of some queries of a sequence and the keys that they see."""
    (a, b), (start, stop) = queries, sequence
    return (b - a) * (a + b + 1 - 2 * start) // 2 if causal else (b - a) * (stop - start)


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
            work[chunk] += _work((a, b), (start, stop), causal)
    holders = _Holders(ranks, length // ranks)
    for chunk in sorted(range(ranks * chunks), key=lambda chunk: -work[chunk]):
        holders.give([(chunk * size, (chunk + 1) * size)], work[chunk])
    return (holders.most * ranks / sum(work) if any(work) else 1.0), holders.split(length)


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
