"""Chunked cross-entropy against torch's, which computes all logits at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from kernel_compat_ops.kernels import chunk_loss as module
from kernel_compat_ops.kernels.chunk_loss import chunk_loss, chunk_size
from kernel_compat_ops.losses.lazy import Pointwise, applied

#: The pointwise operations on the logits in Gemma 2 and in Cohere.
SOFTCAP = (Pointwise("over", 3.0), Pointwise("tanh"), Pointwise("times", 3.0))
SCALE = (Pointwise("times", 0.25),)


def problem(
    tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype = torch.float64, bias: bool = True
) -> list[Any]:
    generator = torch.Generator().manual_seed(tokens + hidden + vocabulary)
    made = [
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((tokens, hidden), (vocabulary, hidden), (vocabulary,))
    ]
    leaves: list[Any] = [x.to(dtype).requires_grad_() for x in made]
    if not bias:
        leaves[2] = None
    return [*leaves, torch.randint(0, vocabulary, (tokens,), generator=generator)]


def expected(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    reduction: str,
    pointwise: tuple[Pointwise, ...],
    ignore: int,
) -> Tensor:
    logits = linear(x, weight, bias)
    for one in pointwise:
        logits = applied(one, logits)
    return cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, ignore_index=ignore, reduction=reduction
    )


def gradients(loss: Tensor, *leaves: Tensor | None) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None]))


@pytest.mark.parametrize(
    "pointwise", [(), SOFTCAP, SCALE, (Pointwise("to", torch.float32),)], ids=["plain", "softcap", "scale", "to"]
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_are_those_of_all_logits(
    pointwise: tuple[Pointwise, ...], reduction: Any, bias: bool
) -> None:
    x, weight, b, labels = problem(300, 8, 50, bias=bias)
    labels[:40] = -100
    assert chunk_size(8, True) < 300

    found = chunk_loss(x, weight, labels, bias=b, reduction=reduction, pointwise=pointwise) / 7
    wanted = expected(x, weight, b, labels, reduction, pointwise, -100) / 7

    exact = Pointwise("to", torch.float32) not in pointwise
    torch.testing.assert_close(found, wanted, rtol=1e-12 if exact else 1e-6, atol=0, check_dtype=False)
    for one, other in zip(gradients(found, x, weight, b), gradients(wanted, x, weight, b), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10 if exact else 1e-5, atol=1e-14 if exact else 1e-7)


@given(
    tokens=st.integers(0, 400),
    hidden=st.integers(1, 9),
    vocabulary=st.integers(2, 70),
    ignored=st.floats(0, 1),
    ignore=st.sampled_from([-100, 0, 1]),
)
def test_any_shape(tokens: int, hidden: int, vocabulary: int, ignored: float, ignore: int) -> None:
    x, weight, bias, labels = problem(tokens, hidden, vocabulary)
    labels[: int(ignored * tokens)] = ignore

    found = chunk_loss(x, weight, labels, bias=bias, ignore_index=ignore)
    wanted = expected(x, weight, bias, labels, "mean", (), ignore)

    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13, equal_nan=True)  # the mean over no tokens is nan
    for one, other in zip(gradients(found, x, weight, bias), gradients(wanted, x, weight, bias), strict=True):
        if not wanted.isnan():
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_where_a_linear_layer_and_a_float32_loss_do(dtype: torch.dtype) -> None:
    x, weight, bias, labels = problem(300, 16, 40, dtype)

    found = chunk_loss(x, weight, labels, bias=bias)
    wanted = expected(x, weight, bias, labels, "mean", (), -100)

    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    for one, other in zip(gradients(found, x, weight, bias), gradients(wanted, x, weight, bias), strict=True):
        assert one.dtype == other.dtype == dtype
        # The weight's gradient is a sum over three chunks, each of which is rounded.
        torch.testing.assert_close(
            one, other, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps * float(other.abs().max())
        )


def test_what_needs_no_gradient_gets_none() -> None:
    x, weight, bias, labels = problem(20, 8, 30)
    weight.requires_grad_(False)

    (found,) = torch.autograd.grad(chunk_loss(x, weight, labels, bias=bias.detach()), x)
    (wanted,) = torch.autograd.grad(expected(x, weight, bias.detach(), labels, "mean", (), -100), x)

    torch.testing.assert_close(found, wanted)
    with torch.no_grad():
        assert not chunk_loss(x, weight, labels, bias=bias).requires_grad


def test_logits_never_exist_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows.append(x.shape[0])
        return linear(x, weight, bias)

    monkeypatch.setattr(module, "linear", watched)
    x, weight, bias, labels = problem(1000, 4, 64)

    chunk_loss(x, weight, labels, bias=bias).backward()

    assert sum(rows) == 1000
    assert max(rows) == chunk_size(4, True) == 256


def test_a_chunk_takes_about_half_of_what_the_weight_takes() -> None:
    sizes = [chunk_size(hidden, True) for hidden in (64, 1024, 2048, 4096, 16384)]

    assert sizes == [256, 512, 1024, 2048, 2048]
    assert chunk_size(16384, False) == 512


def test_tokens_that_do_not_count_may_be_anything() -> None:
    x, weight, bias, labels = problem(40, 8, 50)
    labels[::3] = -100
    with torch.no_grad():
        x[::3] = torch.nan

    loss = chunk_loss(x, weight, labels, bias=bias)

    counted = labels != -100
    torch.testing.assert_close(loss, cross_entropy(linear(x[counted], weight, bias), labels[counted]))
    assert bias is not None
    for found in torch.autograd.grad(loss, (x, weight, bias)):
        assert found.isfinite().all()


def test_small_gradients_of_likely_tokens_are_not_lost() -> None:
    """bfloat16 can represent 1 - p, about 3e-4, but rounds p to 1."""
    x = torch.tensor([[8.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16)
    labels = torch.tensor([0])

    (found,) = torch.autograd.grad(chunk_loss(x, weight, labels), x)

    assert float(found) == pytest.approx(-math.exp(-8) / (1 + math.exp(-8)), rel=0.01)


def test_autocast_does_as_it_does_to_a_linear_layer() -> None:
    x, weight, bias, labels = problem(200, 16, 40, torch.float32)

    with torch.autocast("cpu", torch.bfloat16):
        found = chunk_loss(x, weight, labels, bias=bias)
        logits = linear(x, weight, bias)
    assert logits.dtype == torch.bfloat16
    wanted = cross_entropy(logits.float(), labels)

    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    for one, other in zip(gradients(found, x, weight, bias), gradients(wanted, x, weight, bias), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * float(other.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_compiles_in_one_graph(reduction: Any) -> None:
    x, weight, bias, labels = problem(150, 8, 20)

    compiled = torch.compile(chunk_loss, fullgraph=True, backend="aot_eager")
    found = compiled(x, weight, labels, bias=bias, reduction=reduction)
    wanted = chunk_loss(x, weight, labels, bias=bias, reduction=reduction)

    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    for one, other in zip(gradients(found, x, weight, bias), gradients(wanted, x, weight, bias), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def test_a_batch_of_which_nothing_counts_has_a_gradient_of_nothing() -> None:
    x, weight, bias, labels = problem(20, 4, 9)

    loss = chunk_loss(x, weight, torch.full_like(labels, -100), bias=bias)

    assert loss.isnan()
    assert all(not gradient.any() for gradient in gradients(loss, x, weight, bias))


def test_a_gradient_of_the_gradient_is_refused() -> None:
    x, weight, bias, labels = problem(20, 4, 9)

    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(chunk_loss(x, weight, labels, bias=bias), x, create_graph=True)


def test_the_factor_of_the_gradients_is_not_rounded_to_half_precision() -> None:
    x, weight, bias, labels = problem(20, 4, 9, torch.bfloat16)

    (once,) = gradients(chunk_loss(x, weight, labels, bias=bias, reduction="sum"), x)
    (scaled,) = gradients(chunk_loss(x, weight, labels, bias=bias, reduction="sum") * (1 + 2**-9), x)

    assert torch.equal(scaled, (once.float() * (1 + 2**-9)).bfloat16())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_float16_holds_gradients_that_a_scaler_multiplies(reduction: Any) -> None:
    x, weight, bias, labels = problem(2000, 16, 40, torch.float16)
    x64, weight64, bias64 = (one.detach().double().requires_grad_() for one in (x, weight, bias))
    factor = 2.0**16 / (1 if reduction == "mean" else 2000)

    found = gradients(chunk_loss(x, weight, labels, bias=bias, reduction=reduction) * factor, x, weight, bias)
    rough = gradients(expected(x, weight, bias, labels, reduction, (), -100) * factor, x, weight, bias)
    true = gradients(expected(x64, weight64, bias64, labels, reduction, (), -100) * factor, x64, weight64, bias64)

    for ours, eager, wanted in zip(found, rough, true, strict=True):
        error = float((ours.double() - wanted).norm() / wanted.norm())
        assert error <= 2 * float((eager.double() - wanted).norm() / wanted.norm())


def test_labels_that_don_t_fit_are_refused() -> None:
    x, weight, _, labels = problem(6, 4, 9)

    with pytest.raises(ValueError, match=r"not \(6, 4\) and \(5,\)"):
        chunk_loss(x, weight, labels[:5])
    labels[2] = 9
    with pytest.raises((IndexError, RuntimeError)):
        chunk_loss(x, weight, labels)


#: Every dtype of torch, but for packed and quantized ones, which have no arithmetic.
DTYPES = [
    *(
        getattr(torch, name)
        for name in ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool")
    ),
    *(torch.float64, torch.float32, torch.bfloat16, torch.complex64),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "average", None])
@pytest.mark.parametrize("ignore", [-100, 1, 255, 156, -1, 2**40, 1.0, True, None, "1", torch.tensor(1)], ids=repr)
def test_labels_and_options_are_taken_as_torch_s_takes_them(dtype: torch.dtype, reduction: Any, ignore: Any) -> None:
    """But for losses of each token, which are refused."""
    x, weight, _, labels = problem(6, 4, 200, bias=False)
    labels = torch.tensor([0, 1, 156, 1, 5, 1] if dtype in (torch.int64, torch.uint8) else [0, 1, 1, 1, 0, 1]).to(dtype)

    try:
        wanted = expected(x, weight, None, labels, reduction, (), ignore)
    except (TypeError, ValueError, RuntimeError):
        wanted = None
    if wanted is None or reduction == "none":
        with pytest.raises((TypeError, ValueError)):
            chunk_loss(x, weight, labels, ignore_index=ignore, reduction=reduction)
        return
    found = chunk_loss(x, weight, labels, ignore_index=ignore, reduction=reduction)

    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    for one, other in zip(gradients(found, x, weight), gradients(wanted, x, weight), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("label", [9, -1, 2**40, -100])
def test_a_label_that_is_no_class_is_refused(label: int) -> None:
    x, weight, _, labels = problem(6, 4, 9)
    labels[2] = label

    with pytest.raises((IndexError, RuntimeError)):
        expected(x, weight, None, labels, "mean", (), -99)
    with pytest.raises((IndexError, RuntimeError)):
        chunk_loss(x, weight, labels, ignore_index=-99)


@pytest.mark.parametrize("shape", [(6, 1), (1, 6), (5,), (), (6, 9)])
def test_labels_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    x, weight, _, _ = problem(6, 4, 9)

    with pytest.raises((ValueError, RuntimeError)):
        expected(x, weight, None, torch.zeros(shape, dtype=torch.long), "mean", (), -100)
    with pytest.raises(ValueError, match="labels"):
        chunk_loss(x, weight, torch.zeros(shape, dtype=torch.long))
