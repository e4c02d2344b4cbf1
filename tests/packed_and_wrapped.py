"""Tiny models over packed sequences, alone and wrapped by other libraries, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny import NAME, VOCAB, distance, load, save, there
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import kernel_compat

LENGTHS = (5, 7, 4)
TOLERANCE, OF_GRADIENTS = 1e-5, 1e-4

_SHAPE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_HEADS = {**_SHAPE, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def _gpt2() -> Any:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=64, **dropout)


def _mamba() -> Any:
    return transformers.MambaConfig(**_SHAPE, state_size=8)


def _lfm2() -> Any:
    return transformers.Lfm2Config(**_HEADS, layer_types=["conv", "full_attention"])


#: A model whose head doesn't pass lengths to its attention, an SSM, and a model of attention and convolutions.
MODELS = there((("gpt2", _gpt2, "GPT2Config"), ("mamba", _mamba, "MambaConfig"), ("lfm2", _lfm2, "Lfm2Config")))


class _Recomputing(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, layer: Any, hidden: Tensor, *others: Any) -> Any:
        ctx.layer, ctx.others = layer, others
        ctx.save_for_backward(hidden)
        with torch.no_grad():
            return layer(hidden, *others)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            outputs = ctx.layer(hidden, *ctx.others)
        first = outputs if isinstance(outputs, Tensor) else outputs[0]
        torch.autograd.backward(first, gradients[0])
        return None, hidden.grad, *(None for _ in ctx.others)


def recomputing(layer: Any, *args: Any) -> Any:
    """A checkpoint function independent of torch's, like DeepSpeed's and Unsloth's; it looks at the layer, like LLaMA-Factory's."""
    function = layer.func if isinstance(layer, partial) else layer
    module = function.__self__ if hasattr(function, "__self__") else layer.args[0]  # from transformers 5.24 on
    assert any(parameter.requires_grad for parameter in module.parameters())
    return _Recomputing.apply(layer, *args)


def path_of(name: str, folder: Path) -> Path:
    return save(folder, f"wrapped_{name}", transformers.AutoModelForCausalLM, MODELS[name]())


def name_for(model: str) -> str:
    return "eager" if model == "mamba" else NAME


def row(seed: int = 0) -> tuple[Tensor, dict[str, Any]]:
    """Three sequences in one row, and the position_ids that separate them."""
    ids = torch.randint(3, VOCAB, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(seed))
    return ids, {"position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None]}


def step(model: Any, around: Callable[..., Any], rows: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """The logits of the rows, concatenated, and the gradients of one loss over all rows."""
    model.zero_grad()
    logits = torch.cat([around(**given, use_cache=False).logits for given in rows], 1)
    logits.square().sum().backward()
    gradients = [p.grad for _, p in sorted(model.named_parameters()) if p.grad is not None]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
    return logits.detach(), torch.cat([g.flatten() for g in whole])


def alone(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The same for the sequences computed separately."""
    return step(model, model, [{"input_ids": part} for part in ids.split(LENGTHS, 1)])


def require_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], what: str) -> None:
    assert distance(found[0], expected[0]) < TOLERANCE, what
    assert distance(found[1], expected[1]) < OF_GRADIENTS, what


def on_two_ranks(rank: int, folder: Path) -> None:
    """Run as one of two ranks, each with its own sequences."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    kernel_compat.register_attention(NAME, kernel="flash_attention_reference")
    try:
        for wrapper in ("fsdp2, then installed", "fsdp2", "ddp"):
            for name in MODELS:
                if "then" in wrapper and name == "gpt2":
                    continue  # the name isn't registered yet
                if "then" not in wrapper:
                    kernel_compat.install()
                model = load(path_of(name, folder), "eager" if "then" in wrapper else name_for(name))
                ids, packed = row(rank)
                logits, _ = alone(model, ids)
                _, first = alone(model, row(0)[0])
                _, second = alone(model, row(1)[0])
                around = model
                if wrapper == "ddp":
                    around = DistributedDataParallel(model)
                else:
                    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
                    mixers = [m for layer in layers for n, m in layer.named_children() if n in ("mixer", "conv")]
                    for part in (*mixers, *layers, model):
                        fully_shard(part)
                kernel_compat.install()
                found = step(model, around, [{"input_ids": ids, **packed}])
                require_same(found, (logits, (first + second) / 2), f"{name}, {wrapper}")
                kernel_compat.uninstall()
    finally:
        distributed.destroy_process_group()
