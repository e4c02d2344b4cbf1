"""The Triton kernels under Triton's interpreter: test_ops_triton.py runs this file where TRITON_INTERPRET is set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import interpreter  # noqa: F401  # repaired
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernel_compat.errors import UnsupportedFeatureError
from kernel_compat_ops.kernels import triton_load_balancing, triton_rms_norm, triton_rotary
from kernel_compat_ops.kernels.triton_load_balancing import load_balancing_loss
from kernel_compat_ops.kernels.triton_rms_norm import rms_norm
from kernel_compat_ops.kernels.triton_rotary import rotary_pos_emb
from kernel_compat_ops.kernels.triton_swiglu import swiglu_backward

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32)

#: The tests of opcheck to run; the others test autograd, which the operators don't implement.
PROMISES = ("test_schema", "test_faketensor")


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.manual_seed(0)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    # The graph is what is tested; inductor would spend a minute on compiling C++ for it.
    return torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same values with other strides."""
    if layout == "transposed" and values.dim() > 1:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        wide = torch.full((*values.shape[:-1], 2 * values.shape[-1] + 1), torch.nan, dtype=values.dtype)
        wide[..., 1::2] = values
        return wide[..., 1::2]
    return values.contiguous()


def relative(found: Tensor, expected: Tensor) -> float:
    return float(
        (found.detach().double() - expected.detach().double()).norm()
        / expected.detach().double().norm().clamp_min(1e-30)
    )


layouts = st.sampled_from(["contiguous", "transposed", "sliced"])
thorough = settings(max_examples=8, deadline=None)


# SwiGLU


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("shape", [(0, 3), (5,), (2, 3, 700)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_backward(dtype: torch.dtype, shape: tuple[int, ...], layout: str) -> None:
    """The gradients are computed in float32 and rounded once; the inputs are not modified."""
    gate, up, gradient = inputs = [laid_out(torch.randn(shape).to(dtype), layout) for _ in range(3)]
    before = [x.clone() for x in inputs]

    found = swiglu_backward(gate, up, gradient)

    exact = [x.double().requires_grad_() for x in (gate, up)]
    product = torch.nn.functional.silu(exact[0]) * exact[1]
    expected = torch.autograd.grad(product, exact, gradient.double())
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (gate.shape, dtype)
        torch.testing.assert_close(one, other.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))


# RMSNorm


def eager_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: bool, casting: str) -> Tensor:
    """transformers' formulas: Llama's, Gemma's, and each with the other's weight."""
    wide = x if x.dtype == torch.float64 else x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if casting == "gemma":
        weight = weight.to(wide.dtype)
        return (normal * (1.0 + weight if offset else weight)).to(x.dtype)
    return (1.0 + weight if offset else weight) * normal.to(x.dtype)


every_formula = pytest.mark.parametrize(
    ("offset", "casting"), [(offset, casting) for offset in (False, True) for casting in ("llama", "gemma")]
)


@every_formula
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_eagers_to_the_bit(
    dtype: torch.dtype, weight_dtype: torch.dtype, offset: bool, casting: str
) -> None:
    """Exact for integers, whose sum of squares is the same in any order."""
    x = torch.randint(-9, 10, (4, 256)).to(dtype)
    x[0] = 0
    weight = torch.randn(256).to(weight_dtype)
    found = rms_norm(x, weight, 1e-6, offset=offset, casting=casting)
    expected = eager_rms_norm(x, weight, 1e-6, offset, casting)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@thorough
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    hidden=st.integers(1, 70),
    layout=layouts,
    offset=st.booleans(),
    casting=st.sampled_from(["llama", "gemma"]),
    eps=st.sampled_from([1e-6, 1e-2]),
)
def test_rms_norm_of_any_shape(
    shape: list[int], hidden: int, layout: str, offset: bool, casting: str, eps: float
) -> None:
    x = laid_out(torch.randn(*shape, hidden), layout).requires_grad_()
    weight = laid_out(torch.randn(hidden), layout).requires_grad_()
    found = rms_norm(x, weight, eps, offset=offset, casting=casting)
    exact = (x.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    expected = eager_rms_norm(*exact, eps, offset, casting)
    grad = laid_out(torch.randn(expected.shape), layout)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    grads = torch.autograd.grad(found, (x, weight), grad)
    for ours, true in zip(grads, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), true, rtol=1e-4, atol=1e-5)


