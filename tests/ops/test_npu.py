"""The kernels for NPUs, which never ran on one: their calls match the schemas that torch_npu publishes.

The schemas are defined as custom operators of torch, whose dispatcher checks the names, order and types of each call's
arguments. The implementations here follow torch_npu's docstrings, so the kernels' own arithmetic is tested too.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mixtures import kernel_gradients, kernel_inputs, plain
from torch import Tensor
from torch.nn.functional import silu

from kernel_compat import Environment, KernelUnavailableError, UnsupportedFeatureError, ops
from kernel_compat_ops.kernels import npu
from kernel_compat_ops.kernels.chunk_loss import chunk_loss
from kernel_compat_ops.recognisers import norms, rotary

#: From csrc/aten/npu_native_functions_by_codegen.yaml of torch-npu 2.14.0.
SCHEMAS = (
    "npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_rotary_mul(Tensor self, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
    "npu_swiglu(Tensor self, int dim=-1) -> Tensor",
    "npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False) -> (Tensor, Tensor)",
    "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, bool padded_mode=False, "
    "int[]? restore_shape=None) -> Tensor",
    "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? offset=None, "
    "Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, "
    "Tensor? group_list=None, Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, "
    "Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type=None, int? group_list_type=0, "
    "int? act_type=0, int[]? tuning_config=None, int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, "
    "int? scale_dtype=None, int? per_token_scale_dtype=None) -> Tensor[]",
)


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    assert self.dtype == gamma.dtype
    scale = torch.rsqrt(self.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (self.float() * scale * gamma.float()).to(self.dtype), scale


def npu_rotary_mul(self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Any = None) -> Tensor:
    assert self.dim() == r1.dim() == r2.dim() == 4
    assert rotary_mode == "half"
    return r1 * self + r2 * rotary.rotate_half(self)


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    gate, up = self.chunk(2, dim=dim)
    return silu(gate) * up


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: Any = None, padded_mode: bool = False
) -> Any:
    assert tokens.dtype == torch.bfloat16
    assert indices.dtype == torch.int64
    order = indices.flatten().argsort(stable=True)
    return tokens[order // indices.shape[1]], order.argsort().int()


def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Any = None,
    padded_mode: bool = False,
    restore_shape: Any = None,
) -> Tensor:
    assert permuted_tokens.dtype == probs.dtype == torch.bfloat16
    return (permuted_tokens[sorted_indices.long()].view(*probs.shape, -1) * probs.unsqueeze(-1)).sum(1)


def npu_grouped_matmul(x: list[Tensor], weight: list[Tensor], **options: Any) -> list[Tensor]:
    assert options["group_list_type"] == 1  # sizes of the groups, not their end offsets
    assert options["split_item"] in (2, 3)  # one output tensor
    groups = list(itertools.pairwise([0, *options["group_list"].cumsum(0).tolist()]))
    ((a,), (b,)) = x, weight
    if options["group_type"] == 2:
        return [torch.stack([a[:, i:j] @ b[i:j] for i, j in groups])]
    assert options["group_type"] == 0
    return [torch.cat([a[i:j] @ one for (i, j), one in zip(groups, b, strict=True)])]


@pytest.fixture(autouse=True)
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module with the operators; the operator without a backward in torch_npu has none here either."""
    library = torch.library.Library("published_npu", "DEF")
    functions = {}
    for schema in SCHEMAS:
        name = library.define(schema)
        has_backward = name != "npu_grouped_matmul"
        library.impl(name, globals()[name], "CompositeImplicitAutograd" if has_backward else "CPU")
        functions[name] = getattr(torch.ops.published_npu, name)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(**functions))
    yield
    library._destroy()


def test_the_schemas_are_those_of_the_installed_torch_npu() -> None:
    try:
        files = metadata.files("torch-npu") or []
    except metadata.PackageNotFoundError:
        pytest.skip("torch-npu is not installed")
    (published,) = (file for file in files if file.name == "npu_native_functions_by_codegen.yaml")
    text = published.read_text()
    assert [schema for schema in SCHEMAS if f"func: {schema}\n" not in text] == []


@pytest.mark.parametrize("op", ["rms_norm", "rotary_pos_emb", "cross_entropy_loss"])
def test_they_need_torch_npu_and_say_that_they_never_ran(op: str) -> None:
    asked: dict[str, Any] = {f"{op}_implementation": "npu"}
    with pytest.raises(KernelUnavailableError, match="torch-npu is not installed.*pip install torch-npu"):
        ops.OpsConfig(**asked, environment=Environment(packages={"torch": "2.14.0"}))

    environment = Environment(packages={"torch": "2.14.0", "torch-npu": "2.14.0"})
    assert ops.OpsConfig(**asked, environment=environment)[op] == "npu"
    assert {spec.note for spec in ops.registered_kernels(op) if spec.name == "npu"} == {"never run on hardware"}
    assert "Never run on hardware" in str(npu.__doc__)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize("casting", ["llama", "gemma"])
def test_norms(offset: bool, dtype: torch.dtype, weights: torch.dtype, casting: norms.Casting) -> None:
    x, weight = torch.randn(3, 8).to(dtype), torch.rand(8).to(weights)

    found = npu.rms_norm(offset)(x, weight, 1e-5, casting=casting)
    expected = norms.reference(x, weight, 1e-5, offset, casting)

    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


def test_rotary_embeddings() -> None:
    q, k, cos, sin = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)

    for one, other in zip(npu.rotary_pos_emb()(q, k, cos, sin), rotary.reference(q, k, cos, sin), strict=True):
        torch.testing.assert_close(one, other)


def test_the_loss_is_the_one_in_chunks() -> None:
    assert npu.cross_entropy() is chunk_loss


def test_experts() -> None:
    (spec,) = (spec for spec in ops.registered_kernels("moe") if spec.name == "fused_npu")

    found, expected = kernel_gradients(spec.load(), torch.bfloat16), kernel_gradients(plain, torch.float64)

    for one, other in zip(found, expected, strict=True):
        # Three bfloat16 products, each with a relative rounding error of up to 1/256.
        assert (one - other).norm() / other.norm() < 3 / 256
    with pytest.raises(UnsupportedFeatureError, match="It takes bfloat16"):
        spec.load()(*kernel_inputs(torch.float32))
