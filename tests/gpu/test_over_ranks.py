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
KERNELS = ("flash_attention_2", "flash_attention_4", "flash_attention_torch", "flash_attention_flex")
CASES = ("causal", "packed", "window")


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


def batch_of(case: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 128, (1, LENGTH), device="cuda")
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


def run(rank: int, store: str, file: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=RANKS)
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
            ways += [(f"over_{n}", over, least) for (n, over), least in product(overs.items(), (spread._LEAST_WORK, 0))]
            for way, over, least in ways:
                spread._LEAST_WORK = least
                results = computed(case, f"{name}_{way}", torch.bfloat16, over)
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