@every_formula
@pytest.mark.parametrize("dtype", HALVES)
def test_rms_norm_gradients_are_rounded_once(dtype: torch.dtype, offset: bool, casting: str) -> None:
    x = torch.randn(5, 300).to(dtype).requires_grad_()
    weight = torch.randn(300).to(dtype).requires_grad_()
    grad = torch.randn(5, 300).to(dtype)
    found = torch.autograd.grad(rms_norm(x, weight, 1e-6, offset=offset, casting=casting), (x, weight), grad)
    exact = (x.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    expected = torch.autograd.grad(eager_rms_norm(*exact, 1e-6, offset, casting), exact, grad.double())
    for ours, true in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert relative(ours, true) < torch.finfo(dtype).eps / 2


@every_formula
@pytest.mark.parametrize("dtype", HALVES)
def test_rms_norm_weight_gradient_of_a_row_is_eagers_to_the_bit(dtype: torch.dtype, offset: bool, casting: str) -> None:
    """The output's gradient times the normalized input, which is rounded where the forward rounds it."""
    x, weight = torch.randint(-9, 10, (1, 64)).to(dtype), torch.randn(64, requires_grad=True)
    outs = (
        norm(x, weight)
        for norm in (
            lambda x, weight: rms_norm(x, weight, 1e-6, offset=offset, casting=casting),
            lambda x, weight: eager_rms_norm(x, weight, 1e-6, offset, casting),
        )
    )
    grad = torch.randn(1, 64)
    found, expected = (torch.autograd.grad(out, weight, grad.to(out.dtype))[0] for out in outs)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_of_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, grad = torch.randn(2, 11, 77).to(dtype)
    weight = torch.randn(77).to(dtype)

    def run(rows: slice, layout: str) -> tuple[Tensor, Tensor]:
        given = laid_out(x[rows], layout).requires_grad_()
        out = rms_norm(given, weight, 1e-6, offset=False, casting="llama")
        return out, torch.autograd.grad(out, given, grad[rows])[0]

    out, grad_x = run(slice(None), "contiguous")
    for rows in (slice(0, 1), slice(3, 10)):
        for layout in ("contiguous", "transposed", "sliced"):
            one, grad_one = run(rows, layout)
            assert torch.equal(one, out[rows])
            assert torch.equal(grad_one, grad_x[rows])


@pytest.mark.parametrize("rows", [1, 6, 17])
def test_rms_norm_shares_rows_out(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Each program processes several rows, the last one fewer."""
    monkeypatch.setattr(triton_rms_norm, "_WARPS", 4)
    x, weight = torch.randn(rows, 33, requires_grad=True), torch.randn(33, requires_grad=True)
    grad = torch.randn(rows, 33)
    found = torch.autograd.grad(rms_norm(x, weight, 1e-6, offset=False, casting="llama"), (x, weight), grad)
    expected = torch.autograd.grad(eager_rms_norm(x, weight, 1e-6, False, "llama"), (x, weight), grad)
    torch.testing.assert_close(found, expected)


def test_rms_norm_in_a_graph() -> None:
    x, weight = torch.randn(3, 5, 12, requires_grad=True), torch.randn(12, requires_grad=True)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x * 2, weight, 1e-6, offset=True, casting="gemma").sin().sum()

    expected, found = function(x, weight), compiled(function)(x, weight)
    assert torch.equal(found, expected)
    for ours, eager in zip(
        torch.autograd.grad(found, (x, weight)), torch.autograd.grad(expected, (x, weight)), strict=True
    ):
        assert torch.equal(ours, eager)


def test_rms_norm_operators() -> None:
    """The results have the shapes, dtypes and strides that the fake implementations return."""
    x, weight = torch.randn(4, 3, 10).bfloat16().transpose(0, 1), torch.randn(10)
    torch.library.opcheck(triton_rms_norm._forward_op, (x, weight, 1e-6, True, False), test_utils=PROMISES)
    out, rstd = triton_rms_norm._forward(x, weight, 1e-6, True, False)
    torch.library.opcheck(triton_rms_norm._backward_op, (out, x, weight, rstd, True, False), test_utils=PROMISES)
    empty = rms_norm(x.to("meta"), weight.to("meta"), 1e-6, offset=True, casting="llama")
    assert (empty.shape, empty.dtype, empty.device.type) == (x.shape, torch.float32, "meta")


def test_rms_norm_has_no_second_derivative() -> None:
    x, weight = torch.randn(2, 4, requires_grad=True), torch.randn(4)
    normed = rms_norm(x, weight, 1e-6, offset=False, casting="llama")
    for loss in (normed.sum(), normed.square().sum()):
        with pytest.raises(RuntimeError, match="rms_norm_implementation='triton' has no second derivative"):
            torch.autograd.grad(loss, x, create_graph=True, retain_graph=True)


@pytest.mark.parametrize(
    ("x", "weight", "casting", "error", "match"),
    [
        (torch.ones(2, 4), torch.ones(4), "none", UnsupportedFeatureError, "casting 'none'"),
        (torch.ones(2, 4), torch.ones(4), "Llama", UnsupportedFeatureError, "'Llama'"),
        (torch.ones(2, 4).double(), torch.ones(4), "llama", UnsupportedFeatureError, "float64"),
        (torch.ones(2, 4), torch.ones(4).double(), "llama", UnsupportedFeatureError, "float64"),
        (torch.ones(2, 4), torch.ones(5), "llama", ValueError, r"\(5,\) for hidden_states of \(2, 4\)"),
        (torch.ones(2, 4), torch.ones(2, 4), "llama", ValueError, r"\(2, 4\)"),
        (torch.tensor(1.0), torch.ones(4), "llama", ValueError, r"\(\)"),
        (torch.ones(2, 4), torch.ones(4, device="meta"), "llama", ValueError, "weight is on meta"),
        (torch.ones(1, 65537), torch.ones(65537), "llama", UnsupportedFeatureError, "65537"),
    ],
)
def test_rms_norm_refuses(x: Tensor, weight: Tensor, casting: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        rms_norm(x, weight, 1e-6, offset=False, casting=casting)


def test_rms_norm_of_the_largest() -> None:
    x, weight = torch.randn(2, 65536), torch.randn(65536)
    found = rms_norm(x, weight, 1e-6, offset=False, casting="llama")
    torch.testing.assert_close(found, eager_rms_norm(x, weight, 1e-6, False, "llama"))


# RoPE


def eager_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """transformers' formula."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def both(x: Tensor) -> Iterator[tuple[int, ...]]:
    yield from (tuple(x.shape), x.stride())


@thorough
@given(
    sizes=st.tuples(*[st.integers(0, 3)] * 2, st.integers(1, 5)),
    heads=st.integers(1, 5),
    half=st.integers(1, 9),
    rest=st.integers(0, 9),
    shared=st.booleans(),
    layout=layouts,
    dtype=st.sampled_from(DTYPES),
    cos_dtype=st.sampled_from(DTYPES),
)
def test_rotary_is_eagers_to_the_bit(
    sizes: tuple[int, int, int],
    heads: int,
    half: int,
    rest: int,
    shared: bool,
    layout: str,
    dtype: torch.dtype,
    cos_dtype: torch.dtype,
) -> None:
    """The gradients are equal too, also for a cos whose two halves differ."""
    batch, length, kv_heads = sizes
    query = laid_out(torch.randn(batch, length, heads, 2 * half + rest).to(dtype), layout).transpose(1, 2)
    key = laid_out(torch.randn(batch, kv_heads, length, 2 * half + rest).to(dtype), layout)
    query.requires_grad_(), key.requires_grad_()
    cos, sin = (laid_out(x.to(cos_dtype), layout) for x in torch.randn(2, 1 if shared else batch, length, 2 * half))
    for x, found in zip((query, key), rotary_pos_emb(query, key, cos, sin), strict=True):
        expected = eager_rotary(x, cos, sin)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
        grad = laid_out(torch.randn(found.shape).to(found.dtype), layout)
        ours, eager = (torch.autograd.grad(out, x, grad)[0] for out in (found, expected))
        assert ours.dtype == dtype
        assert torch.equal(ours, eager)


def test_rotary_keeps_the_layout_and_its_input() -> None:
    query, key = torch.randn(2, 3, 4, 8).transpose(1, 2), torch.randn(2, 4, 3, 8)
    before = query.clone()
    cos, sin = torch.randn(2, 1, 3, 8)
    for found, given_ in zip(rotary_pos_emb(query, key, cos, sin), (query, key), strict=True):
        assert list(both(found)) == list(both(given_))
    assert torch.equal(query, before)


@pytest.mark.parametrize("batch", [1, 2])
def test_rotary_shares_heads_out(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """Several programs per position; one row of angles for the whole batch or one for each sequence."""
    monkeypatch.setattr(triton_rotary, "_TILE", 8)
    query, key = torch.randn(2, 7, 3, 8), torch.randn(2, 1, 3, 8)
    cos, sin = torch.randn(2, batch, 3, 6)
    for found, x in zip(rotary_pos_emb(query, key, cos, sin), (query, key), strict=True):
        assert torch.equal(found, eager_rotary(x, cos, sin))


def test_rotary_in_a_graph() -> None:
    query, key = torch.randn(2, 4, 3, 8, requires_grad=True), torch.randn(2, 2, 3, 8, requires_grad=True)
    cos = torch.randn(2, 3, 6)

    def function(query: Tensor, key: Tensor) -> Tensor:
        a, b = rotary_pos_emb(query * 2, key, cos, cos)
        return a.sin().sum() + b.sin().sum()

    expected, found = function(query, key), compiled(function)(query, key)
    assert torch.equal(found, expected)
    for ours, eager in zip(
        torch.autograd.grad(found, (query, key)), torch.autograd.grad(expected, (query, key)), strict=True
    ):
        assert torch.equal(ours, eager)


def test_rotary_has_a_second_derivative() -> None:
    query, key = torch.randn(1, 2, 3, 8, requires_grad=True), torch.randn(1, 1, 3, 8)
    cos, sin = torch.randn(2, 1, 3, 6)

    def second(rotate: Callable[[Tensor], Tensor]) -> Tensor:
        (grad,) = torch.autograd.grad(rotate(query).pow(3).sum(), query, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), query)[0]

    found = second(lambda x: rotary_pos_emb(x, key, cos, sin)[0])
    torch.testing.assert_close(found, second(lambda x: eager_rotary(x, cos, sin)))


def test_rotary_operator() -> None:
    x, cos = torch.randn(2, 3, 4, 8).bfloat16().transpose(1, 2), torch.randn(1, 3, 6)
    torch.library.opcheck(triton_rotary._rotate_op, (x, cos, cos, torch.float32, True), test_utils=PROMISES)
    meta, _ = rotary_pos_emb(*(t.to("meta") for t in (x, x, cos, cos)))
    assert (meta.shape, meta.dtype) == (x.shape, torch.float32)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"query": torch.ones(1, 2, 3, 8).double()}, UnsupportedFeatureError, "float64"),
        ({"key": torch.ones(1, 2, 3, 8).double()}, UnsupportedFeatureError, "float64"),
        ({"cos": torch.ones(1, 3, 6, requires_grad=True)}, UnsupportedFeatureError, "gradients for cos and sin"),
        ({"sin": torch.ones(1, 3, 6, requires_grad=True)}, UnsupportedFeatureError, "gradients for cos and sin"),
        ({"sin": torch.ones(1, 3, 6).half()}, ValueError, "float16"),
        ({"sin": torch.ones(1, 3, 4)}, ValueError, r"\(1, 3, 4\)"),
        ({"cos": torch.ones(3, 6), "sin": torch.ones(3, 6)}, ValueError, r"\(3, 6\)"),
        ({"cos": torch.ones(1, 3, 5), "sin": torch.ones(1, 3, 5)}, ValueError, "even"),
        ({"cos": torch.ones(1, 3, 10), "sin": torch.ones(1, 3, 10)}, ValueError, r"query .* \(1, 3, 10\)"),
        ({"cos": torch.ones(2, 3, 6), "sin": torch.ones(2, 3, 6)}, ValueError, r"query .* \(2, 3, 6\)"),
        ({"key": torch.ones(1, 2, 4, 8)}, ValueError, r"key of shape \(1, 2, 4, 8\)"),
        ({"query": torch.ones(2, 3, 8)}, ValueError, r"query of shape \(2, 3, 8\)"),
        ({"sin": torch.ones(1, 3, 6, device="meta")}, ValueError, "sin on meta"),
    ],
)
def test_rotary_refuses(change: dict[str, Tensor], error: type[Exception], match: str) -> None:
    inputs = {"query": torch.ones(1, 2, 3, 8), "key": torch.ones(1, 1, 3, 8)}
    inputs |= {"cos": torch.ones(1, 3, 6), "sin": torch.ones(1, 3, 6)}
    with pytest.raises(error, match=match):
        rotary_pos_emb(**(inputs | change))


