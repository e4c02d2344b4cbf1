from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from kernel_compat import UnsupportedFeatureError, known_kernels
from kernel_compat.attention import boundaries, forward, mask_reduction
from kernel_compat.attention import padding as padding_module
from kernel_compat.attention.boundaries import Sequences, find_packing, restarts_of, sequences_of_positions
from kernel_compat.attention.call import AttentionCall, PackedLengths
from kernel_compat.attention.forward_context import ForwardContext, within
from kernel_compat.attention.layout import SequenceLayout
from kernel_compat.attention.mask_function import attention_mask_function
from kernel_compat.attention.mask_reduction import ReducedMask, reduce_mask
from kernel_compat.attention.model_arguments import ModelArguments
from kernel_compat.attention.padding import padding
from kernel_compat.attention.resolution import _in_fixed_shapes, _of_padding
from kernel_compat.kernels import Functions
from kernel_compat.kernels.memo import Memo, scope

REFERENCE = known_kernels()["flash_attention_reference"]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool) -> Tensor:
    return forward.flash_attention(REFERENCE, AttentionCall(q, k, v, causal, mask))


# padding of keys, in every form of mask


@st.composite
def key_rows(draw: st.DrawFn, length: int) -> list[bool]:
    kind = draw(st.sampled_from(["none", "left", "right", "both", "holes"]))
    first, last = draw(st.integers(0, length)), draw(st.integers(0, length))
    if kind == "none":
        return [True] * length
    if kind == "left":
        return [j >= first for j in range(length)]
    if kind == "right":
        return [j < last for j in range(length)]
    if kind == "both":
        return [min(first, last) <= j < max(first, last) for j in range(length)]
    return draw(st.lists(st.booleans(), min_size=length, max_size=length))


@st.composite
def key_masks(draw: st.DrawFn, length: int, most: int = 3) -> Tensor:
    rows = draw(st.lists(key_rows(length), min_size=1, max_size=most))
    return torch.tensor(rows, dtype=torch.bool).reshape(len(rows), length)


