"""Splits of a batch over ranks, and the keys that each rank gets: all ranks of a group in one process."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernel_compat.attention.parallel.exchange import Exchange, plan_exchange
from kernel_compat.attention.parallel.sharding import ContextParallel
from kernel_compat.attention.parallel.split import Interval, TokenSplit
from kernel_compat.kernels.options import Options
from kernel_compat.kernels.reference import attend

HEADS, KEY_HEADS, DIM = 4, 2, 8
CPU = torch.device("cpu")


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Interval], int, int, int]:
    """Sequences in a batch, some of whose tokens are padding, its rows, their length and the number of ranks."""
    ranks, rows = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    length = ranks * draw(st.sampled_from([2, 4, 6, 8]))
    sequences = []
    for row in range(rows):
        edges = sorted({0, length, *draw(st.lists(st.integers(1, length - 1), max_size=4))})
        sequences += [(row * length + a, row * length + b) for a, b in pairwise(edges) if draw(st.integers(0, 4))]
    return sequences, rows, length, ranks


@given(batches(), st.booleans())
def test_a_split_has_every_token_once(batch: tuple[list[Interval], int, int, int], causal: bool) -> None:
    sequences, _, length, ranks = batch
    for split in (TokenSplit.balanced(sequences, length, ranks, causal=causal), TokenSplit.contiguous(length, ranks)):
        columns = [split.columns(rank) for rank in range(ranks)]
        assert sorted(column for some in columns for column in some) == [*range(length)]
        assert {len(some) for some in columns} == {length // ranks}


def test_one_causal_sequence_is_split_in_a_zigzag() -> None:
    assert TokenSplit.balanced([(0, 64)], 64, 4).runs == (
        ((0, 8), (56, 64)),
        ((8, 16), (48, 56)),
        ((16, 24), (40, 48)),
        ((24, 40),),
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_work_of_packed_sequences_is_even(ranks: int) -> None:
    length, chance = 1 << 16, random.Random(0)
    for _ in range(20):
        edges = [0, *sorted(chance.sample(range(1, length), 23)), length]
        sequences = [*pairwise(edges)]
        split = TokenSplit.balanced(sequences, length, ranks)
        work = []
        for rank in range(ranks):
            parts = [(max(a, start), min(b, stop), start) for a, b in split.runs[rank] for start, stop in sequences]
            work.append(sum((b - a) * (a + b + 1 - 2 * start) // 2 for a, b, start in parts if a < b))
        assert max(work) * ranks <= 1.03 * sum(work)


@given(batches(), st.sampled_from([(-1, -1), (2, 0), (5, 0), (3, 3), (1, 4)]), st.booleans(), st.booleans())
def test_every_query_gets_its_keys(
    batch: tuple[list[Interval], int, int, int], window: tuple[int, int], causal: bool, balanced: bool
) -> None:
    sequences, rows, length, ranks = batch
    window = (window[0], 0) if causal and window[0] >= 0 else window
    split = (
        TokenSplit.balanced(sequences, length, ranks, causal=causal)
        if balanced
        else TokenSplit.contiguous(length, ranks)
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(rows * length, heads, DIM, dtype=torch.float64, generator=generator)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    expected = torch.zeros_like(q)
    for start, stop in sequences:
        part = slice(start, stop)
        options = Options(causal=causal, window_size=window)
        expected[part] = attend(q[None, part], k[None, part], v[None, part], options)[0]
    exchanges = [plan_exchange(split, sequences, rows, rank, (causal, window), CPU) for rank in range(ranks)]
    held = [torch.tensor([t for a, b in split.held(rank, rows) for t in range(a, b)]) for rank in range(ranks)]
    for rank, exchange in enumerate(exchanges):
        keys, values = (_received(x, exchanges, held, rank) for x in (k, v))
        out = torch.zeros_like(q[held[rank]])
        for group in exchange.groups:
            queries = slice(None) if group.queries is None else group.queries
            own = slice(None) if group.keys is None else group.keys
            options = Options(causal=causal, window_size=group.window)
            out[queries] = attend(q[held[rank]][queries], keys[own], values[own], options, group.lengths)
        torch.testing.assert_close(out, expected[held[rank]])


def _received(x: Tensor, exchanges: list[Exchange], held: list[Tensor], rank: int) -> Tensor:
    """What the all-to-all brings to a rank."""
    parts = [x[held[other]][exchange.sent].split(exchange.sends)[rank] for other, exchange in enumerate(exchanges)]
    assert [len(part) for part in parts] == exchanges[rank].receives
    return torch.cat(parts)


def test_a_window_needs_the_neighbours_keys_alone() -> None:
    """Of rank 1 and its neighbours, not of the first ranks, as without a window."""
    split = TokenSplit.contiguous(64, 4)
    near = plan_exchange(split, [(0, 64)], 1, 3, (True, (4, 0)), CPU)
    far = plan_exchange(split, [(0, 64)], 1, 3, (True, (-1, -1)), CPU)
    assert near.receives == [0, 0, 4, 16]
    assert far.receives == [16, 16, 16, 16]


def test_arguments() -> None:
    with pytest.raises(ValueError, match="split is one of balanced, contiguous, not 'zigzag'"):
        ContextParallel(split="zigzag")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a group is a torch.distributed ProcessGroup"):
        ContextParallel("ranks")
    with pytest.raises(ValueError, match="a sequence of 7 tokens can't be split evenly over 2 ranks: pad it"):
        TokenSplit.contiguous(7, 2)
