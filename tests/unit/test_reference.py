"""The reference kernel against an independent implementation: loops over scores in Python, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernel_compat import known_kernels
from kernel_compat.kernels.reference import flash_attn_func, flash_attn_varlen_func


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one sequence in Python floats: q (q_len, heads, dim), k and v (kv_len, kv_heads, ...)."""
    q_len, heads, dim = q.shape
    kv_len, kv_heads, value_dim = v.shape
    out = torch.zeros(q_len, heads, value_dim, dtype=torch.float64)
    for head in range(heads):
        kv_head = head * kv_heads // heads
        for i in range(q_len):
            position = i + kv_len - q_len  # the last query is at the last key
            exponents: dict[int, float] = {}
            for j in range(kv_len):
                if causal and j > position:
                    continue
                if window[0] >= 0 and j < position - window[0]:
                    continue
                if window[1] >= 0 and j > position + window[1]:
                    continue
                score = sum(float(q[i, head, d]) * float(k[j, kv_head, d]) for d in range(dim))
                score *= 1 / math.sqrt(dim) if scale is None else scale
                exponents[j] = softcap * math.tanh(score / softcap) if softcap else score
            if not exponents:
                continue
            sink = None if sinks is None else float(sinks[head])
            top = max([*exponents.values(), *([] if sink is None else [sink])])
            total = sum(math.exp(e - top) for e in exponents.values())
            total += 0.0 if sink is None else math.exp(sink - top)
            for j, exponent in exponents.items():
                for d in range(value_dim):
                    out[i, head, d] += math.exp(exponent - top) / total * float(v[j, kv_head, d])
    return out


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


options = st.fixed_dictionaries(
    {},
    optional={
        "causal": st.booleans(),
        "window_size": st.tuples(st.integers(-1, 6), st.integers(-1, 6)),
        "softcap": st.sampled_from([0.0, 0.5, 3.0, 50.0]),
        "softmax_scale": st.sampled_from([None, 0.0, 0.1, 2.0, -1.0]),
        "sinks": st.booleans(),
    },
)
heads = st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1), (6, 2)])


