"""What sinks from the log-sum-exp cost, and what flash_attention_flex and kernel="auto" save, against sdpa with a mask in full.

Run by hand on a GPU: python benchmarks/layers_gpu.py [TABLE ...], of the tables sinks, masks and mixed. bfloat16. The candidates of a
row take turns, round by round; times are medians over the rounds, ratios medians of the ratios of each round. Calls are queued while
the device is kept busy, so that times are the device's. Prints a table in Markdown, and FAIL beside a ratio that misses its target;
exits with 1 if one does.
"""

from __future__ import annotations

import copy
import random
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kernel_compat

TOKENS = 16384
#: Packed sequences of the masks and of the model.
LENGTHS = (4096, 3072, 2048, 1024, 5120, 1024)
#: Gemma 4's smallest text model, with 10 of its 35 layers and a vocabulary of 32000.
GEMMA4 = {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
    "hidden_size_per_layer_input": 256,
    "vocab_size": 32000,
    "vocab_size_per_layer_input": 32000,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
}

Candidates = dict[str, Callable[[], Any]]
#: The rows that missed their targets.
failed: list[str] = []


def milliseconds(call: Callable[[], Any], calls: int) -> float:
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / calls


def row(
    title: str, candidates: Candidates, accepted: Callable[[float], bool], rounds: int = 15, calls: int = 4
) -> None:
    """Print the times of two candidates and the ratio of the second's to the first's."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 2):
        for name in random.sample(list(candidates), len(candidates)):
            time = milliseconds(candidates[name], calls)
            if number > 1:
                times[name].append(time)
    base, other = times.values()
    ratio = statistics.median(b / a for a, b in zip(base, other, strict=True))
    if not accepted(ratio):
        failed.append(title)
    found = " | ".join(f"{name} {statistics.median(values):.3f}" for name, values in times.items())
    print(f"| {title} | {found} | {ratio:.3f}{'' if accepted(ratio) else ' FAIL'} |", flush=True)


def inputs(tokens: int, heads: int, kv_heads: int, head_dim: int) -> tuple[list[Tensor], Tensor]:
    """q, k and v of a packed row, (tokens, heads, head_dim), and the gradient of the output."""
    shapes = [(tokens, count, head_dim) for count in (heads, kv_heads, kv_heads)]
    qkv = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    return qkv, torch.randn(shapes[0], device="cuda", dtype=torch.bfloat16)


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().cuda()


def run(function: Callable[..., Tensor], arguments: list[Tensor], grad: Tensor | None, **options: Any) -> None:
    if grad is None:
        with torch.no_grad():
            function(*arguments[:3], **options)
    else:
        torch.autograd.grad(function(*arguments[:3], **options), arguments, grad)


def sinks() -> None:
    """gpt-oss's shape: 64 query heads, 8 key heads, head dimension 64."""
    for name in ("flash_attention_2", "flash_attention_3", "flash_attention_torch"):
        kernel = kernel_compat.known_kernels()[name]
        if kernel.unavailable_because(kernel_compat.Environment.detect()):
            continue
        function, backward = kernel.load().flash_attn_varlen_func, kernel.features.backward
        for lengths in ((4096,) * 4, (TOKENS,)):
            qkv, grad = inputs(sum(lengths), 64, 8, 64)
            s_aux = torch.randn(64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            cu, longest = offsets(lengths), max(lengths)
            options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
            call = partial(run, function, causal=True, **options)
            for mode, g in (("forward", None), ("forward+backward", grad))[: 1 + backward]:
                both: Candidates = {
                    "without": partial(call, qkv, g),
                    "with sinks": partial(call, [*qkv, s_aux], g, s_aux=s_aux),
                }
                row(f"{name}, {len(lengths)} x {longest}, {mode}", both, lambda ratio: ratio <= 1.05)


def masks() -> None:
    """A document mask: flash_attention_flex over packed sequences, sdpa with a mask in full."""
    function = kernel_compat.known_kernels()["flash_attention_flex"].load().flash_attn_varlen_func
    cu = offsets(LENGTHS)
    document = torch.bucketize(torch.arange(TOKENS, device="cuda", dtype=torch.int32), cu[1:], right=True)
    seen = (document[:, None] == document[None]).tril()
    for heads, kv_heads, head_dim in ((32, 8, 128), (8, 4, 256), (8, 1, 512)):
        qkv, grad = inputs(TOKENS, heads, kv_heads, head_dim)
        options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": max(LENGTHS), "max_seqlen_k": max(LENGTHS)}

        def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
            return scaled_dot_product_attention(*rows, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)

        for mode, g in (("forward", None), ("forward+backward", grad)):
            both: Candidates = {
                "sdpa": partial(run, sdpa, qkv, g),
                "flex": partial(run, function, qkv, g, causal=True, **options),
            }
            row(f"{heads}/{kv_heads} heads of {head_dim}, {mode}", both, lambda ratio: ratio < 1, rounds=5, calls=1)


def mixed() -> None:
    """A model whose layers need different kernels, on packed sequences; without its head."""
    kernel_compat.register_attention("layers_flash", kernel="auto")
    kernel_compat.install(unproven="allow")
    config = transformers.Gemma4TextConfig(**GEMMA4)
    ids = torch.randint(3, 32000, (1, TOKENS), device="cuda")
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].cuda()
    models: dict[str, Any] = {}
    for name in ("sdpa", "layers_flash"):
        torch.manual_seed(0)
        model = transformers.Gemma4TextModel._from_config(
            copy.deepcopy(config), attn_implementation=name, dtype=torch.bfloat16
        )
        models[name] = model.cuda()

    def forward(model: Any) -> Tensor:
        states: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        return states

    def no_gradients(model: Any) -> None:
        with torch.no_grad():
            forward(model)

    def step(model: Any) -> None:
        model.zero_grad()
        forward(model).float().square().mean().backward()

    with torch.no_grad():
        expected, found = (forward(model).float() for model in models.values())
    difference = float((found - expected).norm() / expected.norm())
    print(f"| {type(models['sdpa']).__name__}, {TOKENS} tokens: difference of the outputs | | | {difference:.1e} |")
    for mode, call in (("forward", no_gradients), ("forward+backward", step)):
        both: Candidates = {"sdpa": partial(call, models["sdpa"]), "auto": partial(call, models["layers_flash"])}
        row(f"model, {mode}", both, lambda ratio: ratio <= 0.2, rounds=5, calls=1)


if __name__ == "__main__":
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}\n")
    print("| case | ms | ms | ratio |\n|---|---|---|---|")
    tables = {table.__name__: table for table in (sinks, masks, mixed)}
    for name in sys.argv[1:] or tables:
        tables[name]()
    sys.exit(bool(failed))
