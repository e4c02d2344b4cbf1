"""The composition of the mixture-of-experts kernels, tested without the devices they need."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from mixtures import kernel_gradients, kernel_inputs, plain
from torch import Tensor

from kernel_compat import Device, Environment, KernelUnavailableError, UnsupportedFeatureError, ops
from kernel_compat_ops.kernels import quack_moe, routing


def test_what_they_need() -> None:
    def why(value: str, packages: dict[str, str], *devices: Device) -> str:
        environment = Environment(packages={"torch": "2.11.0", **packages}, devices=devices)
        with pytest.raises(KernelUnavailableError) as error:
            ops.OpsConfig(moe_implementation=value, environment=environment)
        return str(error.value)

    a100, h200 = Device("A100", (8, 0)), Device("H200", (9, 0))
    assert "liger-kernel 0.7.0 is installed, and it needs >=0.8" in why("fused_triton", {"liger-kernel": "0.7.0"}, h200)
    assert "pip install quack-kernels" in why("fused_quack", {}, h200)
    assert "compute capability 9.0 or greater" in why("fused_quack", {"quack-kernels": "0.6.5"}, a100)
    assert "torch-npu is not installed" in why("fused_npu", {}, h200)


def test_routing() -> None:
    index = kernel_inputs(torch.float32)[1]
    token, row, starts = routing.sort(index, 6)
    assert starts.tolist() == [0, 5, 8, 12, 12, 14, 16]
    assert starts.dtype == torch.int32
    assert token[:5].tolist() == [0, 1, 4, 5, 6]
    assert torch.equal(token[row], torch.arange(7)[:, None].expand(7, 3))
    assert index.flatten()[row.flatten().argsort()][: starts[-1]].diff().min() >= 0


def grouped_product(
    a: Tensor, b: Tensor, out: Any = None, cu_seqlens_m: Any = None, cu_seqlens_k: Any = None
) -> Tensor:
    """The result and the requirements that quack documents for ``gemm``; elements that gemm doesn't write are nan."""
    starts = cu_seqlens_m if cu_seqlens_m is not None else cu_seqlens_k
    assert starts.dtype == torch.int32
    groups = list(itertools.pairwise(starts.tolist()))
    if cu_seqlens_k is not None:
        assert a.stride(-2) == b.stride(-1) == 1
        assert a.shape[1] == b.shape[0]
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in groups])
    assert a.stride(-1) == 1
    assert len(b) == len(groups)
    if out is None:
        out = a.new_full((len(a), b.shape[-1]), torch.nan)
    for (i, j), one in zip(groups, b, strict=True):
        out[i:j] = a[i:j] @ one
    return out


@pytest.mark.parametrize("transposed", [False, True])
def test_quack(transposed: bool) -> None:
    """The composition, with matrix products as quack documents them."""

    def kernel(*given: Any) -> Tensor:
        if transposed:
            given = (*given[:3], given[3].mT.contiguous().mT, given[4].mT.contiguous().mT)
        return quack_moe.SwiGluExperts.apply(grouped_product, *given)

    found, expected = kernel_gradients(kernel, torch.float64), kernel_gradients(plain, torch.float64)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)  # the weights' gradients are summed in float32


def test_quack_computes_no_gradient_that_nobody_asks_for() -> None:
    calls = []

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs)
        return grouped_product(*args, **kwargs)

    x, index, weights, gate_up, down = kernel_inputs(torch.float64)
    frozen = gate_up.detach(), down.detach()
    quack_moe.SwiGluExperts.apply(counting, x, index, weights, *frozen).sum().backward()
    assert len(calls) == 4
    assert not any("cu_seqlens_k" in call for call in calls)


def test_torch_compile_does_not_trace_quack(monkeypatch: pytest.MonkeyPatch) -> None:
    def gemm(*args: Any, tuned: bool, **kwargs: Any) -> Tensor:
        return grouped_product(*args, **kwargs)

    interface = ModuleType("quack.gemm_interface")
    interface.gemm = gemm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)
    kernel, inputs = quack_moe.experts(), kernel_inputs(torch.bfloat16)

    def layer(*given: Any) -> Tensor:
        return kernel(*given) * 2

    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(layer, backend="eager", fullgraph=True)(*inputs)
    assert torch.equal(torch.compile(layer, backend="eager")(*inputs), layer(*inputs))


def test_quack_refuses_what_its_products_do_not_take() -> None:
    x = torch.zeros(2, 16)
    with pytest.raises(UnsupportedFeatureError, match="float32"):
        quack_moe._require(x, torch.zeros(2, 16, 24))
    with pytest.raises(UnsupportedFeatureError, match="16 and 20"):
        quack_moe._require(x.bfloat16(), torch.zeros(2, 16, 20))
