"""Tiny models with an additional loss on their logits, alone and wrapped by DistributedDataParallel and FSDP2."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tiny import OPS_MODELS, TRANSFORMERS, randomize
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import kernel_compat_ops as ops
from kernel_compat_ops.losses.lazy import LazyLogits

CHUNKED = ops.OpsConfig(cross_entropy_loss_implementation="chunk_loss")


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    # Only upstream's own loop of experts supports float64.
    options = {"experts_implementation": "eager"} if TRANSFORMERS.major >= 5 else {}
    model = transformers.AutoModelForCausalLM.from_config(OPS_MODELS[name](), attn_implementation="eager", **options)
    return randomize(model).to(dtype).train()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=rtol, atol=rtol * float(gradient.abs().max() + 1e-6))


def with_a_loss_of_the_logits(model: Any, batch: dict[str, Tensor], around: Any = None) -> dict[str, Tensor]:
    """The gradients of a model's loss plus another loss on its logits."""
    model.zero_grad()
    outputs = (around or model)(**batch)
    loss, logits = outputs if isinstance(outputs, tuple) else (outputs.loss, outputs.logits)
    logits = logits.compute() if isinstance(logits, LazyLogits) else logits
    (loss + logits.square().mean()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {name: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for name, g in gradients.items()}


def spread(rank: int, store: str, batch: dict[str, Tensor]) -> None:
    """Run as one of two ranks, each with its own sequence."""
    parts = [{name: rows[i : i + 1] for name, rows in batch.items()} for i in range(2)]
    distributed.init_process_group("gloo", store=distributed.FileStore(store, 2), rank=rank, world_size=2)
    try:
        for name, wrapper in (
            ("gemma2", "ddp"),
            ("gemma2", "ddp with unused parameters"),
            ("gemma2", "fsdp2"),
            ("llama", "fsdp2, the head by itself"),  # impossible for Gemma's tied head
        ):
            model = build(name)
            each = [with_a_loss_of_the_logits(model, part) for part in parts]
            expected = {key: (each[0][key] + each[1][key]) / 2 for key in each[0]}
            model.zero_grad()
            ops.apply_ops(model, CHUNKED)
            around = model
            if "ddp" in wrapper:
                around = DistributedDataParallel(model, find_unused_parameters="unused" in wrapper)
            else:
                apart = [model.lm_head] if "head" in wrapper else []
                for one in (*apart, *model.model.layers, model):
                    fully_shard(one)
            assert isinstance(around(**parts[rank]).logits, LazyLogits), wrapper
            assert_same(with_a_loss_of_the_logits(model, parts[rank], around), expected, 1e-4)
    finally:
        distributed.destroy_process_group()
