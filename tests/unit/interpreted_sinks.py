"""Sinks in Triton under Triton's interpreter: test_sinks.py runs this file where TRITON_INTERPRET is set."""

from __future__ import annotations

import interpreter  # noqa: F401  # repaired
import pytest
import torch
from torch import Tensor

from kernel_compat.kernels import sinks, triton_sinks

SHAPES = [(7, 3, 8), (130, 2, 24), (2, 65, 4, 16), (0, 2, 8)]


def given(shape: tuple[int, ...], transposed: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads, of_lse = shape[-2], (shape[1], shape[0]) if len(shape) == 3 else (shape[0], shape[2], shape[1])
    if transposed:  # as a kernel gives for queries that are a view
        out, grad = (
            torch.randn(*shape[:-3], heads, shape[-3], shape[-1], generator=generator).transpose(-3, -2) for _ in "12"
        )
    else:
        out, grad = (torch.randn(shape, generator=generator) for _ in "12")
    return [out, grad, 3 * torch.randn(of_lse, generator=generator), 3 * torch.randn(heads, generator=generator)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape: tuple[int, ...], dtype: torch.dtype, transposed: bool) -> None:
    out, _, lse, s = given(shape, transposed)
    out = out.to(dtype)
    if lse.numel():
        lse.view(-1)[:2] = torch.tensor([torch.inf, -torch.inf])
    expected = sinks.with_sinks(out.clone(), lse.clone(), s)
    found = triton_sinks.add_sinks(out, lse, s)
    assert found[0] is out  # in place
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_whose_rounding_hides_the_sink(dtype: torch.dtype) -> None:
    """They are as they were: of every value of a binade, and of shares of the sink around the limit."""
    eps = torch.finfo(dtype).eps
    shares = eps / 4 * torch.tensor([1e-3, 0.5, 0.9, 0.99, 0.999, 1.1, 2.0, 100.0])
    lse = ((1 - shares) / shares).log()[None]  # a sink of 0 has a share of 1 / (1 + exp(lse))
    values = torch.arange(1, 2, eps)
    values = torch.cat([values, -values, torch.tensor([0.0, torch.finfo(dtype).smallest_normal])]).to(dtype)
    out = values.repeat(len(shares), 1, 1)
    exact = (out.double() * (1 - shares.double()[:, None, None])).to(dtype)
    found, _ = triton_sinks.add_sinks(out.clone(), lse, torch.zeros(1))
    torch.testing.assert_close(found, exact, rtol=eps, atol=0)
    same = (found == out).all(-1).flatten().tolist()
    assert same == (exact == out).all(-1).flatten().tolist() == [True] * 5 + [False] * 3


def test_a_sink_of_minus_infinity() -> None:
    out, lse = torch.zeros(2, 1, 4), torch.tensor([[torch.inf, 1.0]])
    found, total = triton_sinks.add_sinks(out, lse, torch.tensor([-torch.inf]))
    assert not found.any()
    torch.testing.assert_close(total, torch.tensor([[-torch.inf, 1.0]]))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward(shape: tuple[int, ...], transposed: bool) -> None:
    out, grad, lse, s = given(shape, transposed)
    if out.numel():  # left unwritten by the kernel, and without a gradient
        out[..., -1, :, :] = torch.nan
        lse[..., -1] = torch.nan
        grad[..., -1, :, :] = 0
    expected = sinks._gradient_of_sinks(grad.double(), out.double(), lse.double(), s.double())
    found = triton_sinks.gradient_of_sinks(grad, out, lse, s)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