def visible_by_hand(
    keys: Tensor, q_len: int, causal: bool, left: int | None, right: int | None, room: int = 0
) -> Tensor:
    """The mask (batch, q_len, kv_len + room), computed pair by pair; the queries are at the last keys."""
    batch, kv_len = keys.shape
    out = torch.zeros(batch, q_len, kv_len + room, dtype=torch.bool)
    for b in range(batch):
        for i in range(q_len):
            position = i + kv_len - q_len
            for j in range(kv_len):
                out[b, i, j] = (
                    bool(keys[b, j])
                    and not (causal and j > position)
                    and not (left is not None and j < position - left)
                    and not (right is not None and j > position + right)
                )
    return out


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Attention in float64 of (batch, length, heads, dim) with a mask (batch, q_len, kv_len).

    A query that sees no key gets zeros.
    """
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1).nan_to_num(0)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def tensors(batch: int, q_len: int, kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(batch, length, 2, 4, dtype=torch.float64, generator=generator) for length in (q_len, kv_len, kv_len)
    )


FORMS = {
    "bool": lambda visible: visible,
    "float32, least": lambda visible: torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min),
    "float32, minus infinity": lambda visible: torch.zeros(visible.shape).masked_fill(~visible, -torch.inf),
    "float32, -1e9": lambda visible: torch.zeros(visible.shape).masked_fill(~visible, -1e9),
    "float32, -1e4": lambda visible: torch.zeros(visible.shape).masked_fill(~visible, -10000.0),
    "bfloat16, least": lambda visible: torch.zeros(visible.shape, dtype=torch.bfloat16).masked_fill(
        ~visible, torch.finfo(torch.bfloat16).min
    ),
    "bfloat16, -1e4": lambda visible: torch.zeros(visible.shape, dtype=torch.bfloat16).masked_fill(~visible, -1e4),
    "float16, least": lambda visible: torch.zeros(visible.shape, dtype=torch.float16).masked_fill(
        ~visible, torch.finfo(torch.float16).min
    ),
    "float64, minus zero where visible": lambda visible: torch.full(
        visible.shape, -0.0, dtype=torch.float64
    ).masked_fill(~visible, -torch.inf),
}
limits = st.none() | st.integers(0, 6)


@given(data=st.data())
def test_a_4d_mask_means_the_same(data: st.DataObject) -> None:
    """Any mix of padding, causality and window is applied exactly or, where no kernel can apply it, refused."""
    q_len = data.draw(st.integers(1, 6), "q_len")
    kv_len = q_len + data.draw(st.integers(0, 5), "cached")
    keys = data.draw(key_masks(kv_len), "keys")
    causal = data.draw(st.booleans(), "causal")
    # Keys hidden from all queries may be padding or room in a static cache; without causality they are padding.
    room = data.draw(st.integers(0, 8), "room of a static cache") if causal else 0
    left = data.draw(limits, "left")
    right = None if causal else data.draw(limits, "right")
    one_sided = not causal and (left is None) != (right is None)
    one_sided = not causal and (left is None) != (right is None)
    heads = data.draw(st.sampled_from([1, 2]), "heads of the mask")
    form = data.draw(st.sampled_from(sorted(FORMS)), "form")
    visible = visible_by_hand(keys, q_len, causal, left, right, room)
    mask = FORMS[form](visible)[:, None].expand(-1, heads, -1, -1)
    q, k, v = tensors(keys.shape[0], q_len, kv_len + room)
    real = keys[:, kv_len - q_len :]
    refusal: ValueError | None = None
    try:
        out = attention(q, k, v, mask, causal=data.draw(st.booleans(), "the layer's is_causal"))
    except ValueError as error:
        refusal = error
    if refusal is not None:
        holes = any("FT" in "".join("FT"[key] for key in row).lstrip("F") for row in keys.tolist())
        # Ambiguous masks may be refused, but no mask that a model makes.
        assert (holes and (left, right) != (None, None)) or one_sided, refusal
        return
    expected = attention_by_hand(q, k, v, visible)
    torch.testing.assert_close(out[real], expected[real], rtol=1e-9, atol=1e-9)


@given(data=st.data())
def test_any_4d_mask_is_honoured_or_refused(data: st.DataObject) -> None:
    """Random masks: each is refused, or the result is right for every query whose key is visible to some query."""
    q_len = data.draw(st.integers(1, 4), "q_len")
    kv_len = q_len + data.draw(st.integers(0, 3), "cached")
    bits = data.draw(st.lists(st.booleans(), min_size=q_len * kv_len, max_size=q_len * kv_len), "visible")
    visible = torch.tensor(bits, dtype=torch.bool).reshape(1, q_len, kv_len)
    try:
        reduced = reduce_mask(visible[:, None], q_len, kv_len)
    except ValueError:
        return
    keys = visible.any(1)
    assert reduced.kv_len <= kv_len
    assert not keys[:, reduced.kv_len :].any()
    shown = keys if reduced.padding is None else torch.nn.functional.pad(reduced.padding, (0, kv_len - reduced.kv_len))
    assert torch.equal(shown, keys)
    left, right = (None if limit < 0 else limit for limit in reduced.window)
    described = visible_by_hand(shown[:, : reduced.kv_len], q_len, reduced.causal, left, right, kv_len - reduced.kv_len)
    if reduced.segment_ids is not None:  # padding belongs to the sequence before it
        running = reduced.segment_ids.cummax(1).values
        described &= running[:, :, None] == running[:, None]
    real = torch.ones(1, q_len, dtype=torch.bool)
    if reduced.padded_queries:
        real = shown[:, reduced.kv_len - q_len : reduced.kv_len]
        # Only padding queries are left out; their rows are empty, full, or the row of a token in that place.
        alike = (visible == described).all(-1) | ~visible.any(-1) | visible.all(-1)
        assert alike.all(), (visible.int(), reduced)
    assert torch.equal(visible[real], described[real])


def test_a_static_cache_with_room_for_more_than_the_queries() -> None:
    """Queries must not count as padding because no keys follow them yet."""
    visible = torch.zeros(1, 1, 3, 8, dtype=torch.bool)
    visible[..., :3] = torch.ones(3, 3).tril().bool()
    reduced = reduce_mask(visible, 3, 8)
    assert (reduced.kv_len, reduced.causal, reduced.window) == (3, True, (-1, -1))
    assert reduced.padding is None
    q, k, v = tensors(1, 3, 8)
    out = attention(q, k, v, visible, causal=True)
    torch.testing.assert_close(out, attention_by_hand(q, k, v, visible[:, 0]))


@pytest.mark.parametrize(
    ("causal", "window", "expected"),
    [
        (True, None, (True, (-1, -1))),
        (True, 2, (True, (2, 0))),
        (True, 0, (True, (0, 0))),
        (True, 5, (True, (-1, -1))),  # as wide as the keys, so it hides nothing
        (False, 1, (False, (1, 1))),
        (False, None, (False, (-1, -1))),
    ],
)
def test_the_weakest_description(causal: bool, window: int | None, expected: tuple[bool, tuple[int, int]]) -> None:
    keys = torch.ones(2, 6, dtype=torch.bool)
    visible = visible_by_hand(keys, 6, causal, window, None if causal else window)
    reduced = reduce_mask(visible[:, None], 6, 6)
    assert reduced.padding is None
    assert (reduced.causal, reduced.window) == expected
    assert reduced.kv_len == 6


def blocks() -> Tensor:
    return torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool()


def causal_blocks() -> Tensor:
    return blocks() & torch.ones(5, 5).tril().bool()


def prefix() -> Tensor:
    mask = torch.ones(5, 5).tril().bool()
    mask[:, :3] = True
    return mask


def strictly_causal() -> Tensor:
    return torch.ones(5, 5).tril(-1).bool()


def anticausal() -> Tensor:
    return torch.ones(5, 5).triu().bool()


def dilated() -> Tensor:
    index = torch.arange(5)
    distance = index[:, None] - index
    return (distance >= 0) & (distance % 2 == 0)


def sinks_and_window() -> Tensor:
    mask = torch.ones(5, 5).tril().bool() & torch.ones(5, 5).triu(-1).bool()
    mask[:, 0] = True
    return mask


@pytest.mark.parametrize("make", [prefix, dilated, sinks_and_window])
@pytest.mark.parametrize("form", ["bool", "float32, least"])
@pytest.mark.parametrize("padded", [False, True])
def test_other_patterns_are_refused(make: Any, form: str, padded: bool) -> None:
    visible = make().repeat(2, 1, 1)
    if padded:
        visible[1, :, 4] = False
    with pytest.raises(
        ValueError, match="is not made of padding, causality, a sliding window and packed sequences alone"
    ) as caught:
        reduce_mask(FORMS[form](visible)[:, None], 5, 5)
    assert "'sdpa' or 'eager'" in str(caught.value)


@pytest.mark.parametrize("make", [blocks, causal_blocks])
@pytest.mark.parametrize("form", ["bool", "float32, least"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [None, 1])
def test_packed_sequences(make: Any, form: str, padded: bool, window: int | None) -> None:
    visible = make().repeat(2, 1, 1)
    if window is not None:
        visible &= (torch.arange(5)[:, None] - torch.arange(5)).abs() <= window
    real = torch.ones(2, 5, dtype=torch.bool)
    if padded:
        real[1, 4] = False
        visible &= real[:, None]
    q, k, v = tensors(2, 5, 5)
    out = attention(q, k, v, FORMS[form](visible)[:, None], causal=True)
    torch.testing.assert_close(out[real], attention_by_hand(q, k, v, visible)[real])


@pytest.mark.parametrize("make", [strictly_causal, anticausal])
def test_patterns_that_a_window_may_make(make: Any) -> None:
    """Right or refused: some kernels have windows with only one limit."""
    visible = make()[None]
    q, k, v = tensors(1, 5, 5)
    try:
        out = attention(q, k, v, visible[:, None], causal=True)
    except ValueError:
        return
    torch.testing.assert_close(out, attention_by_hand(q, k, v, visible))


@pytest.mark.parametrize("number", [0.5, -1.0, 1.0, -100.0, -9000.0, torch.inf, torch.nan])
def test_a_bias_is_refused(number: float) -> None:
    mask = torch.zeros(1, 1, 3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
    mask[0, 0, 2, 0] = number
    with pytest.raises(ValueError, match="holds a bias"):
        reduce_mask(mask, 3, 3)


def test_heads_that_differ_are_refused() -> None:
    mask = torch.ones(1, 2, 3, 3, dtype=torch.bool).tril()
    mask[0, 1] = True
    with pytest.raises(ValueError, match="differs between heads"):
        reduce_mask(mask, 3, 3)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="must be bool or float"):
        reduce_mask(torch.ones(1, 1, 3, 3, dtype=dtype), 3, 3)


def test_a_mask_for_other_queries_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(1, 1, 4, 4\) does not fit 3 queries"):
        reduce_mask(torch.ones(1, 1, 4, 4, dtype=torch.bool), 3, 4)


def test_a_mask_that_is_longer_than_the_keys_is_cut() -> None:
    """Upstream's eager attention does so too: ``attention_mask[:, :, :, :key.shape[-2]]``."""
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    longer = torch.nn.functional.pad(mask, (0, 4))
    assert reduce_mask(longer, 3, 3)[1:] == reduce_mask(mask, 3, 3)[1:]


