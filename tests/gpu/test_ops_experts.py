"""The kernels for mixtures of experts in bfloat16, compared with the same inputs in float32 under transformers' eager code.

The bound is twice eager's own error in bfloat16, plus one rounding: a kernel may sum values that it has rounded before.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from synchronization import no_synchronization
from tiny import distance
from torch import Tensor, nn

import kernel_compat_ops as ops
from kernel_compat_ops import registry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.0"),
        reason="experts are modules of their own before transformers 5",
    ),
]

EXPERTS, HIDDEN, INTERMEDIATE = 8, 256, 384
TOKENS, K = 1000, 3


@pytest.fixture(params=["fused_triton", "fused_quack"])
def config(request: pytest.FixtureRequest) -> ops.OpsConfig:
    spec = next(spec for spec in registry.registered_kernels("moe") if spec.name == request.param)
    if reasons := spec.unavailable_because(registry.detect()):
        pytest.skip("; ".join(reasons))
    return ops.OpsConfig(moe_implementation=request.param)


def build(name: str = "mixtral") -> Any:
    """Experts with weights that bfloat16 holds exactly."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    torch.manual_seed(0)
    if name == "mixtral":
        sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS}
        layer = module.MixtralExperts(transformers.MixtralConfig(**sizes))
    else:
        sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "moe_num_experts": EXPERTS}
        layer = module.AriaExperts(transformers.AriaTextConfig(**sizes, num_attention_heads=8))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    layer.config._experts_implementation = "eager"
    return layer.to("cuda", torch.bfloat16).float()


def step(layer: Any, dtype: torch.dtype, sentinels: bool = False) -> dict[str, Tensor]:
    """The output, and the gradients of the hidden states, the experts' weights and the parameters."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16().to(dtype).requires_grad_()
    weights = torch.rand(TOKENS, K, device="cuda").requires_grad_()  # routers give float32
    # No token selects the last expert.
    index = torch.stack([torch.randperm(EXPERTS - 1)[:K] for _ in range(TOKENS)]).cuda()
    if sentinels:
        index[::3, 1] = EXPERTS
    result = layer.to(dtype)(hidden, index, weights)
    gradient = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16().to(dtype)
    leaves = {"hidden states": hidden, "weights": weights, **dict(layer.named_parameters())}
    found = torch.autograd.grad(result, list(leaves.values()), gradient)
    return {"output": result.detach(), **dict(zip(leaves, found, strict=True))}


def check(layer: Any, config: ops.OpsConfig, **options: Any) -> None:
    truth = step(layer, torch.float32, **options)
    yardstick = step(layer, torch.bfloat16, **options)
    with ops.apply_ops(layer, config) as report:
        found = step(layer, torch.bfloat16, **options)
    assert len(report.bindings) == 1
    for name, expected in truth.items():
        allowed = 2 * distance(yardstick[name], expected) + 2**-8
        assert distance(found[name], expected) <= allowed, name
    assert not torch.equal(found["output"], yardstick["output"]), "the kernel has not run"


def test_forward_and_every_gradient(config: ops.OpsConfig) -> None:
    check(build(), config)


def test_ids_of_other_ranks_experts(config: ops.OpsConfig) -> None:
    layer = build()
    index = torch.full((4, 1), EXPERTS, device="cuda")
    with ops.apply_ops(layer.bfloat16(), config):
        nothing = layer(torch.randn(4, HIDDEN, device="cuda").bfloat16(), index, torch.ones(4, 1, device="cuda"))
    assert torch.equal(nothing, torch.zeros_like(nothing))
    if Version(transformers.__version__) >= Version("5.12"):  # older eager code doesn't support sentinel ids
        check(layer.float(), config, sentinels=True)


def test_parameters_held_the_other_way(config: ops.OpsConfig) -> None:
    layer = build("aria")
    if not hasattr(layer, "down_proj"):
        pytest.skip("experts of this release take the router's logits")
    if config["moe"] == "fused_triton":
        with pytest.raises(ValueError, match="of the variant 'swiglu_transposed'"):
            ops.apply_ops(layer, config)
    else:
        check(layer, config)


def test_quack_reads_nothing_back() -> None:
    spec = next(spec for spec in registry.registered_kernels("moe") if spec.name == "fused_quack")
    if reasons := spec.unavailable_because(registry.detect()):
        pytest.skip("; ".join(reasons))
    layer = build().bfloat16()
    index = torch.randint(EXPERTS, (TOKENS, K), device="cuda")
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(TOKENS, K, device="cuda", requires_grad=True)
    with ops.apply_ops(layer, ops.OpsConfig(moe_implementation="fused_quack")):
        layer(hidden, index, weights).sum().backward()  # compile the kernels
        with no_synchronization():
            layer(hidden, index, weights).sum().backward()
