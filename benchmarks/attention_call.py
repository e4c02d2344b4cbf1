"""The way of one attention call from transformers to the kernel: its frames and files, and the host's time for it.

Run: python benchmarks/attention_call.py [--json]

A tiny model runs under a registered name on a kernel that computes nothing, so that all time is the library's and the model's. The call
of a layer is repeated within the model's forward, as by the layers after the first one. Prints for each kind of batch the frames and the
files on the stack where the kernel is called, the Python functions that the call enters in all, and the time of a call in microseconds
and as a ratio of the time of a direct call of the kernel with the same tensors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import kernel_compat

REPEATS, ROUNDS = 2000, 7


class Nothing:
    """FlashAttention's functions, which return an output that nothing has written to."""

    def __init__(self) -> None:
        self.stack: list[traceback.FrameSummary] = []
        self.watched = False
        self.last: Callable[[], Any] = list

    def flash_attn_func(
        self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0
    ):  # type: ignore[no-untyped-def]
        return self._output(q, lambda: self.flash_attn_func(q, k, v, causal=causal))

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return self._output(q, lambda: self.flash_attn_varlen_func(q, k, v, *lengths, causal=causal))

    def _output(self, q: torch.Tensor, again: Callable[[], Any]) -> torch.Tensor:
        if self.watched:
            self.stack = traceback.extract_stack()[:-1]
            self.last = again
        return torch.empty_like(q)


def measured(kernel: Nothing, call: Callable[[], Any]) -> dict[str, Any]:
    """The frames, files, functions and times of a call."""
    call()
    kernel.watched = True
    entered = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event == "call"

    call()
    package, own = str(Path(kernel_compat.__file__).parent), list[traceback.FrameSummary]()
    for frame in reversed(kernel.stack):  # from the kernel down to the call of the attention function
        if frame.filename.startswith(package):
            own.append(frame)
        elif own:
            break
    direct = kernel.last
    kernel.watched = False
    sys.setprofile(count)
    call()
    sys.setprofile(None)
    times: dict[str, list[float]] = {"call": [], "direct": []}
    for _ in range(ROUNDS):
        for name, function in (("call", call), ("direct", direct)):
            start = time.perf_counter()
            for _ in range(REPEATS):
                function()
            times[name].append((time.perf_counter() - start) / REPEATS * 1e6)
    each, alone = (statistics.median(times[name]) for name in ("call", "direct"))
    return {
        "frames": len(own),
        "files": len({frame.filename for frame in own}),
        "functions": entered,
        "microseconds": round(each, 1),
        "direct": round(alone, 1),
        "ratio": round(each / alone, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kernel, results = Nothing(), {}
    kernel_compat.register_attention("nothing_flash", kernel=kernel)
    inner = kernel_compat.attention_function("nothing_flash")
    case = ""

    def forward(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        results[case] = measured(kernel, lambda: inner(module, query, key, value, attention_mask, **kwargs))
        return inner(module, query, key, value, attention_mask, **kwargs)

    mask = kernel_compat.mask_function("nothing_flash")
    kernel_compat.register_attention("timed_flash", kernel=kernel, forward=forward, mask=mask)
    kernel_compat.install(unproven="allow")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    model = transformers.LlamaModel._from_config(config, attn_implementation="timed_flash").bfloat16()
    ids = torch.ones(2, 8, dtype=torch.long)
    padding = torch.ones(2, 8, dtype=torch.long)
    padding[0, :3] = 0
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 5, "max_length_k": 5}
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    triangle = torch.ones(8, 8, dtype=torch.bool).tril().expand(2, 1, 8, 8)
    cases: dict[str, dict[str, Any]] = {
        "dense": {"input_ids": ids},
        "padded": {"input_ids": ids, "attention_mask": padding},
        "packed by offsets": {"input_ids": ids[:1], "position_ids": positions, **packed},
        "packed by positions": {"input_ids": ids[:1], "position_ids": positions},
        "4D mask": {"input_ids": ids, "attention_mask": triangle},
    }
    for case, inputs in cases.items():  # noqa: B007
        with torch.no_grad():
            model(**inputs, use_cache=False)
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{'':22}{'frames':>8}{'files':>7}{'functions':>11}{'µs':>8}{'direct':>8}{'ratio':>7}")
    for name, row in results.items():
        numbers = (row["microseconds"], row["direct"], row["ratio"])
        print(
            f"{name:22}{row['frames']:8}{row['files']:7}{row['functions']:11}{numbers[0]:8}{numbers[1]:8}{numbers[2]:7}"
        )


if __name__ == "__main__":
    main()
