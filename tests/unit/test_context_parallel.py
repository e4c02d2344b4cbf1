"""Splits of a batch over ranks, and the keys that each rank gets: all ranks of a group in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernel_compat.attention.heads import head_of
from kernel_compat.attention.parallel.exchange import Exchange, Selection
from kernel_compat.attention.parallel.plan import AttentionPlan, Spread
from kernel_compat.attention.parallel.runs import indices_of
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
        columns = [[column for run in runs for column in range(*run)] for runs in split.runs]
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


def test_packed_sequences_stay_whole() -> None:
    """A long one is cut over as few ranks as its work needs; no key of the others travels."""
    lengths = [900, 40, 100, 60, 300, 200, 120, 80, 210, 90, 110, 390]
    edges = [0, *accumulate(lengths)]
    split = TokenSplit.balanced([*pairwise(edges)], edges[-1], 2)
    cut = [
        length
        for length, (start, stop) in zip(lengths, pairwise(edges), strict=True)
        if len({rank for rank, runs in enumerate(split.runs) for a, b in runs if a < stop and start < b}) > 1
    ]
    assert cut == [900]


def test_causality_is_no_window() -> None:
    """Kernels without windows are causal: FlashAttention-3's forward."""
    split = TokenSplit.balanced([(0, 40), (40, 64)], 64, 4)
    spread = Spread(split, [(0, 40), (40, 64)], 1, (True, (-1, -1)))
    assert {call.window for rank in range(4) for call in spread.plan(rank, 1, KEY_HEADS, CPU).calls} == {(-1, -1)}


@pytest.mark.parametrize("pattern", [(True, (-1, -1)), None])
def test_every_process_has_the_same_digest(pattern: tuple[bool, tuple[int, int]] | None) -> None:
    """Of ranks that weren't forked: Python hashes numbers alike in each process, and text and up to 3.11 None otherwise."""
    split = TokenSplit.balanced([(0, 64)], 64, 4)

    def leaves(x: Any) -> Iterator[Any]:
        if isinstance(x, tuple):
            for part in x:
                yield from leaves(part)
        else:
            yield x

    split_key, *rest = Spread(split, [(0, 64)], 1, pattern).key
    assert isinstance(split_key, TokenSplit)
    assert all(isinstance(leaf, int) for leaf in leaves((*rest, split.length, split.runs)))


@given(batches(), st.sampled_from([(-1, -1), (2, 0), (5, 0), (3, 3), (1, 4)]), st.booleans(), st.booleans(), st.data())
def test_every_query_gets_its_keys(
    batch: tuple[list[Interval], int, int, int],
    window: tuple[int, int],
    causal: bool,
    balanced: bool,
    data: st.DataObject,
) -> None:
    sequences, rows, length, ranks = batch
    head_ranks = data.draw(st.sampled_from([n for n in (1, 2, 4) if ranks % n == 0]))
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
    spread = Spread(split, sequences, rows, (causal, window))
    plans = [spread.plan(rank, head_ranks, KEY_HEADS, CPU) for rank in range(ranks)]
    held = [torch.tensor([t for a, b in split.held(rank, rows) for t in range(a, b)]) for rank in range(ranks)]
    q_units, kv_units = plans[0].units
    queries, keys, values = (
        [_rows(x[tokens], units) for tokens in held] for x, units in ((q, q_units), (k, kv_units), (v, kv_units))
    )
    to_heads = [plan.to_heads for plan in plans if plan.to_heads is not None]
    to_queries = [plan.to_queries for plan in plans]
    computed = []
    for rank, plan in enumerate(plans):
        query = _received(queries, to_heads, rank) if to_heads else queries[rank]
        key, value = (_received(x, to_queries, rank) for x in (keys, values))
        computed.append(_computed(plan, query, key, value, causal))
    for rank, tokens in enumerate(held):
        outputs = computed[rank]
        if to_heads:
            back, sent = _returned(computed, to_heads, rank), to_heads[rank].sent
            outputs = back if sent is None else sent.added(back)
        torch.testing.assert_close(outputs.view(len(tokens), HEADS, DIM), expected[tokens])