def test_rotary_of_angles_that_would_need_a_gradient() -> None:
    """Accepted where no gradient is computed."""
    with torch.no_grad():
        angle = torch.ones(1, 3, 6, requires_grad=True)
        rotary_pos_emb(torch.ones(1, 2, 3, 8), torch.ones(1, 1, 3, 8), angle, angle)


# The load-balancing loss


def exact_loss(logits: tuple[Tensor, ...], top_k: int, mask: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """The formula in float64, with probabilities rounded to `dtype`. Of equal probabilities the first is chosen."""
    weights = [torch.ones(len(layer)) if mask is None else mask.reshape(-1) for layer in logits]
    weight = torch.cat(weights).double()[:, None]
    probability = torch.cat([layer.double() for layer in logits]).softmax(-1)
    if dtype is not None:
        probability = probability + (probability.to(dtype) - probability).detach()
    chosen = probability.sort(descending=True, stable=True).indices[:, :top_k]
    routed = torch.zeros_like(probability).scatter_(1, chosen, 1.0)
    shares = ((x * weight).sum(0) / weight.sum() for x in (routed, probability))
    return (next(shares) * next(shares)).sum() * probability.shape[1]


def distinct(rows: int, experts: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits whose probabilities still differ after rounding."""
    step = 8.0 / experts if dtype == torch.float32 else 0.05
    return (torch.rand(rows, experts).argsort(-1) * step).to(dtype)


@thorough
@given(
    rows=st.tuples(st.integers(1, 2), st.integers(1, 7)),
    layers=st.integers(1, 2),
    experts=st.integers(1, 9),
    data=st.data(),
    masked=st.sampled_from(["no mask", "int64", "bool", "float32", "bfloat16"]),
    layout=layouts,
    tile=st.sampled_from([32, 2048]),
)
def test_load_balancing_of_any_shape(
    rows: tuple[int, int], layers: int, experts: int, data: st.DataObject, masked: str, layout: str, tile: int
) -> None:
    top_k = data.draw(st.integers(1, experts))
    mask = None if masked == "no mask" else (torch.rand(rows) > 0.4).to(getattr(torch, masked))
    if mask is not None:
        mask[0, 0] = 1
        if mask.is_floating_point():
            mask *= 0.75  # a token may count for less than one
    logits = tuple(laid_out(distinct(rows[0] * rows[1], experts), layout).requires_grad_() for _ in range(layers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_load_balancing, "_TILE", tile)
        patch.setattr(triton_load_balancing, "_PROGRAMS", 2)
        found = load_balancing_loss(logits, experts, top_k, mask)
        assert isinstance(found, Tensor)
        assert (found.dtype, found.shape) == (torch.float32, ())
        grads = torch.autograd.grad(found * 3, logits)
    expected = exact_loss(logits, top_k, mask)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    for ours, true in zip(grads, torch.autograd.grad(expected * 3, logits), strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(60, 4), (7, 7)])
@pytest.mark.parametrize("dtype", HALVES)
def test_load_balancing_in_half_precision(dtype: torch.dtype, experts: int, top_k: int, masked: bool) -> None:
    """The forward uses rounded probabilities; the gradient is rounded once."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]) if masked else None
    logits = tuple(distinct(10, experts, dtype).requires_grad_() for _ in range(3))
    found = load_balancing_loss(logits, experts, top_k, mask)
    assert isinstance(found, Tensor)
    assert relative(found, exact_loss(logits, top_k, mask, dtype)) < 1e-6
    if top_k == experts:  # the loss is a constant
        return
    exact = [layer.detach().double().requires_grad_() for layer in logits]
    expected = torch.autograd.grad(exact_loss(tuple(exact), top_k, mask) * 1000, exact)
    for ours, true in zip(torch.autograd.grad(found * 1000, logits), expected, strict=True):
        assert ours.dtype == dtype
        assert relative(ours, true) < torch.finfo(dtype).eps


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_load_balancing_is_upstreams(dtype: torch.dtype, masked: bool) -> None:
    """Compared with the installed release, which rounds each expert's mean until 5.15, and always the gradients."""
    module = pytest.importorskip("transformers.models.mixtral.modeling_mixtral", exc_type=ImportError)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]) if masked else None
    logits = tuple(distinct(10, 60, dtype).requires_grad_() for _ in range(2))
    found = load_balancing_loss(logits, 60, 4, mask)
    expected = module.load_balancing_loss_func(logits, 60, 4, mask)
    assert isinstance(found, Tensor)
    assert found.dtype == expected.dtype
    assert relative(found, expected) < (1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)
    grads = torch.autograd.grad(found * 1000, logits)
    for ours, theirs in zip(grads, torch.autograd.grad(expected * 1000, logits), strict=True):
        assert relative(ours, theirs) < (1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps)