def test_keys_that_a_cache_has_dropped_are_missed() -> None:
    """Qwen2-MoE's masks up to 4.57 cover the whole text, but its cache keeps only a window."""
    longer = torch.ones(1, 1, 3, 8, dtype=torch.bool).tril(5)
    with pytest.raises(ValueError, match="which key each column stands for"):
        reduce_mask(longer, 3, 5)


# 2D masks


@given(data=st.data())
def test_padding(data: st.DataObject) -> None:
    kv_len = data.draw(st.integers(1, 7), "kv_len")
    q_len = data.draw(st.integers(1, kv_len), "q_len")
    keys = data.draw(key_masks(kv_len), "keys")
    padded_queries = data.draw(st.booleans(), "self-attention")
    dtype = data.draw(st.sampled_from([torch.bool, torch.int64, torch.int32, torch.float32, torch.bfloat16]), "dtype")
    found = padding(keys.to(dtype), q_len, padded_queries)
    if keys.all():
        assert found is None
        return
    assert found is not None
    rows = keys.tolist()
    # A single query is never padding.
    queries = [row[kv_len - q_len :] if padded_queries and q_len > 1 else [True] * q_len for row in rows]

    def indices(table: list[list[bool]]) -> list[int]:
        return [b * len(row) + j for b, row in enumerate(table) for j, there in enumerate(row) if there]

    def offsets(table: list[list[bool]]) -> list[int]:
        return [sum(sum(row) for row in table[:n]) for n in range(len(table) + 1)]

    for sequences, table in zip(found, (queries, rows), strict=True):
        assert sequences.indices is not None
        assert sequences.indices.tolist() == indices(table)
        assert sequences.cu_seqlens.tolist() == offsets(table)
        assert sequences.cu_seqlens.dtype == torch.int32
        assert sequences.max_seqlen == max(map(sum, table))
        assert type(sequences.max_seqlen) is int
    holes = any("FT" in "".join("FT"[there] for there in row).lstrip("F") for row in rows)
    assert found[1].interior_padding is holes


