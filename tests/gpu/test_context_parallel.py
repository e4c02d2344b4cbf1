"""SDPA's backends under torch's context parallelism, on two ranks: the ones that a plan names are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from kernel_compat.policy import plan_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

RANKS, LENGTH = 2, 2048


def errors(mesh: Any, backend: str, kv_heads: int) -> list[float]:
    """The relative errors of the output and of the gradients of query, key and value, against float32 of one rank."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    torch.manual_seed(0)
    full = [torch.randn(2, heads, LENGTH, 64, device="cuda").bfloat16() for heads in (8, kv_heads, kv_heads)]
    weight = torch.randn(2, 8, LENGTH, 64, device="cuda")

    def results(inputs: list[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        # Looked up at the call: context_parallel replaces the attribute.
        output = functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=kv_heads != 8)
        return [output.detach(), *torch.autograd.grad((output.float() * weight).sum(), leaves)]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = results([x.float() for x in full], weight)
    buffers = [*(x.clone() for x in full), weight.clone()]
    chosen = getattr(torch.nn.attention.SDPBackend, backend.upper())
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4), torch.nn.attention.sdpa_kernel(chosen):
        found = results(buffers[:3], buffers[3])
        found = context_parallel_unshard(mesh, found, [2] * 4)
    return [float((x.float() - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True)]


def run(rank: int, store: str, file: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = dist.device_mesh.init_device_mesh("cuda", (RANKS,))
    backends = plan_attention("sdpa", cp_size=RANKS).sdpa_backends or ()
    found = {(name, heads): errors(mesh, name, heads) for name in backends for heads in (8, 2)}
    # Last: with fewer key heads it raises, and leaves the process unusable.
    found["efficient_attention", 8] = errors(mesh, "efficient_attention", 8)
    if rank == 0:
        torch.save(found, file)
    dist.destroy_process_group()


def test_backends(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run, (str(tmp_path / "store"), str(tmp_path / "found.pt")), RANKS)
    found = torch.load(tmp_path / "found.pt")
    efficient = found.pop(("efficient_attention", 8))
    assert set(found) == {(name, heads) for name in ("cudnn_attention", "flash_attention") for heads in (8, 2)}
    for values in found.values():
        assert max(values) < 1e-2
    assert efficient[1] > 0.1, "its gradients were wrong on torch 2.11: a plan may name it where they are right"
