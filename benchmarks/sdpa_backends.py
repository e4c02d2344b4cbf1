"""Measure the cost of use_sdpa_backends, and list the operators of SDPA that run: eager, compiled and recomputed.

Run by hand, on a GPU for the operators: python benchmarks/sdpa_backends.py. The cost is that of the forward of a Llama with 32 layers of
width 256 on 4 tokens in bfloat16, the median of 7 ratios. On one H200 with torch 2.11 and transformers 5.17 the ratio is 1.03, on a
CPU 1.05. The operators are the chosen ones, except that compiled models of transformers have a mask, which flash attention doesn't
take.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from kernel_compat.models import use_sdpa_backends

CHOICES = [None, "cudnn_attention", "flash_attention", "efficient_attention", "math"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build(layers: int) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(DEVICE, torch.bfloat16)


def operators(step: Callable[[], Any]) -> dict[str, int]:
    step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    names = Counter(event.name for event in found.events())
    return {name: count for name, count in sorted(names.items()) if "_attention" in name and "aten::_" in name}


def median_ms(run: Callable[[], Any], repeats: int = 30) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    ids = torch.randint(0, 128, (2, 128), device=DEVICE)
    model = build(layers=1).train()
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for compiled in (False, True):
            for choice in CHOICES:
                with use_sdpa_backends(model, choice):
                    torch._dynamo.reset()
                    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
                    try:
                        found: Any = operators(lambda run=run: run(ids, use_cache=False).logits.sum().backward())
                    except Exception as error:
                        found = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                print(f"checkpointed {checkpointed}, compiled {compiled}, {choice}: {found}")
    model = build(layers=32).eval()

    def forward() -> None:
        with torch.no_grad():
            model(ids[:1, :4], use_cache=False)

    default = [backend.name for backend in torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)]
    ratios = []
    median_ms(forward)
    for _ in range(7):
        plain = median_ms(forward)
        with use_sdpa_backends(model, default):
            ratios.append((median_ms(forward) / plain, plain))
    ratio, plain = sorted(ratios)[3]
    print(f"forward of 32 layers and 4 tokens: {plain:.2f} ms, with use_sdpa_backends {ratio:.3f} times that")


if __name__ == "__main__":
    main()
