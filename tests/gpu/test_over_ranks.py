"""Each kernel over the ranks of two GPUs, beside the same one on one GPU: both are as far from float32."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import kernel_compat
from kernel_compat import ContextParallel
from kernel_compat.attention.parallel import spread

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

RANKS, LENGTH, EDGES = 2, 1000, (0, 70, 500, 510, 1000)
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
KERNELS = ("flash_attention_2", "flash_attention_4", "flash_attention_torch", "flash_attention_flex")
CASES = ("causal", "packed", "window")
AS_ALWAYS = spread._LEAST_WORK


def usable() -> list[str]:
    """The kernels that load here."""
    names = []
    for name in KERNELS:
        try:
            kernel_compat.known_kernels()[name].load()
        except kernel_compat.KernelUnavailableError:
            continue
        names.append(name)
    return names


def batch_of(case: str, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    ids = torch.randint(3, 128, (1, LENGTH), device="cuda", generator=generator)
    positions = torch.arange(LENGTH, device="cuda")[None]
    if case == "packed":
        starts = torch.tensor(EDGES[:-1], device="cuda")
        positions = positions - starts[torch.bucketize(positions, starts, right=True) - 1]
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def computed(case: str, name: str, dtype: torch.dtype, over: ContextParallel | None = None) -> list[Tensor]:
    """The loss and the gradients; under `over` summed over the ranks."""
    torch.manual_seed(0)
    window = {"sliding_window": 100 if case == "window" else None}
    config = transformers.MistralConfig(**SIZES, **window, attn_implementation=name)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name).to("cuda", dtype)
    batch = batch_of(case)
    tokens = int((batch["labels"][:, 1:] != -100).sum())
    inputs = batch if over is None else over.shard(batch)
    loss = model(**inputs, use_cache=False, num_items_in_batch=tokens).loss
    loss.backward()
    results = [loss.detach().float(), *(p.grad.float() for p in model.parameters())]
    if over is not None:
        for result in results:
            dist.all_reduce(result)
    return results


def trained(model_type: str, name: str, over: ContextParallel | None) -> list[float]:
    """The losses of a training run over packed batches, in bfloat16 under autocast."""
    torch.manual_seed(0)
    more = MODELS[model_type]
    config = transformers.AutoConfig.for_model(model_type, **SIZES | more)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name).to("cuda", torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4
    )  # with 1e-3 sdpa and FlashAttention on one device are 0.08 apart
    losses = []
    for step in range(STEPS):
        batch = batch_of("packed", step % 20)
        tokens = int((batch["labels"][:, 1:] != -100).sum())
        inputs = batch if over is None else over.shard(batch)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**inputs, use_cache=False, num_items_in_batch=tokens).loss
        loss.backward()
        total = loss.detach().clone()
        if over is not None:
            for tensor in [total, *(p.grad for p in model.parameters() if p.grad is not None)]:
                dist.all_reduce(tensor)
        losses.append(float(total))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def start(rank: int, store: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=RANKS)


def train(rank: int, store: str, file: str) -> None:
    start(rank, store)
    over = ContextParallel()
    kernel = usable()[0]
    kernel_compat.register_attention("my_flash_alone", kernel)
    kernel_compat.register_attention("my_flash_over_ranks", kernel, context_parallel=over)
    kernel_compat.install(unproven="allow")
    found = {
        model_type: (trained(model_type, "my_flash_alone", None), trained(model_type, "my_flash_over_ranks", over))
        for model_type in MODELS
    }
    if rank == 0:
        torch.save(found, file)
    dist.destroy_process_group()


def run(rank: int, store: str, file: str) -> None:
    start(rank, store)
    names = usable()
    overs = {head_ranks: ContextParallel(head_ranks=head_ranks) for head_ranks in (1, RANKS)}
    for name in [*names, "flash_attention_reference"]:
        kernel_compat.register_attention(f"{name}_alone", name)
        for head_ranks, over in overs.items():
            kernel_compat.register_attention(f"{name}_over_{head_ranks}", name, context_parallel=over)
    kernel_compat.install(unproven="allow")
    found: dict[tuple[str, str, str], list[float]] = {}
    for case in CASES:
        exact = computed(case, "flash_attention_reference_alone", torch.float32)
        for name in names:
            ways: list[tuple[str, ContextParallel | None, int]] = [("alone", None, 1)]
            ways += [
                (f"over_{n}", spread_over, least) for (n, spread_over), least in product(overs.items(), (AS_ALWAYS, 0))
            ]
            for way, used, least in ways:
                spread._LEAST_WORK = least
                results = computed(case, f"{name}_{way}", torch.bfloat16, used)
                errors = [float((x - y).norm() / y.norm()) for x, y in zip(results, exact, strict=True)]
                found[case, name, f"{way}{'' if least else ' in parts'}"] = errors
    if rank == 0:
        torch.save(found, file)
    dist.destroy_process_group()


def test_as_exact_as_one_gpu(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run, (str(tmp_path / "store"), str(tmp_path / "found.pt")), RANKS)
    found = torch.load(tmp_path / "found.pt")
    names = {name for _, name, _ in found}
    assert names >= {"flash_attention_torch"}
    assert len(found) == len(CASES) * len(names) * 5
    for (case, name, way), errors in found.items():
        for error, alone in zip(errors, found[case, name, "alone"], strict=True):
            assert error <= 1.5 * alone + 1e-3, (case, name, way)


def test_losses_of_training_runs(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train, (str(tmp_path / "store"), str(tmp_path / "found.pt")), RANKS)
    found = torch.load(tmp_path / "found.pt")
    assert found.keys() == MODELS.keys()
    for model_type, (alone, over) in found.items():
        assert len(alone) == len(over) == STEPS
        assert alone[-1] < alone[0] - 0.1, model_type
        difference = max(abs(x - y) for x, y in zip(alone, over, strict=True))
        print(f"{model_type}: losses {alone[0]:.3f} to {alone[-1]:.3f}, at most {difference:.1e} apart")
        assert difference <= 1e-3, model_type