def _rows(x: Tensor, units: int) -> Tensor:
    """From (tokens, heads, head_dim) to (rows, heads, head_dim)."""
    return x.unflatten(1, (units, -1)).flatten(0, 1)


def _computed(plan: AttentionPlan, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """The outputs of the rows of queries that a rank has got."""
    out = torch.zeros_like(query)
    asked, kept = (slice(None) if x is None else x.index for x in (plan.queries, plan.keys))
    q, k, v, results = query[asked], key[kept], value[kept], [query[:0]]
    for call in plan.calls:
        (a, b), (c, d), options = call.queries, call.keys, Options(causal=causal, window_size=call.window)
        results.append(attend(q[a:b], k[c:d], v[c:d], options, call.lengths))
    out[asked] = torch.cat(results)
    return out


def _received(rows: list[Tensor], exchanges: list[Exchange], rank: int) -> Tensor:
    """What an exchange brings to a rank."""
    parts = [
        _by_rank(x if exchange.sent is None else x[exchange.sent.index], exchange.sends, sender)[rank]
        for sender, (x, exchange) in enumerate(zip(rows, exchanges, strict=True))
    ]
    assert [len(part) for part in parts] == [*exchanges[rank].receives]
    return torch.cat([parts[rank], *parts[:rank], *parts[rank + 1 :]])


def _by_rank(x: Tensor, counts: Sequence[int], own: int) -> list[Tensor]:
    """The rows of each rank, of which a rank's own come first."""
    first, *others = x.split([counts[own], *counts[:own], *counts[own + 1 :]])
    return [*others[:own], first, *others[own:]]


def _returned(rows: list[Tensor], exchanges: list[Exchange], rank: int) -> Tensor:
    """What comes back to a rank, as it had sent it."""
    parts = [_by_rank(x, e.receives, n)[rank] for n, (x, e) in enumerate(zip(rows, exchanges, strict=True))]
    return torch.cat([parts[rank], *parts[:rank], *parts[rank + 1 :]])


def test_a_plan_of_inference_mode_is_one_for_training() -> None:
    """Kernels save lengths for the backward pass, which tensors of inference mode can't be saved for."""
    with torch.inference_mode():
        plan = Spread(TokenSplit.contiguous(64, 4), [(0, 30), (30, 64)], 1, (True, (-1, -1))).plan(3, 2, 1, CPU)
    assert not any(x.is_inference() for call in plan.calls for x in call.lengths if isinstance(x, Tensor))
    for selection in (plan.to_queries.sent, plan.queries, plan.keys):
        assert selection is None or not selection.index.is_inference()


def test_indices_are_made_on_their_device() -> None:
    """Not on torch's default one."""
    with torch.device("meta"):
        assert indices_of([(3, 2), (0, 1)], CPU).tolist() == [3, 4, 0]


def test_a_window_needs_the_neighbours_keys_alone() -> None:
    """Of rank 1 and its neighbours, not of the first ranks, as without a window."""
    split = TokenSplit.contiguous(64, 4)
    near, far = (Spread(split, [(0, 64)], 1, (True, window)) for window in ((4, 0), (-1, -1)))
    assert near.plan(3, 1, KEY_HEADS, CPU).to_queries.receives == [0, 0, 4, 16]
    assert far.plan(3, 1, KEY_HEADS, CPU).to_queries.receives == [16, 16, 16, 16]


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "window", "head_ranks"),
    [
        (2, 32, 8, -1, 1),
        (4, 32, 8, -1, 1),
        (8, 32, 8, -1, 8),
        (4, 32, 32, -1, 4),
        (8, 32, 1, -1, 1),
        (8, 32, 32, 64, 1),
        (3, 32, 32, -1, 1),
    ],
)
def test_heads_are_shared_where_less_travels(
    ranks: int, heads: int, kv_heads: int, window: int, head_ranks: int
) -> None:
    length = 128 * ranks
    split = TokenSplit.balanced([(0, length)], length, ranks)
    spread = Spread(split, [(0, length)], 1, (True, (window, 0 if window >= 0 else -1)))
    assert spread.head_ranks(heads, kv_heads) == head_ranks


