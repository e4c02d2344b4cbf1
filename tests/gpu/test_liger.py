"""Tiny models in bfloat16 with liger-kernel's Triton kernels, compared with the same weights in float32 without them.

The bound is upstream's own error in bfloat16: Liger rounds where upstream does, or less often, so its error may be at most
twice that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tiny import CAUSAL_LMS, VOCAB, distance, randomize
from torch import Tensor

import kernel_compat_ops as ops
from kernel_compat.models import use_liger_kernel

pytest.importorskip("liger_kernel.transformers.monkey_patch", exc_type=ImportError)

pytestmark = pytest.mark.gpu

BATCH, LENGTH = 3, 40
NAMES = ("llama", "llama_gqa", "qwen2_window", "mistral_window", "gemma2_softcap")

#: One way to compute the loss each: fused with the head, Liger's cross entropy instead of torch's, and torch's.
OPTIONS = {
    "fused": {},
    "cross_entropy": {"cross_entropy": True, "fused_linear_cross_entropy": False},
    "no loss": {"fused_linear_cross_entropy": False},
}


class Result(NamedTuple):
    loss: Tensor
    gradient: Tensor
    logits: Tensor


def build(name: str) -> Any:
    """A model with weights that bfloat16 holds exactly."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CAUSAL_LMS[name](), attn_implementation="eager")
    return randomize(model).to(torch.bfloat16).float().to("cuda").train()


def batch() -> dict[str, Tensor]:
    """A batch that is padded on the right, with some labels ignored."""
    torch.manual_seed(0)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, 23:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, :9] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def run(model: Any) -> Result:
    inputs = batch()
    model.zero_grad()
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    gradient = torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])
    labels = inputs.pop("labels")
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
    counted = labels[:, 1:] != -100  # each position predicts the next one's label
    return Result(loss.detach().float(), gradient, logits[:, :-1][counted].float())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients(name: str, options: str) -> None:
    model = build(name)
    truth = run(model)
    model.to(torch.bfloat16)
    yardstick = run(model)
    with use_liger_kernel(model, **OPTIONS[options]):
        ours = run(model)
    after = run(model)

    assert distance(ours.logits, truth.logits) <= 2 * distance(yardstick.logits, truth.logits)
    assert distance(ours.gradient, truth.gradient) <= 2 * distance(yardstick.gradient, truth.gradient)
    # An error of d in a logit changes the cross entropy by at most 2 d.
    allowed = 2 * 2 * (yardstick.logits - truth.logits).abs().max()
    assert (ours.loss - truth.loss).abs() <= allowed
    assert not torch.equal(ours.gradient, yardstick.gradient), "Liger's kernels have not run"

    for name_of, before, now in zip(Result._fields, yardstick, after, strict=True):
        assert torch.equal(before, now), f"{name_of} is not what it was before the patch"


def kernels_of(call: Callable[[], Any]) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return {event.key for event in profile.key_averages()}


def test_another_model_while_one_is_patched() -> None:
    """As in distillation: while the student is patched, the teacher runs its own kernels and gives bitwise the same results."""
    model, other = build("llama"), build("llama")
    expected = run(other)
    before = kernels_of(lambda: run(other))
    with use_liger_kernel(model):
        found = run(other)
        assert kernels_of(lambda: run(other)) == before
        assert kernels_of(lambda: run(model)) - before
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two)


def test_a_model_that_is_patched_before_it_is_moved() -> None:
    """As the Trainer does."""
    model = build("llama")
    expected = run(model)
    model.cpu()
    with use_liger_kernel(model):
        found = run(model.cuda())
    assert distance(found.gradient, expected.gradient) < 1e-4


def test_layer_norm() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.LayerNorm(96, 1e-3), torch.nn.Linear(96, 96)).cuda()
    x = torch.randn(3, 7, 96, device="cuda", requires_grad=True)

    def results() -> list[Tensor]:
        out = model(x)
        return [out, *torch.autograd.grad(out.sin().sum(), [x, *model.parameters()])]

    expected = results()
    with ops.apply_ops(model, ops.OpsConfig(layer_norm_implementation="liger_kernel")):
        found = results()
    for one, other in zip(found, expected, strict=True):
        assert distance(one, other) < 1e-5
