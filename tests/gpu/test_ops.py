"""Every kernel that a config can choose, on tiny models in bfloat16, held against the same weights in float32 without it.

The bound is eager's own error in bfloat16: a kernel rounds where eager does, or less often, so it may not be farther off than
twice that.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from bf16 import require_as_close
from tiny import OPS_MODELS, TRANSFORMERS, VOCAB, randomize
from torch import Tensor

from kernel_compat import KernelUnavailableError, ops

pytestmark = pytest.mark.gpu

VALUES = [
    ("rms_norm", "liger_kernel"),
    ("rms_norm", "triton"),
    ("rms_norm_gated", "fla"),
    ("swiglu_mlp", "liger_kernel"),
    ("rotary_pos_emb", "liger_kernel"),
    ("rotary_pos_emb", "triton"),
    ("cross_entropy_loss", "liger_kernel"),
    ("cross_entropy_loss", "chunk_loss"),
    ("load_balancing_loss", "triton"),
    ("moe", "fused_triton"),
    ("moe", "fused_quack"),
]


class Result(NamedTuple):
    loss: Tensor
    gradient: Tensor
    logits: Tensor


def build(name: str) -> Any:
    """With weights that bfloat16 holds exactly, and experts as upstream's own loop computes them."""
    torch.manual_seed(0)
    options = {"experts_implementation": "eager"} if TRANSFORMERS.major >= 5 else {}
    config = OPS_MODELS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", **options)
    return randomize(model).to(torch.bfloat16).float().to("cuda").train()


def run(model: Any) -> Result:
    """Padded on the right, with labels that are partly ignored."""
    torch.manual_seed(0)
    ids = torch.randint(3, VOCAB, (3, 40), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, 23:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, :9] = -100
    model.zero_grad()
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
    outputs.loss.backward()
    gradients = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    scaled = [gradient / gradient.norm().clamp_min(1e-12) for gradient in gradients]
    return Result(
        outputs.loss.detach().float(), torch.cat(scaled), (outputs.logits.float() * mask.unsqueeze(-1)).detach()
    )


@pytest.mark.parametrize("name", list(OPS_MODELS))
@pytest.mark.parametrize(("op", "value"), VALUES, ids=[f"{op}-{value}" for op, value in VALUES])
def test_a_kernel_is_as_close_as_eager(op: str, value: str, name: str) -> None:
    truth = build(name)
    try:
        config = ops.OpsConfig.from_dict({f"{op}_implementation": value})
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    ours = copy.deepcopy(truth).bfloat16()
    if refused := ops.refusal(ours, op, value):
        pytest.skip(refused)
    report = ops.apply_ops(ours, config)
    if not report.bindings:
        pytest.skip(report.notes[0])

    exact, rough, found = run(truth), run(copy.deepcopy(truth).bfloat16()), run(ours)

    for what in ("gradient", "logits"):
        require_as_close(getattr(found, what), getattr(rough, what), getattr(exact, what))
    off, own = abs(float(found.loss - exact.loss)), abs(float(rough.loss - exact.loss))
    assert off <= 2 * own + 1e-3 * abs(float(exact.loss))  # a mean over rounding errors is small by chance


@pytest.mark.parametrize("name", list(OPS_MODELS))
def test_the_best_set_is_as_close_as_eager(name: str) -> None:
    truth = build(name)
    ours = copy.deepcopy(truth).bfloat16()
    values = {k: v for k, v in ops.OpsConfig.auto(model=ours).values().items() if k != "attn_implementation"}

    report = ops.apply_ops(ours, ops.OpsConfig.from_dict(values))
    exact, rough, found = run(truth), run(copy.deepcopy(truth).bfloat16()), run(ours)

    assert {binding.op for binding in report.bindings} >= {"rms_norm", "cross_entropy_loss"}
    for what in ("gradient", "logits"):
        require_as_close(getattr(found, what), getattr(rough, what), getattr(exact, what))


def test_logits_never_take_memory() -> None:
    """Peak memory of a loss over a large vocabulary, without and with them: at most a fifth."""
    config = OPS_MODELS["llama"]()
    config.vocab_size = 32_000
    peaks = {}
    for value in ("eager", "chunk_loss"):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(
            "cuda", torch.bfloat16
        )
        ops.apply_ops(model, ops.OpsConfig(cross_entropy_loss_implementation=value))
        ids = torch.randint(0, 32_000, (1, 8192), device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        peaks[value] = torch.cuda.max_memory_allocated() - before
    assert peaks["chunk_loss"] <= peaks["eager"] / 5
