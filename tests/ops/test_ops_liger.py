"""What torch.compile traces instead of Liger's functions: formulas that need no GPU and no interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("liger_kernel")

from kernel_compat_ops.kernels import liger
from kernel_compat_ops.recognisers import norms, rotary

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def require_same(kernel: Callable[..., Any], formula: Callable[..., Any], *inputs: Tensor) -> None:
    """Compare results and gradients to the bit: the compiled function runs the same operations."""

    def step(function: Callable[..., Any]) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        results = out if isinstance(out, tuple) else (out,)
        return *results, *torch.autograd.grad(sum(one.float().square().sum() for one in results), leaves)

    found, expected = step(torch.compile(kernel, backend="aot_eager", fullgraph=True)), step(formula)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@DTYPES
@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
@pytest.mark.parametrize("offset", [False, True], ids=["", "offset"])
def test_rms_norm(offset: bool, casting: norms.Casting, dtype: torch.dtype) -> None:
    kernel = liger.rms_norm(offset)
    require_same(
        lambda x, weight: kernel(x, weight, 1e-6, casting=casting),
        lambda x, weight: norms.reference(x, weight, 1e-6, offset, casting),
        torch.randn(5, 64).to(dtype),
        torch.randn(64),
    )


@DTYPES
def test_layer_norm(dtype: torch.dtype) -> None:
    kernel = liger.layer_norm()
    require_same(
        lambda x, weight, bias: kernel(x, weight, bias, 1e-5),
        lambda x, weight, bias: functional.layer_norm(x.to(weight.dtype), (64,), weight, bias, 1e-5),
        torch.randn(5, 64).to(dtype),
        torch.randn(64),
        torch.randn(64),
    )


@DTYPES
def test_activations(dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, 5, 64).to(dtype)
    require_same(liger.swiglu(), lambda gate, up: functional.silu(gate) * up, gate, up)
    require_same(liger.geglu(), lambda gate, up: functional.gelu(gate, approximate="tanh") * up, gate, up)


@DTYPES
@pytest.mark.parametrize("size", [16, 8], ids=["all channels", "a half of them"])
def test_rotary(size: int, dtype: torch.dtype) -> None:
    """Query and key as projections return them, and as tensors of their own."""
    kernel = liger.rotary()
    cos, sin = torch.randn(2, 2, 5, size // 2).repeat(1, 1, 1, 2).to(dtype)
    query, key = torch.randn(2, 5, 4, 16).transpose(1, 2).to(dtype), torch.randn(2, 2, 5, 16).to(dtype)
    require_same(
        lambda query, key: kernel(query, key, cos, sin),
        lambda query, key: rotary.reference(query, key, cos, sin),
        query,
        key,
    )
