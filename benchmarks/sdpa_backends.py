"""Measure each backend of SDPA, and the cost of use_sdpa_backends; list the operators that run: eager, compiled and recomputed.

Run by hand, on a GPU for the operators and backends: python benchmarks/sdpa_backends.py. The cost is that of the forward of a Llama with 32 layers of
width 256 on 4 tokens in bfloat16, the median of 7 ratios. On one H200 with torch 2.11 and transformers 5.17 the ratio is 1.03, on a
CPU 1.05. The operators are the chosen ones, except that compiled models of transformers have a mask, which flash attention doesn't
take.
"""

from __future__ import annotations

import itertools
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


#: Query heads, heads of keys and values, head dimension: as Llama 3, Llama 2, Gemma and a small vision model have them.
HEADS = [(32, 8, 128), (32, 32, 64), (16, 8, 256), (16, 16, 80)]
#: Sequences in a batch, and their length.
LENGTHS = [(32, 128), (8, 512), (4, 2048), (1, 8192), (1, 32768)]
#: Causal, none, or a padded batch's 4D mask.
MASKS = ["causal", "none", "4D"]


def device_ms(run: Callable[[], Any]) -> float:
    """The median of the device's time for a call, queued while the device is busy."""
    for _ in range(3):
        run()
    times, busy = [], torch.empty(2**28, device=DEVICE, dtype=torch.int8)
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(20):
            busy.zero_()
        start.record()
        for _ in range(3):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 3)
    return statistics.median(times)


def inputs(heads: int, kv_heads: int, size: int, batch: int, length: int, mask: str) -> dict[str, Any]:
    """Arguments of SDPA. Keys and values of a call with a mask are repeated, as transformers does."""
    given: dict[str, Any] = {"is_causal": mask == "causal", "enable_gqa": heads != kv_heads}
    if mask == "4D":  # causal, with up to a half of padding on the left; every token attends to itself
        rows, columns = torch.arange(length, device=DEVICE)[:, None], torch.arange(length, device=DEVICE)
        padding = torch.arange(batch, device=DEVICE)[:, None, None, None] * length // (2 * batch)
        given["attn_mask"] = (columns <= rows) & (columns >= padding) | (columns == rows)
        given["enable_gqa"], kv_heads = False, heads
    for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads)):
        given[name] = torch.randn(batch, count, length, size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    return given


def times(backend: str, given: dict[str, Any]) -> str:
    """A backend's forward / forward and backward in ms, or why it doesn't run."""
    leaves = [given[name] for name in ("query", "key", "value")]
    gradient = torch.randn_like(given["query"])

    def forward() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(**given)

    def both() -> Any:
        return torch.autograd.grad(forward(), leaves, gradient)

    try:
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend.upper())):
            with torch.no_grad():
                alone = device_ms(forward)
            return f"{alone:.3f} / {device_ms(both):.3f}"
    except RuntimeError as error:
        return "-" if "No available kernel" in str(error) else str(error).splitlines()[0][:60]


def backends() -> None:
    """Print a table of the times of each backend, bfloat16."""
    names = [str(choice) for choice in CHOICES[1:4]]
    print("| heads | batch | mask | " + " | ".join(names) + " |\n| --- | --- | --- | --- | --- | --- |")
    for sizes, (batch, length), mask in itertools.product(HEADS, LENGTHS, MASKS):
        if mask == "4D" and length > 8192:  # a mask of 1 GB
            continue
        cells = [times(name, inputs(*sizes, batch, length, mask)) for name in names]
        heads, kv_heads, size = sizes
        print(f"| {heads}, {kv_heads} of {size} | {batch} x {length} | {mask} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    transformers.logging.set_verbosity_error()
    if DEVICE == "cuda":
        backends()
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
