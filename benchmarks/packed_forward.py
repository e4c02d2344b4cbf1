"""Measure the cost of reading sequence lengths from the device: packed position_ids against explicit cu_seq_lens_*.

Run by hand on a GPU: python benchmarks/packed_forward.py [KERNEL ...]. A Llama of 1B shape without its head, 4 x 4096 packed tokens,
bfloat16, forward; medians of 20 and their ratio, for each kernel under a registered name and for transformers' own
flash_attention_2. On one H200 with torch 2.11 and transformers 5.23: FlashAttention-2 0.99, FlashAttention-4 0.99,
transformers' own 1.08.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers

import kernel_compat

LENGTHS = [4096] * 4


def median_ms(run: Callable[[], Any], repeats: int = 20) -> float:
    for _ in range(5):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def main(kernels: list[str]) -> None:
    transformers.logging.set_verbosity_error()
    for kernel in kernels:
        kernel_compat.register_attention(f"bench_{kernel}", kernel=kernel)
    kernel_compat.install()
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    ids = torch.randint(0, config.vocab_size, (1, sum(LENGTHS)), device="cuda")
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].cuda()
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda", torch.int32)
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 4096, "max_length_k": 4096}
    for name in (*(f"bench_{kernel}" for kernel in kernels), "flash_attention_2"):
        try:
            model = transformers.AutoModel.from_config(config, attn_implementation=name)
        except ImportError as error:
            print(f"{name}: {error}")
            continue
        model = model.to("cuda", torch.bfloat16).eval()

        def forward(model: Any = model, **lengths: Any) -> Any:
            with torch.no_grad():  # new tensors each time, because lengths read from a tensor are kept
                return model(input_ids=ids, position_ids=positions.clone(), use_cache=False, **lengths)

        packed, explicit = median_ms(forward), median_ms(lambda forward=forward: forward(**given))
        print(f"{name}: position_ids {packed:.2f} ms, cu_seq_lens {explicit:.2f} ms, ratio {packed / explicit:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["flash_attention_2", "flash_attention_4"])