@pytest.mark.parametrize("number", [2, -1, 0.5, torch.nan, -torch.inf])
def test_a_2d_mask_of_other_numbers_is_refused(number: float) -> None:
    mask = torch.ones(2, 4) if isinstance(number, float) else torch.ones(2, 4, dtype=torch.int64)
    mask[0, 0] = 0
    mask[1, 1] = number
    with pytest.raises(ValueError, match="must hold 1 for tokens and 0 for padding"):
        padding(mask, 4, True)


@given(data=st.data())
def test_padded_attention(data: st.DataObject) -> None:
    """Against masked softmax, and in shapes that don't depend on values, as under torch.compile."""
    q_len = data.draw(st.integers(1, 5), "q_len")
    kv_len = q_len + data.draw(st.integers(0, 4), "cached")
    room = data.draw(st.integers(0, 3), "room of a static cache")
    keys = data.draw(key_masks(kv_len), "keys")
    causal = data.draw(st.booleans(), "causal")
    window = data.draw(st.none() | st.integers(1, 6), "sliding window")
    cross = data.draw(st.booleans(), "cross-attention") and not causal and window is None
    if q_len == 1 and not cross:
        keys[:, -1] = True  # a single query is never padding, and neither is its own key
    q, k, v = tensors(keys.shape[0], q_len, kv_len + room)
    limit = None if window is None else window - 1
    visible = visible_by_hand(keys, q_len, causal, limit, None if causal else limit, room)
    holes = any("FT" in "".join("FT"[key] for key in row).lstrip("F") for row in keys.tolist())
    kernel_window = (-1, -1) if window is None else (window - 1, 0 if causal else window - 1)
    call, functions = AttentionCall(q, k, v, causal), REFERENCE.load()
    reduced = ReducedMask(keys, not cross, kv_len, causal, kernel_window)
    pattern = (causal, kernel_window, kv_len)

    def attend(layout: SequenceLayout) -> Tensor:
        return layout.attend(functions, call)

    distances_shrink = holes and window is not None
    if distances_shrink:
        with pytest.raises(ValueError, match="padding between tokens"):
            _of_padding(pattern, call, reduced, Functions(functions.attend))
    real = torch.ones_like(keys[:, kv_len - q_len :]) if cross else keys[:, kv_len - q_len :]
    expected = attention_by_hand(q, k, v, visible)
    out = attend(_of_padding(pattern, call, reduced, functions))
    if causal and window is None:  # the mask says where the keys of a static cache end, also beside a bias
        for bias in (None, torch.zeros(1, 1, q_len, kv_len + room, dtype=q.dtype)):
            cached = forward.flash_attention(REFERENCE, AttentionCall(q, k, v, True, keys, bias=bias))
            torch.testing.assert_close(cached[real], expected[real], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out[real], expected[real], rtol=1e-9, atol=1e-9)
    assert (out[~real] == 0).all()
    if distances_shrink:
        return
    shaped = attend(_in_fixed_shapes(pattern, keys, q_len, not cross))
    torch.testing.assert_close(shaped, out, rtol=1e-9, atol=1e-9)