def both(given: dict[str, Any], q_heads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same options as keywords of the kernel and of `by_hand`."""
    sinks = make(q_heads, seed=9) if given.get("sinks") else None
    kernel = {key: value for key, value in given.items() if key != "sinks"}
    kernel["s_aux"] = sinks
    hand = {
        "scale": given.get("softmax_scale"),
        "causal": given.get("causal", False),
        "window": given.get("window_size", (-1, -1)),
        "softcap": given.get("softcap", 0.0),
        "sinks": sinks,
    }
    return kernel, hand


@given(
    options=options,
    heads=heads,
    q_len=st.integers(1, 6),
    kv_len=st.integers(1, 6),
    batch=st.integers(1, 2),
    dims=st.sampled_from([(4, 4), (4, 2), (3, 5), (1, 1)]),
)
def test_equal_lengths(
    options: dict[str, Any], heads: tuple[int, int], q_len: int, kv_len: int, batch: int, dims: tuple[int, int]
) -> None:
    q = make(batch, q_len, heads[0], dims[0], seed=1)
    k, v = make(batch, kv_len, heads[1], dims[0], seed=2), make(batch, kv_len, heads[1], dims[1], seed=3)
    kernel, hand = both(options, heads[0])
    out = flash_attn_func(q, k, v, **kernel)
    assert out.shape == (batch, q_len, heads[0], dims[1])
    expected = torch.stack([by_hand(q[b], k[b], v[b], **hand) for b in range(batch)])
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


lengths = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4)


@given(options=options, heads=heads, lengths=lengths, int64=st.booleans(), behind=st.integers(0, 2))
def test_packed_sequences(
    options: dict[str, Any], heads: tuple[int, int], lengths: list[tuple[int, int]], int64: bool, behind: int
) -> None:
    """Includes empty sequences, and tokens after the last sequence, which belong to none."""
    q_lens, k_lens = [q for q, _ in lengths], [k for _, k in lengths]
    q = make(sum(q_lens) + behind, heads[0], 4, seed=1)
    k, v = make(sum(k_lens) + behind, heads[1], 4, seed=2), make(sum(k_lens) + behind, heads[1], 3, seed=3)

    def offsets(each: list[int]) -> Tensor:
        starts = [sum(each[:n]) for n in range(len(each) + 1)]
        return torch.tensor(starts, dtype=torch.int64 if int64 else torch.int32)

    kernel, hand = both(options, heads[0])
    out = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=offsets(q_lens),
        cu_seqlens_k=offsets(k_lens),
        max_seqlen_q=max(q_lens),
        max_seqlen_k=max(k_lens),
        **kernel,
    )
    assert out.shape == (sum(q_lens) + behind, heads[0], 3)
    assert not out.isnan().any()
    parts = [
        by_hand(q_part, k_part, v_part, **hand)
        for q_part, k_part, v_part in zip(
            q[: sum(q_lens)].split(q_lens), k[: sum(k_lens)].split(k_lens), v[: sum(k_lens)].split(k_lens), strict=True
        )
    ]
    torch.testing.assert_close(out[: sum(q_lens)], torch.cat(parts), rtol=1e-10, atol=1e-10)


def test_no_tokens_at_all() -> None:
    none = torch.zeros(0, 2, 4)
    cu = torch.zeros(3, dtype=torch.int32)
    assert flash_attn_varlen_func(none, none, none, cu, cu, 0, 0).shape == (0, 2, 4)


def test_known_numbers() -> None:
    """Known results, in case both implementations are wrong: equal scores give the mean, a sink takes its share."""
    v = torch.tensor([1.0, 3.0, 8.0]).reshape(1, 3, 1, 1)
    zeros = torch.zeros(1, 3, 1, 1)
    assert flash_attn_func(zeros, zeros, v).flatten().tolist() == pytest.approx([4.0, 4.0, 4.0])
    assert flash_attn_func(zeros, zeros, v, causal=True).flatten().tolist() == pytest.approx([1.0, 2.0, 4.0])
    window = flash_attn_func(zeros, zeros, v, causal=True, window_size=(1, 0))
    assert window.flatten().tolist() == pytest.approx([1.0, 2.0, 5.5])
    both_sides = flash_attn_func(zeros, zeros, v, window_size=(0, 1))
    assert both_sides.flatten().tolist() == pytest.approx([2.0, 5.5, 8.0])
    sink = flash_attn_func(zeros, zeros, v, s_aux=torch.zeros(1))
    assert sink.flatten().tolist() == pytest.approx([3.0, 3.0, 3.0])
    # The last query is at the last key.
    assert flash_attn_func(zeros[:, :1], zeros, v, causal=True).item() == pytest.approx(4.0)
    # More queries than keys: the first queries are before the first key and see none.
    more = flash_attn_func(torch.zeros(1, 5, 1, 1), zeros, v, causal=True)
    assert more.flatten().tolist() == pytest.approx([0.0, 0.0, 1.0, 2.0, 4.0])


@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_that_sees_nothing(sinks: bool) -> None:
    q, k, v = (make(1, n, 2, 4, seed=n).requires_grad_() for n in (5, 2, 2))
    s_aux = make(2).requires_grad_() if sinks else None
    out = flash_attn_func(q, k, v, causal=True, s_aux=s_aux)
    assert (out[:, :3] == 0).all()
    assert (out[:, 3:] != 0).all()
    out.sum().backward()
    for tensor in (q, k, v) if s_aux is None else (q, k, v, s_aux):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
    assert q.grad is not None
    assert (q.grad[:, :3] == 0).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window_size": (1, 0)},
        {"window_size": (1, 2)},
        {"softcap": 1.5, "causal": True},
        {"softmax_scale": 0.7},
    ],
    ids=str,
)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_gradients(options: dict[str, Any], sinks: bool) -> None:
    q, k = make(1, 5, 4, 3, seed=1).requires_grad_(), make(1, 4, 2, 3, seed=2).requires_grad_()
    v, s_aux = make(1, 4, 2, 2, seed=3).requires_grad_(), make(4, seed=4).requires_grad_()

    def dense(q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None = None) -> Tensor:
        return flash_attn_func(q, k, v, s_aux=s_aux, **options)

    assert torch.autograd.gradcheck(dense, (q, k, v, s_aux) if sinks else (q, k, v))
    cu_q, cu_k = torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.tensor([0, 1, 2, 4], dtype=torch.int32)

    def packed(*inputs: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in inputs[:3])
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 2, s_aux=inputs[3] if sinks else None, **options)

    assert torch.autograd.gradcheck(packed, (q, k, v, s_aux) if sinks else (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    """Computed in float32 or float64, also under autocast, and returned in the input's dtype."""
    q, k, v = (make(2, 6, 2, 8, seed=n).to(dtype) for n in range(3))
    expected = torch.stack([by_hand(q[b], k[b], v[b], causal=True) for b in range(2)])
    half = torch.finfo(dtype).bits == 16
    tolerance = 2 * torch.finfo(dtype).eps if half else 1e-5 if dtype == torch.float32 else 1e-12
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = flash_attn_func(q, k, v, causal=True)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_contiguous(dtype: torch.dtype) -> None:
    """FlashAttention's are contiguous, and some models call ``view()`` on them."""
    q, k = make(2, 6, 4, 8).to(dtype), make(2, 6, 2, 8).to(dtype)
    assert flash_attn_func(q, k, k, causal=True).is_contiguous()
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    q, k = q.flatten(0, 1), k.flatten(0, 1)
    assert flash_attn_varlen_func(q, k, k, offsets, offsets, 7, 7, causal=True).is_contiguous()


def test_large_scores() -> None:
    q = torch.full((1, 4, 1, 4), 1e4)
    v = make(1, 4, 1, 4).float()
    out = flash_attn_func(q, q, v, causal=True)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:, 3], v.mean(1))


