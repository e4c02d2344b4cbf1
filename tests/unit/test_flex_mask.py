"""The block masks of flash_attention_flex: no block that is seen is left out, and only blocks seen whole are computed unmasked."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kernel_compat.kernels import flex_mask
from kernel_compat.kernels.flex_mask import BLOCK, FlexMask

WINDOWS = [(True, (-1, -1)), (False, (-1, -1)), (True, (100, 0)), (False, (40, 70)), (True, (300, 0))]


def visible_pairs(mask: FlexMask) -> Tensor:
    """(batch, heads, q_len, kv_len): by the definition, pair by pair."""
    q_sequence, q_position = (x[:, None, :, None] for x in (mask.q_sequence, mask.q_position))
    k_sequence, k_position = (x[:, None, None, :] for x in (mask.k_sequence, mask.k_position))
    behind = q_position - k_position
    pairs = (q_sequence == k_sequence) & (behind <= mask.left) & (-behind <= mask.right)
    return pairs if mask.visible is None else pairs & mask.visible


def assert_blocks_are_right(mask: FlexMask) -> None:
    rows, heads, q_blocks, kv_blocks = mask.partial.shape
    pairs = visible_pairs(mask).expand(rows, heads, -1, -1)
    for block in itertools.product(*map(range, (rows, heads, q_blocks, kv_blocks))):
        row, head, i, j = block
        one = pairs[row, head, i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
        partial, full = mask.partial[block], mask.full[block]
        assert not (partial and full)
        assert partial or full or not one.any(), f"block {block} is left out"
        assert not full or (one.all() and one.shape == (BLOCK, BLOCK)), f"block {block} isn't seen whole"
    for blocks, (count, which) in zip(
        (mask.partial, mask.full, mask.partial.mT, mask.full.mT),
        (mask.blocks[i : i + 2] for i in range(0, 8, 2)),
        strict=True,
    ):
        for one, number, order in zip(blocks.flatten(0, 2), count.flatten(), which.flatten(0, 2), strict=True):
            assert sorted(order[:number].tolist()) == one.nonzero().flatten().tolist()


@pytest.mark.parametrize(("causal", "window"), WINDOWS)
@pytest.mark.parametrize("lengths", [(300, 300), (256, 256), (200, 513), (1, 400)])
def test_rows_of_equal_lengths(lengths: tuple[int, int], causal: bool, window: tuple[int, int]) -> None:
    mask = flex_mask.equal_lengths(*lengths, causal, window, torch.device("cpu"))
    if mask is None:
        assert window == (-1, -1)
        assert not causal or lengths[0] == 1
        return
    assert_blocks_are_right(mask)
    q, k = torch.arange(lengths[1] - lengths[0], lengths[1])[:, None], torch.arange(lengths[1])[None]
    left, right = (10**6 if side < 0 else side for side in window)
    expected = (q - k <= left) & (k - q <= (0 if causal else right))
    assert torch.equal(visible_pairs(mask)[0, 0], expected)


@pytest.mark.parametrize(("causal", "window"), WINDOWS)
def test_packed_sequences(causal: bool, window: tuple[int, int]) -> None:
    """Sequences of other lengths of queries and keys, empty ones, and tokens behind the last offset."""
    of_queries, of_keys = torch.tensor([0, 130, 130, 400, 500]), torch.tensor([0, 200, 210, 210, 480])
    mask = flex_mask.packed_sequences(of_queries, of_keys, (520, 500), causal, window)
    assert_blocks_are_right(mask)
    expected = torch.zeros(520, 500, dtype=torch.bool)
    left, right = (10**6 if side < 0 else side for side in window)
    for i in range(4):
        (q0, q1), (k0, k1) = (x[i : i + 2].tolist() for x in (of_queries, of_keys))
        q, k = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None], torch.arange(k1 - k0)[None]
        expected[q0:q1, k0:k1] = (q - k <= left) & (k - q <= (0 if causal else right))
    assert torch.equal(visible_pairs(mask)[0, 0], expected)


@pytest.mark.usefixtures("memo")
def test_a_mask_in_full() -> None:
    """Of each row and head, beside a window and segments of which some tokens are padding."""
    visible = torch.rand(2, 3, 300, 260) < 0.5
    visible[0, 1, :128, :128], visible[1, 2, 128:256] = True, False
    segments = (torch.ones(2, 300, dtype=torch.int32), torch.ones(2, 260, dtype=torch.int32))
    segments[1][0, 250:] = -1
    mask = flex_mask.any_mask(visible, segments, (300, 260), False, (150, 150), torch.device("cpu"))
    assert mask is not None
    assert_blocks_are_right(mask)
    again = flex_mask.any_mask(visible, segments, (300, 260), False, (150, 150), torch.device("cpu"))
    assert again is mask, "the layers of a forward share one mask"
    visible[0, 0] = False
    changed = flex_mask.any_mask(visible, segments, (300, 260), False, (150, 150), torch.device("cpu"))
    assert changed is not None
    assert not changed.visible[0, 0].any()  # type: ignore[index]
    assert_blocks_are_right(changed)


@pytest.mark.usefixtures("memo")
@pytest.mark.parametrize("kind", ["packed", "segments", "segments and pairs"])
def test_compiled(kind: str) -> None:
    """Masks of several tensors are made in the graph."""
    queries, keys = torch.tensor([0, 5, 9], dtype=torch.int32), torch.tensor([0, 150, 300], dtype=torch.int32)
    segments = (torch.zeros(1, 9, dtype=torch.int32), torch.arange(300, dtype=torch.int32)[None] // 200)
    pairs = None if kind == "segments" else torch.rand(1, 1, 9, 300) < 0.5

    def make() -> FlexMask | None:
        if kind == "packed":
            return flex_mask.packed_sequences(queries, keys, (9, 300), True, (200, 0))
        return flex_mask.any_mask(pairs, segments, (9, 300), True, (200, 0), queries.device)

    def results() -> tuple[Tensor, ...]:
        mask = make()
        assert mask is not None
        return visible_pairs(mask), *mask.blocks

    assert make() is make()  # kept for the forward
    found = torch.compile(results, fullgraph=True, backend="eager")()
    assert all(map(torch.equal, found, results()))