def test_a_bias_beside_packed_positions_is_refused() -> None:
    q, k, v = tensors(1, 5, 5)
    packed = AttentionCall(q, k, v, True, positions=torch.tensor([[0, 1, 0, 1, 2]]))
    with pytest.raises(UnsupportedFeatureError, match="a bias of the scores does not support packed sequences"):
        forward.flash_attention(REFERENCE, packed._replace(bias=torch.zeros(1, 1, 5, 5, dtype=q.dtype)))


@pytest.mark.parametrize(
    ("offsets", "longest", "says"), [([0, 2], 2, "don't end at 5"), ([0, 2, 5], 2, "is longer than")]
)
def test_offsets_that_leave_tokens_out_are_refused_in_training(offsets: list[int], longest: int, says: str) -> None:
    """Kernels don't write the output of such tokens, nor their gradients."""
    q, k, v = tensors(1, 5, 5)
    ends = torch.tensor(offsets, dtype=torch.int32)
    call = AttentionCall(q, k, v, True, lengths=PackedLengths(ends, ends, longest, longest))
    trained = call._replace(value=v.clone().requires_grad_())
    arguments = ModelArguments(1, 5, "", True, True, None)
    for context in (None, ForwardContext(arguments)):
        with within(context):
            forward.flash_attention(REFERENCE, call)  # as continuous batching does, and layers that aren't trained
            with pytest.raises(ValueError, match=says):
                forward.flash_attention(REFERENCE, trained)


