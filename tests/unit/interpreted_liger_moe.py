"""liger-kernel's fused mixture of experts under Triton's interpreter; run by test_ops_moe.py in a process of its own."""

from __future__ import annotations

import interpreter  # noqa: F401  # repaired
import pytest
import torch

from kernel_compat import UnsupportedFeatureError
from kernel_compat.ops.kernels import liger
from kernel_compat.ops.recognisers.experts import Experts, reference


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """With ids of no expert's, and an expert that nobody chooses."""
    torch.manual_seed(0)
    index = torch.tensor([[0, 1, 4], [5, 2, 0], [6, -1, 6], [4, 5, 1], [2, 6, 0]])
    sizes = ((5, 32), (5, 3), (6, 2 * 48, 32), (6, 32, 48))
    x, weights, gate_up, down = (torch.randn(size, dtype=dtype).div(4).requires_grad_() for size in sizes)
    return x, index, weights, gate_up, down


def test_forward_and_every_gradient() -> None:
    kernel, formula = liger.experts(), Experts("", "", ())
    results = []
    for call in (kernel, lambda *given: reference(formula, *given)):
        given = inputs(torch.float32)
        result = call(*given)
        result.backward(torch.randn(5, 32, generator=torch.Generator().manual_seed(1)))
        results.append([result.detach(), *(one.grad for one in given if one.requires_grad)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert results[0][2][2].eq(0).all()


def test_float64_is_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="float64"):
        liger.experts()(*inputs(torch.float64))
