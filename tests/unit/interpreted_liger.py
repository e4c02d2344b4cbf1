"""liger-kernel's kernels under Triton's interpreter; test_ops_triton.py runs this file where TRITON_INTERPRET is set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import interpreter  # noqa: F401  # repaired
import pytest
import torch
import triton.language as tl
from liger_kernel import ops
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kernel_compat.models import liger_proof
from kernel_compat.ops.kernels import liger
from kernel_compat.ops.recognisers import norms


def require_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).detach().norm() / other.detach().norm()) < 1e-6


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("factor", [1.0, 0.37])
@pytest.mark.parametrize("trained", ["hidden weight bias", "hidden", "weight", "bias"])
def test_cross_entropy(factor: float, reduction: Literal["mean", "sum"], trained: str) -> None:
    """A head alone is trained, too: without hidden states to differentiate for Liger computes no gradient."""
    torch.manual_seed(0)
    given = {"hidden": torch.randn(10, 16), "weight": torch.randn(37, 16), "bias": torch.randn(37)}
    hidden, weight, bias = given.values()
    leaves = [given[name].requires_grad_() for name in trained.split()]
    labels = torch.randint(37, (10,))
    labels[3] = -100

    def results(loss: Tensor) -> tuple[Tensor, ...]:
        return loss, *torch.autograd.grad(loss * factor, leaves)

    expected = results(functional.cross_entropy(hidden @ weight.T + bias, labels, reduction=reduction))
    require_close(results(liger.cross_entropy()(hidden, weight, labels, bias=bias, reduction=reduction)), expected)


def test_what_hooks_keep_of_what_the_loss_has_saved_stays() -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    def pack(x: Tensor) -> Tensor:
        kept.append((x, x.clone()))
        return x

    hidden, weight = (torch.randn(size, 16, requires_grad=True) for size in (10, 37))
    labels = torch.randint(37, (10,))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found = liger.cross_entropy()(hidden, weight, labels)
    expected = torch.autograd.grad(functional.cross_entropy(hidden @ weight.T, labels) * 3, (hidden, weight))
    require_close(torch.autograd.grad(found * 3, (hidden, weight)), expected)
    assert kept
    assert all(torch.equal(now, then) for now, then in kept)


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
def test_rms_norm(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that goes two ways, too. There is no libdevice, whose root Liger takes."""
    monkeypatch.setattr("liger_kernel.ops.rms_norm.rsqrt", lambda x: 1 / tl.sqrt(x))
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64, requires_grad=True), torch.randn(64, requires_grad=True)

    def results(kernel: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        other = x * 3  # whose backward is the later one
        normed = kernel(x * 2, weight)
        return torch.autograd.grad(((normed + other) if shared else normed * other).square().sum(), (x, weight))

    kernel = liger.rms_norm()
    expected = results(lambda x, weight: norms.reference(x, weight, 1e-6, False, "llama"))
    require_close(results(lambda x, weight: kernel(x, weight, 1e-6, casting="llama")), expected)


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["", "reentrant checkpoints", "checkpoints"])
@pytest.mark.parametrize("saved", [False, True], ids=["", "saved"])
def test_swiglu(saved: bool, checkpointing: bool | None) -> None:
    """Where a regularizer has saved the gate, whose gradient is computed behind the kernel's, too."""

    def results(kernel: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        gate, up = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(8, 16)
        x = torch.randn(2, 3, 8, requires_grad=True)

        def call(x: Tensor) -> Tensor:
            first, second = gate(x), up(x)
            regularizer: Any = first.pow(3).sum() if saved else 0.0
            return kernel(first, second).sin().sum() + regularizer

        loss = call(x) if checkpointing is None else checkpoint(call, x, use_reentrant=checkpointing)
        loss.backward()
        return x.grad, gate.weight.grad, up.weight.grad, up.bias.grad

    require_close(results(liger.swiglu()), results(lambda gate, up: functional.silu(gate) * up))


@pytest.mark.parametrize(
    ("name", "shapes", "options"),
    [
        ("LigerSiLUMulFunction", [(5, 64), (5, 64)], (1.3, 0.7)),
        ("LigerGELUMulFunction", [(5, 64), (5, 64)], ()),
        ("LigerReLUSquaredFunction", [(5, 64)], ()),
        ("LigerLayerNormFunction", [(5, 64), (64,), (64,)], (1e-3,)),
        ("LigerRMSNormFunction", [(5, 64), (64,)], (1e-3, 0.0, "llama", False)),
        ("LigerRMSNormFunction", [(5, 64), (64,)], (1e-3, 1.0, "gemma", False)),
    ],
)
def test_the_formulas_that_forwards_are_proven_by(
    name: str, shapes: list[tuple[int, ...]], options: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("rms_norm", "layer_norm"):
        monkeypatch.setattr(f"liger_kernel.ops.{module}.rsqrt", lambda x: 1 / tl.sqrt(x))
    monkeypatch.setattr("liger_kernel.ops.geglu.tanh", lambda x: 2 / (1 + tl.exp(-2 * x)) - 1)
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    expected = liger_proof._FORMULAS[name].apply(*inputs, *options)
    require_close((getattr(ops, name).apply(*inputs, *options),), (expected,))