def test_a_longest_length_of_another_type_is_refused() -> None:
    layer, (q, k, v) = torch.nn.Module(), (x.transpose(1, 2) for x in tensors(1, 5, 5))
    ends = torch.tensor([0, 5], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": [5], "max_length_k": 5}
    with pytest.raises(TypeError, match=r"max_length_q must be a number of tokens, not \[5\]"):
        forward.attention_forward(REFERENCE, "x")(layer, q, k, v, None, is_causal=True, scaling=None, **lengths)


# packed position ids


def packing(ids: Tensor, batch: int, causal: bool) -> Sequences | None:
    return sequences_of_positions(ids, batch, ids.shape[-1], causal)


@given(data=st.data())
def test_packing(data: st.DataObject) -> None:
    """Sequences that start at 0, and parts of cut ones, which start later but below the last position before them."""
    batch = data.draw(st.integers(1, 3), "batch")
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4), "lengths")
    total = sum(lengths)
    rows, starts = [], []
    for row in range(batch):
        own = data.draw(st.permutations(lengths), f"lengths of row {row}")
        positions: list[int] = []
        begins: list[int] = []
        for length in own:
            top = positions[-1] if positions else 3
            first = data.draw(st.integers(0, top if not positions else max(top - 1, 0)), "first position")
            begins.append(row * total + len(positions))
            positions += range(first, first + length)
        rows.append(positions)
        starts += begins
    ids = torch.tensor(rows)
    assume(bool((ids.amax(1) > 0).all()))  # positions that are all 0 separate nothing
    form = data.draw(st.sampled_from(["plain", "one row of one dimension", "with three more of Qwen2-VL"]), "form")
    if form == "one row of one dimension":
        assume(batch == 1)
        ids = ids[0]
    elif form != "plain":
        ids = torch.stack([ids, *torch.zeros(3, batch, total, dtype=torch.int64)])
    found = packing(ids, batch, True)
    if len(starts) == batch or total < 2:
        assert found is None
        return
    assert found is not None
    assert found.cu_seqlens.tolist() == [*starts, batch * total]
    assert found.cu_seqlens.dtype == torch.int32
    assert found.max_seqlen == max(b - a for a, b in zip(starts, [*starts[1:], batch * total], strict=True))
    assert type(found.max_seqlen) is int


def test_one_row_of_positions_for_a_batch() -> None:
    found = packing(torch.tensor([[0, 1, 0, 1, 2]]), 2, True)
    assert found is not None
    assert found.cu_seqlens.tolist() == [0, 2, 5, 7, 10]
    assert found.max_seqlen == 3


@pytest.mark.parametrize(
    ("ids", "batch"),
    [
        (torch.arange(6)[None], 1),
        (torch.arange(6)[None].repeat(3, 1), 3),
        (torch.arange(6)[None] + 100, 1),  # decoding with a cache
        (torch.tensor([[5]]), 1),
        (torch.tensor([[0, 0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]])[:, 1:], 3),  # the rest of a row with left padding
        # Time, height and width of an image of 2 x 2 patches and of two words after it, without text positions.
        (torch.tensor([[0, 0, 0, 0, 2, 3], [0, 0, 1, 1, 2, 3], [0, 1, 0, 1, 2, 3]])[:, None], 1),
        (torch.arange(12).reshape(2, 6), 3),  # as many rows as another batch has
    ],
)
def test_positions_that_tell_of_no_packing(ids: Tensor, batch: int) -> None:
    assert packing(ids, batch, True) is None


@pytest.mark.parametrize(
    ("ids", "is_packed"),
    [
        ([0, 1, 2, 0, 0, 1, 2], False),  # as generate() counts on behind a prompt that is padded on its right
        ([0, 1, 2, 0, 0, 0, 1], True),  # a sequence that begins behind padding
        ([0, 1, 4, 0, 0, 3, 4], True),  # a part of a sequence that was cut
    ],
)
def test_positions_behind_padding(ids: list[int], is_packed: bool) -> None:
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1]])
    restarts = restarts_of(torch.tensor([ids]), 1, 7, True)
    assert (find_packing(mask, restarts).sequences is not None) is is_packed