def test_load_balancing_of_equal_probabilities() -> None:
    """Of equal probabilities the first are chosen, as torch.topk does on CUDA."""
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]] * 3)
    found = load_balancing_loss((logits,), 6, 2)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found.double(), exact_loss((logits,), 2, None))
    # The probabilities differ in float32; in bfloat16 all but the first expert's are equal.
    half = torch.tensor([[1.0, 0.0, 0.0009765625, -0.0009765625]]).bfloat16()
    assert len(set(half.softmax(-1).flatten().tolist())) == 2
    _, slope = triton_load_balancing._forward([half], None, 2, True)
    assert slope.tolist() == [4.0, 4.0, 0.0, 0.0]
    _, slope = triton_load_balancing._forward([half], None, 2, False)
    assert slope.tolist() == [4.0, 0.0, 4.0, 0.0]


def test_load_balancing_of_layers_of_different_lengths() -> None:
    logits = (distinct(3, 5), distinct(8, 5), distinct(0, 5))
    found = load_balancing_loss(logits, 5, 2)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found.double(), exact_loss(logits, 2, None), rtol=1e-5, atol=0)


@pytest.mark.parametrize("mask", [torch.zeros(2, 3), None], ids=["all padding", "no tokens"])
def test_load_balancing_of_nothing_is_nan(mask: Tensor | None) -> None:
    """Upstream's loss is nan as well: it takes the mean of an empty tensor."""
    found = load_balancing_loss((distinct(0 if mask is None else 6, 5).requires_grad_(),), 5, 2, mask)
    assert isinstance(found, Tensor)
    assert found.isnan()
    found.backward()


