"""Each kernel over ranks, beside the same one in one process: both are as far from float32.

Each rank has a GPU of its own and NCCL, or all share the first one and exchange rows by gloo.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from ranks import join
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import kernel_compat
import kernel_compat_ops as ops
from kernel_compat import ContextParallel
from kernel_compat.attention.parallel import spread
from kernel_compat.kernels import Kernel

pytestmark = pytest.mark.gpu

LENGTH, EDGES = 1000, (0, 70, 500, 510, 1000)
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
#: Trained: one of attention alone, and a hybrid.
STEPS = 200
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_ssm": 256, "mamba_d_state": 16, "mamba_n_groups": 1},
}
KERNELS = (
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flash_attention_torch",
    "flash_attention_flex",
)
CASES = ("causal", "packed", "window")
#: Of the model's output; with the last two no logits are made.
LOSSES = ("eager", "chunk_loss", "liger_kernel")
AS_ALWAYS = spread._LEAST_WORK


@cache
def usable() -> dict[str, Kernel]:
    """The kernels that load here."""
    kernels = {name: kernel_compat.known_kernels()[name] for name in KERNELS}
    for name, kernel in list(kernels.items()):
        try:
            kernel.load()
        except kernel_compat.KernelUnavailableError:
            del kernels[name]
    return kernels


def batch_of(case: str, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    ids = torch.randint(3, 128, (1, LENGTH), device="cuda", generator=generator)
    positions = torch.arange(LENGTH, device="cuda")[None]
    if case == "packed":
        starts = torch.tensor(EDGES[:-1], device="cuda")
        positions = positions - starts[torch.bucketize(positions, starts, right=True) - 1]
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def model_of(case: str, name: str, dtype: torch.dtype, loss: str) -> Any:
    torch.manual_seed(0)
    window = {"sliding_window": 100 if case == "window" else None}
    config = transformers.MistralConfig(**SIZES, **window, attn_implementation=name)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name).to("cuda", dtype)
    if loss != "eager":
        ops.apply_ops(model, ops.OpsConfig(cross_entropy_loss_implementation=loss))
    return model


def computed(
    case: str, name: str, dtype: torch.dtype, over: ContextParallel | None = None, loss: str = "eager"
) -> list[Tensor]:
    """The loss and the gradients; under `over` summed over the ranks."""
    model, batch = model_of(case, name, dtype, loss), batch_of(case)
    tokens = int((batch["labels"][:, 1:] != -100).sum())
    inputs = batch if over is None else over.shard(batch)
    result = model(**inputs, use_cache=False, num_items_in_batch=tokens).loss
    result.backward()
    results = [result.detach().float(), *(p.grad.float() for p in model.parameters())]
    if over is not None:
        for result in results:
            dist.all_reduce(result)
    return results


@torch.inference_mode()  # type: ignore[untyped-decorator]
def predicted(case: str, name: str, dtype: torch.dtype, over: ContextParallel | None = None) -> list[Tensor]:
    """The logits of the whole batch."""
    batch = batch_of(case)
    del batch["labels"]
    inputs = batch if over is None else over.shard(batch)
    logits = model_of(case, name, dtype, "eager")(**inputs, use_cache=False).logits.float()
    return [logits if over is None else over.unshard(logits, inputs)[:, :LENGTH]]


def trained(model_type: str, name: str, over: ContextParallel | None, sharded: bool = False) -> list[float]:
    """The losses of a training run over packed batches, in bfloat16 under autocast.

    Args:
        sharded: whether FSDP2 shards the model, and averages its gradients.
    """
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SIZES | MODELS[model_type])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name).to("cuda", torch.float32)
    for part in (*model.model.layers, model) if sharded else ():
        fully_shard(part)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4
    )  # with 1e-3 sdpa and FlashAttention on one device are 0.08 apart
    losses = []
    for step in range(STEPS):
        batch = batch_of("packed", step % 20)
        inputs = batch if over is None else over.shard(batch, reduction="mean" if sharded else "sum")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**inputs, use_cache=False).loss
        loss.backward()
        total = loss.detach().clone()
        if over is not None:
            gradients = [p.grad for p in model.parameters() if p.grad is not None and not sharded]
            for tensor in [total, *gradients]:
                dist.all_reduce(tensor)
        losses.append(float(total) / (dist.get_world_size() if sharded else 1))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train(rank: int, ranks: int, store: Path, file: str) -> None:
    join(rank, ranks, "cuda", store)
    over = ContextParallel()
    kernel = next(name for name, kernel in usable().items() if kernel.features.backward)
    kernel_compat.register_attention("my_flash_alone", kernel)
    kernel_compat.register_attention("my_flash_over_ranks", kernel, context_parallel=over)
    kernel_compat.install(unproven="allow")
    losses = {
        model_type: {
            "alone": trained(model_type, "my_flash_alone", None),
            "alone, sdpa": trained(model_type, "sdpa", None),
            "over ranks": trained(model_type, "my_flash_over_ranks", over),
            "over ranks, sharded": trained(model_type, "my_flash_over_ranks", over, sharded=True),
        }
        for model_type in MODELS
    }
    if rank == 0:
        torch.save(losses, file)
    dist.destroy_process_group()


def run(rank: int, ranks: int, store: Path, file: str) -> None:
    join(rank, ranks, "cuda", store)
    overs = {head_ranks: ContextParallel(head_ranks=head_ranks) for head_ranks in (1, 2, ranks)}
    for name in [*usable(), "flash_attention_reference"]:
        kernel_compat.register_attention(f"{name}_alone", name)
        for head_ranks, context_parallel in overs.items():
            kernel_compat.register_attention(f"{name}_over_{head_ranks}", name, context_parallel=context_parallel)
    kernel_compat.install(unproven="allow")
    ways: list[tuple[str, ContextParallel | None, int]] = [("alone", None, 1)]
    ways += [(f"over_{n}", over, least) for (n, over), least in product(overs.items(), (AS_ALWAYS, 0))]
    errors: dict[tuple[str, str, str, str], list[float]] = {}
    for case in CASES:
        exact = {
            "logits": predicted(case, "flash_attention_reference_alone", torch.float32),
            "loss": computed(case, "flash_attention_reference_alone", torch.float32),
        }
        for (name, kernel), (way, over, spread._LEAST_WORK) in product(usable().items(), ways):
            if case == "window" and not kernel.features.window:
                continue
            arguments = case, f"{name}_{way}", torch.bfloat16, over
            results = {"logits": predicted(*arguments)}
            if kernel.features.backward:
                losses = LOSSES if name == "flash_attention_torch" and spread._LEAST_WORK else LOSSES[:1]
                results |= {loss: computed(*arguments, loss) for loss in losses}
            for of, tensors in results.items():
                pairs = zip(tensors, exact["logits" if of == "logits" else "loss"], strict=True)
                label = f"{way}{'' if spread._LEAST_WORK else ' in parts'}"
                errors[case, name, of, label] = [float((x - y).norm() / y.norm()) for x, y in pairs]
    if rank == 0:
        torch.save(errors, file)
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4])
def test_as_exact_as_one_process(tmp_path: Path, ranks: int) -> None:
    torch.multiprocessing.spawn(run, (ranks, tmp_path / "store", str(tmp_path / "errors.pt")), ranks)
    errors = torch.load(tmp_path / "errors.pt")
    names = {name for _, name, _, _ in errors}
    assert names >= {"flash_attention_torch"}
    print(f"{ranks} ranks, {len(errors)} results of {', '.join(sorted(names))}")
    for (case, name, of, way), values in errors.items():
        for error, alone in zip(values, errors[case, name, of, "alone"], strict=True):
            assert error <= 1.5 * alone + 1e-3, (case, name, of, way)


def test_losses_of_training_runs(tmp_path: Path) -> None:
    """At most 1e-3 apart, or no further than those of two kernels on one GPU: training amplifies rounding to bfloat16."""
    torch.multiprocessing.spawn(train, (2, tmp_path / "store", str(tmp_path / "losses.pt")), 2)
    losses = torch.load(tmp_path / "losses.pt")
    assert losses.keys() == MODELS.keys()
    for model_type, runs in losses.items():
        alone = torch.tensor(runs.pop("alone"))
        assert alone[-1] < alone[0] - 0.1, model_type
        apart = {name: float((torch.tensor(run) - alone).abs().max()) for name, run in runs.items()}
        print(f"{model_type}: losses {alone[0]:.3f} to {alone[-1]:.3f}, at most apart: {apart}")
        allowed = max(1e-3, 1.5 * apart.pop("alone, sdpa"))
        assert len(apart) == 2
        assert max(apart.values()) <= allowed, model_type
