"""Kernels bound on one of two ranks, to models whose forwards wait for the other one.

As a program: `ops_ranks.py FOLDER` runs all cases, and saves what each rank found in FOLDER.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from plain_kernels import PLAIN
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from wrapped import CHUNKED, build

import kernel_compat
import kernel_compat_ops as ops
from kernel_compat.models import liger_support
from kernel_compat_ops.losses.causal import causal_loss
from kernel_compat_ops.losses.lazy import LazyLogits

SPREAD, OWN, UPSTREAM = "my_flash_spread", "my_flash_own", "their_attention"
OVER, ALONE = "my_flash_over_ranks", "flash_attention_reference"
over = kernel_compat.ContextParallel()
NORMS = ops.OpsConfig(rms_norm_implementation=PLAIN, cross_entropy_loss_implementation="chunk_loss")


def own_forward(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """Attention by torch's function, whose result is added up over the ranks."""
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return functional.all_reduce(output.transpose(1, 2).contiguous(), "sum", dist.group.WORLD), None


def under(name: str) -> Any:
    model = build("llama")
    model.set_attn_implementation(name)
    return model


def of_a_slice(padding_free: bool, in_one_process: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a padded batch, without logits, and its gradients: of one process, or the sum of the ranks' shares."""
    torch.manual_seed(0)
    ids = torch.randint(5, 90, (2, 29))
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[0, 20:], mask[1, :7], labels[0, 20:], labels[1, :8] = 0, 0, -100, -100
    positions = (mask.cumsum(1) - 1).clamp(
        min=0
    )  # `shard`'s: rotations by other ones are rounded otherwise, to float32
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": labels}
    model = build("llama", torch.float64)
    model.set_attn_implementation(ALONE if in_one_process else OVER)
    ops.apply_ops(model, CHUNKED)
    if not in_one_process:
        over.padding_free = padding_free
        batch = over.shard(batch)
    output = model(**batch, num_items_in_batch=(labels[:, 1:] != -100).sum(), use_cache=False)
    assert isinstance(output.logits, LazyLogits)
    output.loss.backward()
    values = [output.loss.detach(), *(p.grad for p in model.parameters())]
    for value in () if in_one_process else values:
        dist.all_reduce(value)
    return values[0], dict(zip(dict(model.named_parameters()), values[1:], strict=True))


def hooked() -> Any:
    """As transformers' own tensor parallelism leaves a model: plain parameters, and a hook that adds up results."""
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, inputs, output: reduced(output))
    return model


def reduced(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()


def sharded() -> Any:
    from torch.distributed.fsdp import fully_shard

    model = build("llama")
    for part in (*model.model.layers, model):
        fully_shard(part)
    return model


def parallel_norms(collective: Callable[[Tensor], Tensor]) -> Any:
    """A model whose norms are of a class of its own, which adds up what the ranks have."""
    model = build("llama")
    base = type(model.model.norm)

    class RMSNorm(base):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor) -> Tensor:
            return base.forward(self, collective(hidden_states))

    for module in model.modules():
        if isinstance(module, base):
            module.__class__ = RMSNorm
    return model


def gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts[dist.get_rank()]


def broadcast(x: Tensor) -> Tensor:
    box = [None]
    dist.broadcast_object_list(box, src=0)
    return x


def parallel_loss() -> Any:
    """A model with a loss function that adds up what the ranks have, as VeOmni's does under sequence parallelism."""
    model = build("llama")
    model.loss_function = lambda *args, **kwargs: reduced(causal_loss(*args, **kwargs))
    return model


#: By name: a model, and what binding kernels to it raises; empty where they are bound.
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "ulysses": (lambda: under(SPREAD), ""),
    "a forward of the user's": (lambda: under(OWN), ""),
    "a name of the user's in transformers' table": (lambda: under(UPSTREAM), ""),
    "hooks": (hooked, ""),
    "fsdp2": (sharded, ""),
    "norms that reduce": (lambda: parallel_norms(reduced), "RMSNorm): it waits for other ranks (c10d.allreduce"),
    "norms that reduce functionally": (
        lambda: parallel_norms(lambda x: functional.all_reduce(x, "avg", dist.group.WORLD)),
        "RMSNorm): it waits for other ranks (_c10d_functional.all_reduce",
    ),
    "norms that gather": (lambda: parallel_norms(gathered), "it waits for other ranks (c10d.allgather"),
    "norms that broadcast": (lambda: parallel_norms(broadcast), "it waits for other ranks (c10d.broadcast"),
    "norms that wait": (
        lambda: parallel_norms(lambda x: dist.barrier() or x),
        "it waits for other ranks (c10d.barrier",
    ),
    "a loss that reduces": (parallel_loss, "LlamaForCausalLM): it waits for other ranks (c10d.allreduce"),
}


def outcome(model: Any) -> str:
    """The error, or the notes."""
    try:
        with ops.apply_ops(model, NORMS if "RMSNorm" in type(model.model.norm).__qualname__ else CHUNKED) as report:
            return "\n".join(report.notes)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    found: dict[str, Any] = {}
    batch = {"input_ids": torch.arange(6)[None] + 5, "labels": torch.arange(6)[None] + 5, "use_cache": False}
    batch["position_ids"] = torch.arange(6)[None] + 6 * rank
    for name, (make, refused) in CASES.items():
        model = make()
        with torch.no_grad():
            before = model(**batch).loss  # one forward of all ranks: Ulysses compares their arguments in the first
        if rank == 0:  # alone: nothing may wait for the other rank
            found[f"{name}, alone"] = outcome(model), bool(ops.OpsConfig.auto(model=model)["cross_entropy_loss"])
            liger_support(model)
        dist.barrier()
        each: list[Any] = [None, None]
        dist.all_gather_object(each, outcome(model))
        losses: list[Any] = [None, None]
        if not refused:
            ops.apply_ops(model, CHUNKED)
            dist.all_gather_object(losses, (float(before), float(model(**batch).loss)))
        found[name] = each, losses
    found["of a slice"] = [
        of_a_slice(False, True),
        *(of_a_slice(padding_free, False) for padding_free in (False, True)),
    ]
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def start(folder: Path) -> dict[str, Any]:
    """Run this program; returns what it found."""
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    found: dict[str, Any] = torch.load(folder / "found.pt", weights_only=False)
    return found


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    kernel_compat.register_attention(SPREAD, "flash_attention_reference", sequence_parallel=True)
    kernel_compat.register_attention(OVER, "flash_attention_reference", context_parallel=over)
    kernel_compat.register_attention(OWN, "flash_attention_reference", forward=own_forward)
    transformers.AttentionInterface.register(UPSTREAM, own_forward)
    kernel_compat.install(unproven="allow")
    torch.multiprocessing.start_processes(work, (Path(sys.argv[1]),), 2, start_method="fork")
