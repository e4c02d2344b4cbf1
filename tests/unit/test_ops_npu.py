"""The values for NPUs, which never ran on one: what they call has the parameters that torch_npu's functions have.

Recorded from the metadata of torch-npu 2.14.0; what the functions compute, from its documentation.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernel_compat import Environment, KernelUnavailableError, ops
from kernel_compat.ops.kernels import npu
from kernel_compat.ops.kernels.chunk_loss import chunk_loss
from kernel_compat.ops.recognisers import norms, rotary

NPU = Environment(packages={"torch": "2.14.0", "torch-npu": "2.14.0"})
VALUES = {"rms_norm": "npu", "rotary_pos_emb": "npu", "cross_entropy_loss": "npu"}


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    assert self.dtype == gamma.dtype
    scale = torch.rsqrt(self.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (self.float() * scale * gamma.float()).to(self.dtype), scale


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    assert input.dim() == r1.dim() == r2.dim() == 4
    assert rotary_mode == "half"
    return r1 * input + r2 * rotary.rotate_half(input)


@pytest.fixture(autouse=True)
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch_npu")
    module.npu_rms_norm = npu_rms_norm  # type: ignore[attr-defined]
    module.npu_rotary_mul = npu_rotary_mul  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", module)


@pytest.mark.parametrize("op", list(VALUES))
def test_they_need_torch_npu_and_say_that_they_never_ran(op: str) -> None:
    field = f"{op}_implementation"
    with pytest.raises(KernelUnavailableError, match="torch-npu is not installed.*pip install torch-npu"):
        ops.OpsConfig(**{field: "npu", "environment": Environment(packages={"torch": "2.14.0"})})

    assert ops.OpsConfig(**{field: "npu", "environment": NPU})[op] == "npu"
    assert {spec.note for spec in ops.registered_kernels(op) if spec.name == "npu"} == {"never run on hardware"}


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