def test_dropout() -> None:
    """Weights are dropped and the rest scaled up, so the mean stays the same."""
    torch.manual_seed(0)
    length, p = 50, 0.3
    q = torch.zeros(200, 1, 1, 1)
    k, v = torch.zeros(200, length, 1, 1), torch.ones(200, length, 1, 1)
    out = flash_attn_func(q, k, v, dropout_p=p)
    # Each output is a mean of `length` weights that are 0 or 1 / (1 - p).
    assert out.mean().item() == pytest.approx(1.0, abs=0.02)
    assert out.std().item() == pytest.approx(math.sqrt(p / (1 - p) / length), rel=0.25)
    counts = out.flatten() * (1 - p) * length
    torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-3)
    torch.manual_seed(1)
    first = flash_attn_func(q, k, v, dropout_p=p)
    assert not torch.equal(first, out)
    torch.manual_seed(1)
    assert torch.equal(first, flash_attn_func(q, k, v, dropout_p=p))
    torch.testing.assert_close(flash_attn_func(q, k, v, dropout_p=0.0), torch.ones_like(out))
    packed = flash_attn_varlen_func(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        torch.arange(201, dtype=torch.int32),
        torch.arange(0, 201 * length, length, dtype=torch.int32),
        1,
        length,
        dropout_p=p,
    )
    assert packed.mean().item() == pytest.approx(1.0, abs=0.02)


def test_dropout_leaves_the_sink_its_share() -> None:
    torch.manual_seed(0)
    zeros, ones = torch.zeros(4000, 1, 1, 1), torch.ones(4000, 1, 1, 1)
    out = flash_attn_func(zeros, zeros, ones, dropout_p=0.5, s_aux=torch.zeros(1))
    assert set(out.flatten().tolist()) == {0.0, 1.0}
    assert out.mean().item() == pytest.approx(0.5, abs=0.05)


def test_inputs_are_left_as_they_were() -> None:
    q, k, v, sinks = make(1, 4, 4, 4, seed=1), make(1, 4, 2, 4, seed=2), make(1, 4, 2, 4, seed=3), make(4)
    before = [x.clone() for x in (q, k, v, sinks)]
    flash_attn_func(q, k, v, causal=True, window_size=(1, 0), softcap=2.0, s_aux=sinks)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, sinks), before, strict=True))


@pytest.mark.parametrize("through", ["the functions", "the kernel"])
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_torch_compile(backend: str, through: str) -> None:
    """In one graph, forward and backward."""
    functions: Any
    if through == "the kernel":
        functions = known_kernels()["flash_attention_reference"].load()
        dense, varlen = functions.flash_attn_func, functions.flash_attn_varlen_func
    else:
        dense, varlen = flash_attn_func, flash_attn_varlen_func
    options = {"causal": True, "window_size": (3, 0), "softcap": 4.0}
    cu = torch.tensor([0, 2, 2, 6], dtype=torch.int32)

    def compute(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        one = dense(q, k, v, s_aux=sinks, **options)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        two = varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4, max_seqlen_k=4, s_aux=sinks, **options)
        return one.flatten(0, 1) + two

    def run(function: Any) -> list[Tensor]:
        shapes = ((1, 6, 4, 4), (1, 6, 2, 4), (1, 6, 2, 4), (4,))
        inputs = [make(*shape, seed=n).float().requires_grad_() for n, shape in enumerate(shapes)]
        out = function(*inputs)
        out.square().sum().backward()
        return [out, *(x.grad for x in inputs if x.grad is not None)]

    compiled = torch.compile(compute, fullgraph=True, backend=backend)
    expected, found = run(compute), run(compiled)
    assert len(expected) == len(found) == 5
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