def test_positions_of_an_encoder_are_not_read_that_way() -> None:
    """An encoder may number patches in any order: only a restart at 0 in a single row separates sequences."""
    falling = torch.tensor([[0, 3, 1, 4]])
    assert packing(falling, 1, False) is None
    assert packing(falling, 1, True) is not None
    restarted = torch.tensor([[0, 1, 0, 1]])
    assert packing(restarted, 1, False) is not None
    assert packing(restarted.repeat(2, 1), 2, False) is None


# computed once per forward and tensor


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch, memo: Memo) -> dict[str, int]:
    owners = {"_reduce": mask_reduction, "_padding": padding_module, "find_packing": boundaries}
    calls = dict.fromkeys(owners, 0)

    def counted(name: str, original: Any) -> Any:
        def count(*args: Any) -> Any:
            calls[name] += 1
            return original(*args)

        return count

    for name, owner in owners.items():
        monkeypatch.setattr(owner, name, counted(name, getattr(owner, name)))
    return calls


def a_2d_mask() -> Tensor:
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, :2] = False
    return mask


def a_4d_mask() -> Tensor:
    return torch.ones(6, 6).tril().bool().repeat(2, 1, 1, 1)


CASES = {
    "_padding": (a_2d_mask, lambda mask: padding(mask, 6, True)),
    "_reduce": (a_4d_mask, lambda mask: reduce_mask(mask, 6, 6)),
    "find_packing": (lambda: torch.tensor([[0, 1, 2, 0, 1, 2]]), lambda ids: packing(ids, 1, True)),
}


@pytest.mark.parametrize("name", CASES)
def test_once_a_tensor(name: str, counts: dict[str, int]) -> None:
    make, ask = CASES[name]
    mask = make()
    first = ask(mask)
    for _ in range(5):
        assert ask(mask) is first
    assert counts[name] == 1
    ask(mask.clone())
    assert counts[name] == 2  # an equal tensor, but not the same one


@pytest.mark.parametrize("name", CASES)
def test_fresh_views_count_as_their_base(name: str, counts: dict[str, int]) -> None:
    """Each layer slices the mask that it gets."""
    make, ask = CASES[name]
    mask = make()
    for _ in range(5):
        ask(mask[:])
        ask(mask[..., : mask.shape[-1]])
    assert counts[name] == 1
    base, views = mask[:], []
    del mask
    for _ in range(3):
        views.append(base[:])  # the original tensor is deleted here; only its views keep it alive
        ask(views[-1])
    assert counts[name] == 1


def test_different_views_are_different(counts: dict[str, int]) -> None:
    mask = torch.ones(2, 2, 6, dtype=torch.bool)
    mask[1, 0, :2] = False
    assert padding(mask[0], 6, True) is None
    assert padding(mask[1], 6, True) is not None
    other = padding(mask[1, :, 1:], 5, True)
    assert other is not None
    assert other[1].cu_seqlens.tolist() == [0, 4, 9]
    assert padding(mask[1].T[:2], 2, True) is not None
    assert counts["_padding"] == 4


