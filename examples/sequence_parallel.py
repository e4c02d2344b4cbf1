"""A sequence split over two ranks: the loss and a gradient are those of one process.

The ranks are processes on this machine, and gloo connects them; on GPUs the backend is nccl, and torchrun starts the ranks.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import kernel_compat

TOKENS, RANKS = 32, 2


def loss_and_gradient(name: str, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss over all tokens, and the gradient of a projection."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
    ids = torch.randint(3, 100, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]  # shifted before they are sliced
    here = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
    positions = torch.arange(TOKENS)[None, here]
    logits = model(input_ids=ids[:, here], position_ids=positions, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[0], labels[0, here], reduction="sum") / (TOKENS - 1)
    loss.backward()
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad
    if ranks > 1:  # each rank has its share
        dist.all_reduce(loss.detach())
        dist.all_reduce(gradient)
    return loss.detach(), gradient


def run(rank: int, store: str) -> None:
    """A rank's process."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    kernel_compat.register_attention("acme_flash_spread", "flash_attention_reference", sequence_parallel=True)
    kernel_compat.install()
    (loss, gradient), (whole, expected) = (
        loss_and_gradient("acme_flash_spread", rank, RANKS),
        loss_and_gradient("sdpa", 0, 1),
    )
    if rank == 0:
        print(f"loss of {RANKS} ranks: {loss:.4f}, of one: {whole:.4f}")
        print("equal gradients:", torch.allclose(gradient, expected, atol=1e-6))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (str(Path(folder) / "store"),), RANKS)