def test_traffic_is_what_plans_send() -> None:
    """To other ranks."""
    split = TokenSplit.balanced([(0, 100), (100, 160)], 160, 4)
    spread = Spread(split, [(0, 100), (100, 160)], 1, (True, (-1, -1)))
    for head_ranks in (1, 2, 4):
        sent = 0
        for rank in range(4):
            plan = spread.plan(rank, head_ranks, KEY_HEADS, CPU)
            sent += 2 * _to_others(plan.to_queries, rank) * KEY_HEADS // plan.units[1]
            sent += 0 if plan.to_heads is None else 2 * _to_others(plan.to_heads, rank) * HEADS // head_ranks
        assert spread.traffic(head_ranks, HEADS, KEY_HEADS) == sent


def _to_others(exchange: Exchange, rank: int) -> int:
    return sum(exchange.sends) - exchange.sends[rank]


def test_a_long_sequence_in_many_chunks_is_not_copied_for_each() -> None:
    """Between its chunks on a rank are those of others."""
    runs = tuple(tuple((start, start + 8) for start in range(8 * rank, 512, 32)) for rank in range(4))
    spread = Spread(TokenSplit(512, runs), [(0, 512)], 1, (True, (-1, -1)))
    plan = spread.plan(3, 1, KEY_HEADS, CPU)
    assert plan.keys is not None
    assert len(plan.keys.index) <= 1.5 * 512
    assert len(plan.calls) > 1
    assert sum(call.queries[1] - call.queries[0] for call in plan.calls) == 128


@given(st.lists(st.integers(0, 6), max_size=20) | st.permutations(range(7)))
def test_rows_put_back_are_added(index: list[int]) -> None:
    selection = Selection.of(torch.tensor(index, dtype=torch.int64), 7, sorted(index) == [*range(7)])
    x, y = (torch.randn(n, 2, 3, dtype=torch.float64, requires_grad=True) for n in (7, len(index)))
    taken, put = selection.take(x), selection.put(y)
    torch.testing.assert_close(taken, x[index])
    torch.testing.assert_close(put, torch.zeros_like(x).index_add(0, torch.tensor(index, dtype=torch.int64), y))
    # The transpose: both have the same gradients as a product.
    torch.testing.assert_close((taken * y).sum(), (x * put).sum())
    for result, weight, leaf, expected in ((taken, y, x, put), (put, x, y, taken)):
        (gradient,) = torch.autograd.grad((result * weight.detach()).sum(), leaf)
        torch.testing.assert_close(gradient, expected)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="split is one of balanced, contiguous, not 'zigzag'"):
        ContextParallel(split="zigzag")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a group is a torch.distributed ProcessGroup"):
        ContextParallel("ranks")
    with pytest.raises(ValueError, match="a sequence of 7 tokens can't be split evenly over 2 ranks: pad it"):
        TokenSplit.contiguous(7, 2)


class SomeForCausalLM:
    """The forward of Qwen3-VL's class on transformers 5.0."""

    def loss_function(self, logits: Any, labels: Any, **kwargs: Any) -> Any: ...

    def forward(self, labels: Any = None, **kwargs: Any) -> Any:
        return self.loss_function(logits=labels, labels=labels)


class OtherForCausalLM(SomeForCausalLM):
    def forward(self, labels: Any = None, **kwargs: Any) -> Any:
        return self.loss_function(logits=labels, labels=labels, **kwargs)


def test_a_loss_that_gets_no_targets() -> None:
    assert not head_of(SomeForCausalLM).takes_targets
    assert head_of(OtherForCausalLM).takes_targets