def test_different_questions_are_different(counts: dict[str, int]) -> None:
    mask = a_2d_mask()
    found = padding(mask, 6, True), padding(mask, 3, True), padding(mask, 6, False)
    assert [one[0].indices.numel() for one in found if one is not None and one[0].indices is not None] == [10, 6, 12]
    assert counts["_padding"] == 3


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", ["itself", "a view", "its base", "in inference mode"])
def test_again_after_a_write(name: str, how: str, counts: dict[str, int]) -> None:
    make, ask = CASES[name]
    base = make()
    mask = base[:] if how == "its base" else base
    ask(mask)
    target = {"itself": mask, "a view": mask[:], "its base": base, "in inference mode": mask}[how]
    with torch.inference_mode(how == "in inference mode"):
        target.zero_()
    again = ask(mask)
    assert counts[name] == 2
    if name == "_padding":
        assert again[0].indices.numel() == 0


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_kept_for_another_forward(
    name: str, counts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, ask = CASES[name]
    mask = make()
    for forward_in_progress in (Memo(), None, None, Memo()):
        monkeypatch.setattr(scope, "memo", forward_in_progress)
        mask.numpy()[...] = 0  # which the version counter doesn't count
        ask(mask)
    assert counts[name] == 4


def test_what_changed_is_seen(memo: Memo) -> None:
    mask = a_2d_mask()
    before = padding(mask, 6, True)
    mask[1, 5] = False
    after = padding(mask, 6, True)
    assert before is not None
    assert after is not None
    assert before[1].cu_seqlens.tolist() == [0, 4, 10]
    assert after[1].cu_seqlens.tolist() == [0, 4, 9]


def test_inference_tensors_are_not_remembered(counts: dict[str, int], memo: Memo) -> None:
    """They have no version counter, so writes couldn't be detected."""
    with torch.inference_mode():
        mask = a_2d_mask()
        assert mask.is_inference()
        first = padding(mask, 6, True)
        mask[1, 0] = False
        second = padding(mask, 6, True)
    assert counts["_padding"] == 2
    assert not memo.values
    assert first is not None
    assert second is not None
    assert first[1].cu_seqlens.tolist() != second[1].cu_seqlens.tolist()


@pytest.mark.parametrize("name", CASES)
def test_nothing_outlives_the_tensor(name: str, memo: Memo) -> None:
    make, ask = CASES[name]
    mask = make()
    ask(mask)
    ask(mask[:])
    assert len(memo.values) == 1
    gone = weakref.ref(mask)
    del mask
    gc.collect()
    assert gone() is None
    assert not memo.values


def test_an_error_is_not_remembered_as_an_answer() -> None:
    mask = prefix()[None, None].clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="is not made of padding"):
            reduce_mask(mask, 5, 5)
    mask.copy_(torch.ones(5, 5).tril().bool())
    assert reduce_mask(mask, 5, 5).causal


# the mask function that create_causal_mask and similar functions call


def made(**changes: Any) -> Tensor | None:
    return attention_mask_function(**{"batch_size": 2, "kv_length": 6, "q_length": 6, **changes})


def test_a_mask_without_padding_is_none() -> None:
    assert made() is None
    assert made(attention_mask=torch.ones(2, 6, dtype=torch.bool)) is None
    assert made(attention_mask=None, cache_position=torch.arange(6), q_length=None) is None


def test_a_mask_with_padding_is_handed_on() -> None:
    found = made(attention_mask=a_2d_mask())
    assert found is not None
    assert torch.equal(found, a_2d_mask())


def test_a_cache_that_keeps_the_last_keys_alone() -> None:
    longer = torch.ones(2, 9, dtype=torch.bool)
    longer[0, :4] = False
    found = made(attention_mask=longer, kv_offset=3)
    assert found is not None
    assert found.shape == (2, 6)
    assert found[0].tolist() == [False, *[True] * 5]


def test_a_mask_with_more_columns_than_keys() -> None:
    """The first columns are used, as in eager attention: Voxtral's encoder halves its frames but not their mask."""
    longer = torch.ones(2, 9, dtype=torch.bool)
    longer[0, 4:] = False
    found = made(attention_mask=longer)
    assert found is not None
    assert found[0].tolist() == [True] * 4 + [False] * 2


@pytest.mark.parametrize("by", ["cache_position", "q_offset"])
def test_the_room_of_a_static_cache_is_not_attended(by: str) -> None:
    where: dict[str, Any] = {"q_length": 2, "q_offset": 3}
    if by == "cache_position":
        where = {"cache_position": torch.tensor([3, 4]), "q_length": None}
    found = made(kv_length=12, **where)
    assert found is not None
    assert found.shape == (2, 5)
    assert found.all()
    assert made(kv_length=5, **where) is None  # every key is visible