@pytest.mark.parametrize("given_", [None, torch.ones(3, 4), [torch.ones(3, 4)]], ids=["none", "tensor", "list"])
def test_load_balancing_of_no_tuple_is_zero(given_: Any) -> None:
    assert load_balancing_loss(given_, 4) == 0


def test_load_balancing_in_a_graph() -> None:
    logits = tuple(distinct(6, 5).requires_grad_() for _ in range(2))
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])

    def function(logits: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
        loss = load_balancing_loss((logits[0] * 2, logits[1]), 5, 2, mask)
        assert isinstance(loss, Tensor)
        return loss.exp()

    for given_ in (mask, None):
        expected, found = function(logits, given_), compiled(function)(logits, given_)
        assert torch.equal(found, expected)
        for ours, eager in zip(torch.autograd.grad(found, logits), torch.autograd.grad(expected, logits), strict=True):
            assert torch.equal(ours, eager)


def test_load_balancing_operators() -> None:
    logits, mask = [distinct(6, 5).bfloat16(), distinct(6, 5).bfloat16().t().contiguous().t()], torch.ones(6)
    torch.library.opcheck(triton_load_balancing._forward_op, (logits, mask, 2, True), test_utils=PROMISES)
    loss, slope = triton_load_balancing._forward(logits, mask, 2, True)
    torch.library.opcheck(triton_load_balancing._backward_op, (loss, logits, mask, slope), test_utils=PROMISES)
    meta = load_balancing_loss(tuple(layer.to("meta") for layer in logits), 5, 2, mask)
    assert isinstance(meta, Tensor)
    assert meta.is_meta


def test_load_balancing_has_no_second_derivative() -> None:
    logits = distinct(6, 5).requires_grad_()
    loss = load_balancing_loss((logits,), 5, 2)
    assert isinstance(loss, Tensor)
    with pytest.raises(RuntimeError, match="load_balancing_loss_implementation='triton' has no second derivative"):
        torch.autograd.grad(loss, logits, create_graph=True)


@pytest.mark.parametrize(
    ("logits", "experts", "top_k", "mask", "error", "match"),
    [
        ((), 4, 2, None, ValueError, "no layer"),
        ((torch.ones(3, 4).double(),), 4, 2, None, UnsupportedFeatureError, "float64"),
        ((torch.ones(3, 4),), 5, 2, None, ValueError, r"\(3, 4\), not \(batch \* length, 5\)"),
        ((torch.ones(3, 4),), None, 2, None, ValueError, "None"),
        ((torch.ones(3, 4), torch.ones(3, 5)), 4, 2, None, ValueError, r"\(3, 5\)"),
        ((torch.ones(1, 3, 4),), 4, 2, None, ValueError, r"\(1, 3, 4\)"),
        ((torch.ones(3, 4),), 4, 5, None, ValueError, "top_k is 5 of 4"),
        ((torch.ones(3, 4),), 4, 0, None, ValueError, "top_k is 0"),
        ((torch.ones(3, 4),), 4, 2, torch.ones(2, 3), ValueError, r"\(2, 3\) for 3 tokens"),
        ((torch.ones(3, 4),), 4, 2, torch.ones(1, 3, requires_grad=True), UnsupportedFeatureError, "attention_mask"),
    ],
)
def test_load_balancing_refuses(
    logits: Any, experts: int, top_k: int, mask: Tensor | None, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        load_balancing_loss(logits, experts, top_k, mask)
