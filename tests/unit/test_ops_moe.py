"""The kernels for mixtures of experts, without the devices that they are for: what they compose, and of what."""

from __future__ import annotations

import inspect
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from kernel_compat import Device, Environment, KernelUnavailableError, UnsupportedFeatureError, ops
from kernel_compat.ops import registry
from kernel_compat.ops.kernels import quack_moe, routing
from kernel_compat.ops.recognisers.experts import Experts, reference


def plain(*given: Any) -> Tensor:
    return reference(Experts("", "", ()), *given)


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


def kernel_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """With an expert that nobody chooses, and ids of other ranks'."""
    torch.manual_seed(0)
    index = torch.tensor([[0, 1, 4], [5, 2, 0], [6, 6, 6], [4, 5, 1], [2, 6, 0], [1, 0, 2], [0, 2, 6]])
    sizes = ((7, 16), (7, 3), (6, 2 * 24, 16), (6, 16, 24))
    x, weights, gate_up, down = (torch.randn(size).bfloat16().to(dtype).requires_grad_() for size in sizes)
    return x, index, weights, gate_up, down


def kernel_gradients(kernel: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
    given = kernel_inputs(dtype)
    result = kernel(*given)
    leaves = [one for one in given if one.requires_grad]
    found = torch.autograd.grad((result * torch.randn(result.shape).bfloat16().to(dtype)).sum(), leaves)
    return [result.detach(), *found]


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
    """What quack's ``gemm`` says that it computes, and asks of its matrices; what it doesn't write is no number."""
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
    """The composition, with products as quack describes its own."""

    def kernel(*given: Any) -> Tensor:
        if transposed:
            given = (*given[:3], given[3].mT.contiguous().mT, given[4].mT.contiguous().mT)
        return quack_moe.SwiGluExperts.apply(grouped_product, *given)

    found, expected = kernel_gradients(kernel, torch.float64), kernel_gradients(plain, torch.float64)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)  # the weights' gradient is added up in float32


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


def test_quack_refuses_what_its_products_do_not_take() -> None:
    x = torch.zeros(2, 16)
    with pytest.raises(UnsupportedFeatureError, match="float32"):
        quack_moe._require(x, torch.zeros(2, 16, 24))
    with pytest.raises(UnsupportedFeatureError, match="16 and 20"):
        quack_moe._require(x.bfloat16(), torch.zeros(2, 16, 20))


#: Of torch_npu 2.11.0.
SCHEMAS = (
    "npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False) -> (Tensor, Tensor)",
    "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, bool padded_mode=False, "
    "int[]? restore_shape=None) -> Tensor",
    "npu_swiglu(Tensor self, int dim=-1) -> Tensor",
    "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? offset=None, "
    "Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, "
    "Tensor? group_list=None, Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, "
    "Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type=None, int? group_list_type=0, "
    "int? act_type=0, int[]? tuning_config=None, int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, "
    "int? scale_dtype=None, int? per_token_scale_dtype=None) -> Tensor[]",
)


def _permute(tokens: Tensor, indices: Tensor, num_out_tokens: Any = None, padded_mode: bool = False) -> Any:
    assert tokens.dtype == torch.bfloat16
    assert indices.dtype == torch.int64
    order = indices.flatten().argsort(stable=True)
    return tokens[order // indices.shape[1]], order.argsort().int()


def _unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Any = None,
    padded_mode: bool = False,
    restore_shape: Any = None,
) -> Tensor:
    assert permuted_tokens.dtype == probs.dtype == torch.bfloat16
    return (permuted_tokens[sorted_indices.long()].view(*probs.shape, -1) * probs.unsqueeze(-1)).sum(1)


def _swiglu(self: Tensor, dim: int = -1) -> Tensor:
    gate, up = self.chunk(2, dim=dim)
    return silu(gate) * up


def _grouped(x: list[Tensor], weight: list[Tensor], **options: Any) -> list[Tensor]:
    assert options["group_list_type"] == 1
    assert options["split_item"] in (2, 3)
    bounds = [0, *options["group_list"].cumsum(0).tolist()]
    groups = list(itertools.pairwise(bounds))
    ((a,), (b,)) = x, weight
    if options["group_type"] == 2:
        return [torch.stack([a[:, i:j] @ b[i:j] for i, j in groups])]
    assert options["group_type"] == 0
    return [torch.cat([a[i:j] @ one for (i, j), one in zip(groups, b, strict=True)])]


def recorded(schema: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes what a schema says, and no gradient passes: torch_npu has no backward for the product."""
    arguments = torch._C.parse_schema(schema).arguments
    signature = inspect.Signature(
        [
            inspect.Parameter(
                one.name,
                inspect.Parameter.KEYWORD_ONLY if one.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=one.default_value if one.has_default_value() else inspect.Parameter.empty,
            )
            for one in arguments
        ]
    )
    lists = {one.name for one in arguments if str(one.type) == "List[Tensor]"}

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        assert all(isinstance(value, list) == (name in lists) for name, value in bound.arguments.items())
        bound.apply_defaults()
        with torch.set_grad_enabled(function is not _grouped):
            return function(**bound.arguments)

    return call


def test_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the signatures that torch_npu has, and what its documentation says they compute."""
    functions = (_permute, _unpermute, _swiglu, _grouped)
    module = {s.partition("(")[0]: recorded(s, f) for s, f in zip(SCHEMAS, functions, strict=True)}
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(**module))  # type: ignore[arg-type]
    (spec,) = (spec for spec in registry.registered_kernels("moe") if spec.name == "fused_npu")

    found, expected = kernel_gradients(spec.load(), torch.bfloat16), kernel_gradients(plain, torch.float64)

    for one, other in zip(found, expected, strict=True):
        # Three products of bfloat16, each rounded to one part in 256.
        assert (one - other).norm() / other.norm() < 3 / 256
    with pytest.raises(UnsupportedFeatureError, match="It takes bfloat16"):
        spec.load()(*kernel_inputs(torch.float32))


def test_liger() -> None:
    """liger-kernel's own kernels by Triton's interpreter, in a process of its own."""
    pytest.importorskip("liger_kernel.ops.fused_moe", reason="liger-kernel 0.8 has it", exc_type=ImportError)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/interpreted_liger_moe.py"],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "LIGER_FUSED_MOE_AUTOTUNE": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
