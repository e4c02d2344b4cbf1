"""What sinks from the log-sum-exp cost, and what flash_attention_flex and kernel="auto" save, against sdpa with a mask in full.

Run by hand on a GPU: python benchmarks/layers_gpu.py --out DIR. Writes layers.json, layers_gpu.md and, if matplotlib is installed,
layers_gpu.svg. The last two can be written again from layers.json on any machine:

    uv run --no-project --with matplotlib benchmarks/layers_gpu.py --from DIR/layers.json --out DIR

bfloat16. It measures as attention_gpu.py does. --tiny runs small problems on the CPU, to test the script.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from attention_gpu import (
    BOTH,
    FORWARD,
    Cell,
    attempt,
    command,
    describe,
    device_ms,
    host_ms,
    measure,
    options,
    plotter,
    recorded,
    running_ms,
)

try:
    import torch
    import transformers
    from torch import Tensor
    from torch.nn.functional import scaled_dot_product_attention

    import kernel_compat
    from kernel_compat import ops
except ImportError:  # --from needs neither
    if not any(argument.startswith("--from") for argument in sys.argv):
        raise

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
NAME = "auto_flash"
#: By part: the title, the highest accepted ratio of the second candidate's time to the first's.
PARTS = {
    "sinks": ("Sinks of gpt-oss's shape: 64 query heads, 8 key heads, head dimension 64", 1.05),
    "masks": ("Packed sequences as a mask", 1.0),
    "mixed": ("A model of Gemma 4's shape on packed sequences", 0.2),
}


def inputs(tokens: int, heads: int, kv_heads: int, head_dim: int, device: str) -> tuple[list[Tensor], Tensor]:
    """q, k and v of a packed row, (tokens, heads, head_dim), and the gradient of the output."""
    torch.manual_seed(0)
    shapes = [(tokens, count, head_dim) for count in (heads, kv_heads, kv_heads)]
    q, k, v, grad = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in (*shapes, shapes[0]))
    return [x.requires_grad_() for x in (q, k, v)], grad


def lengths_of(lengths: tuple[int, ...], device: str) -> dict[str, Any]:
    """The arguments of a variable-length kernel."""
    cu = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    return {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}


def attend(function: Callable[..., Tensor], arguments: list[Tensor], grad: Tensor | None, **given: Any) -> None:
    if grad is None:
        with torch.no_grad():
            function(*arguments[:3], **given)
    else:
        torch.autograd.grad(function(*arguments[:3], **given), arguments, grad)


def sinks(shrink: int, device: str) -> Iterator[list[Cell]]:
    names = ("flash_attention_2", "flash_attention_3", "flash_attention_torch")
    for name in ("flash_attention_reference",) if device == "cpu" else names:
        kernel = kernel_compat.known_kernels()[name]
        if kernel.unavailable_because(kernel_compat.Environment.detect()):
            continue
        function, backward = kernel.load().flash_attn_varlen_func, kernel.features.backward
        for count in (4, 1):
            lengths = (TOKENS // shrink // count,) * count
            qkv, grad = inputs(sum(lengths), 64, 8, 64, device)
            s_aux = torch.randn(64, device=device, dtype=torch.bfloat16, requires_grad=True)
            call = partial(attend, function, causal=True, **lengths_of(lengths, device))
            case = f"{name}, {count} x {lengths[0]}"
            for mode, g in ((FORWARD, None), (BOTH, grad))[: 1 + backward]:
                yield [
                    Cell(case, mode, "without", "installed", 4, partial(call, qkv, g)),
                    Cell(case, mode, "with sinks", "installed", 4, partial(call, [*qkv, s_aux], g, s_aux=s_aux)),
                ]


def masks(shrink: int, device: str) -> Iterator[list[Cell]]:
    function = kernel_compat.known_kernels()["flash_attention_flex"].load().flash_attn_varlen_func
    lengths = tuple(length // shrink for length in LENGTHS)
    given = lengths_of(lengths, device)
    places = torch.arange(sum(lengths), device=device, dtype=torch.int32)
    document = torch.bucketize(places, given["cu_seqlens_q"][1:], right=True)
    seen = (document[:, None] == document[None]).tril()

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
        return scaled_dot_product_attention(*rows, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)

    for heads, kv_heads, head_dim in ((32, 8, 128), (8, 4, 256), (8, 1, 512)):
        qkv, grad = inputs(sum(lengths), heads, kv_heads, head_dim, device)
        case = f"{heads} / {kv_heads} heads of {head_dim}, {sum(lengths)} tokens"
        for mode, g in ((FORWARD, None), (BOTH, grad))[: 1 if device == "cpu" else 2]:
            yield [
                Cell(case, mode, "sdpa", "installed", 1, partial(attend, sdpa, qkv, g)),
                Cell(
                    case,
                    mode,
                    "flash_attention_flex",
                    "installed",
                    1,
                    partial(attend, function, qkv, g, causal=True, **given),
                ),
            ]


def mixed(shrink: int, device: str) -> Iterator[list[Cell]]:
    kernel_compat.register_attention(NAME, kernel="auto")
    kernel_compat.install(unproven="allow")
    tiny = {"num_hidden_layers": 5, "layer_types": GEMMA4["layer_types"][:5]}
    config = transformers.Gemma4TextConfig(**{**GEMMA4, **(tiny if device == "cpu" else {})})
    lengths = [length // shrink for length in LENGTHS]
    ids = torch.randint(3, 32000, (1, sum(lengths)), device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]

    def forward(model: Any) -> Tensor:
        states: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        return states

    def no_gradients(model: Any) -> None:
        with torch.no_grad():
            forward(model)

    def step(model: Any) -> None:
        model.zero_grad()
        forward(model).float().square().mean().backward()

    models: dict[str, Any] = {}
    for name in ("sdpa", NAME):
        torch.manual_seed(0)
        models[name] = transformers.Gemma4TextModel._from_config(
            copy.deepcopy(config), attn_implementation=name, dtype=torch.bfloat16
        ).to(device)
        with torch.no_grad():
            for layer in models[name].layers:  # the scores aren't scaled: a trained model's norms keep them small
                layer.self_attn.q_norm.weight.mul_(layer.self_attn.head_dim**-0.5)
    with torch.no_grad():
        exact = forward(copy.deepcopy(models["sdpa"]).float()).cpu()
        errors = [float((forward(model).float().cpu() - exact).norm() / exact.norm()) for model in models.values()]
    case = f"{config.num_hidden_layers} layers, {sum(lengths)} tokens"
    for operations in ("", ", OpsConfig.auto in both")[: 1 if device == "cpu" else 2]:
        if operations:
            for model in models.values():
                chosen = ops.OpsConfig.auto(model=model).values()
                del chosen["attn_implementation"]
                ops.apply_ops(model, ops.OpsConfig(**chosen))
        for mode, call in ((FORWARD, no_gradients), (BOTH, step)):
            cells = [
                Cell(case + operations, mode, name, "installed", 1, partial(call, model))
                for name, model in models.items()
            ]
            with attempt(*cells):
                for cell, error in zip(cells, errors, strict=True):
                    cell.facts["error"] = error
                if not errors[1] < 1.25 * errors[0]:
                    raise ArithmeticError(f"wrong: errors of {errors} against float32")
            yield cells


def run(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    device, shrink, begun = ("cpu", 64, time.monotonic()) if args.tiny else ("cuda", 1, time.monotonic())
    transformers.logging.set_verbosity_error()
    results: dict[str, Any] = {"environment": describe(device), "cells": []}
    for part, pairs in (("sinks", sinks), ("masks", masks), ("mixed", mixed)):
        sample = running_ms if part == "mixed" else device_ms
        for cells in pairs(shrink, device) if part in args.parts else ():
            rounds = 2 if args.tiny else 15 if part == "sinks" else 5
            measure(cells, host_ms if args.tiny else sample, rounds, begun + args.seconds)
            results["cells"] += recorded(part, cells)
            (out / "layers.json").write_text(json.dumps(results))
            print(f"{part}, {cells[0].case}, {cells[0].mode}: {time.monotonic() - begun:.0f} s", flush=True)
    return results


class Results:
    """The measurements. Needs no torch.

    Attributes:
        parts: `PARTS`. A pair's own target, a fact of its second cell, goes before the part's.
        name: of the plot.
    """

    parts: dict[str, tuple[str, float]] = PARTS
    name = "layers_gpu"

    def __init__(self, results: dict[str, Any]) -> None:
        self.environment, self.cells = results["environment"], results["cells"]

    def pairs(self, part: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        cells = [cell for cell in self.cells if cell["part"] == part]
        return list(zip(cells[::2], cells[1::2], strict=True))

    def markdown(self, plotted: bool) -> str:
        """All tables as Markdown."""
        text = ["Measured on " + ", ".join(f"{name} {value}" for name, value in self.environment.items()) + ".", ""]
        text += [f"![Times of the candidates]({self.name}.svg)", ""] if plotted else []
        remarks: dict[str, None] = {}
        for part, (title, of_part) in self.parts.items():
            if not (pairs := self.pairs(part)):
                continue
            names = [cell["name"] for cell in pairs[0]]
            if any([cell["name"] for cell in pair] != names for pair in pairs):
                names = ["first", "second"]
            rows = [["", *(f"{name}, ms" for name in names), "ratio (middle half)", "at most", ""], ["---"] * 6]
            for pair in pairs:
                target = pair[1].get("target", of_part)
                label = f"{pair[0]['case']}, {pair[0]['mode']}"
                if names == ["first", "second"]:
                    label += f": {pair[1]['name']} over {pair[0]['name']}"
                times = [f"{statistics.median(cell['ms']):.3f}" if cell["ms"] else "-" for cell in pair]
                ratios = [b / a for a, b in zip(pair[0]["ms"], pair[1]["ms"], strict=False)]
                if len(ratios) < 2:
                    measured, verdict = "-", "not measured"
                else:
                    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
                    measured = f"{median:.3f} ({low:.3f} to {high:.3f})"
                    verdict = "pass" if median <= target else "miss"
                rows.append([label, *times, measured, f"{target:.3g}", verdict])
                for cell in pair:
                    if remark := cell["reason"] or cell.get("remark"):
                        remarks[f"- {label}, {cell['name']}: {remark}"] = None
                    if "error" in cell:
                        remarks[f"- {cell['name']}: outputs have an error of {cell['error']:.2e} against float32"] = (
                            None
                        )
            text += [f"### {title}", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
        return "\n".join([*text, *(["### Remarks", "", *remarks] if remarks else [])]).rstrip() + "\n"

    def plot(self, path: Path) -> bool:
        pyplot = plotter(path)
        if pyplot is None:
            return False

        figure, axes = pyplot.subplots(
            1, len(self.parts), figsize=(4.3 * len(self.parts), 4.5), layout="constrained", squeeze=False
        )
        for axis, part in zip(axes[0], self.parts, strict=True):
            pairs = [pair for pair in self.pairs(part) if pair[0]["ms"] and pair[1]["ms"]]
            labels = [f"{pair[0]['case']},\n{pair[0]['mode']}" for pair in pairs]
            if not pairs:
                axis.remove()
                continue
            for number in (0, 1):
                values = [statistics.median(pair[number]["ms"]) for pair in pairs]
                places = [place + 0.4 * number for place in range(len(pairs))]
                bars = axis.barh(places, values, 0.4, align="edge", label=pairs[0][number]["name"])
                axis.bar_label(bars, [f"{ms:.{0 if ms >= 100 else 2}f}" for ms in values], padding=2)
            axis.set_yticks([place + 0.4 for place in range(len(pairs))], labels)
            axis.invert_yaxis()
            axis.set(title=part, xlabel="ms")
            axis.margins(x=0.15)
            axis.legend()
        figure.savefig(path, metadata={"Date": None})
        return True


def main(argv: list[str] | None = None) -> None:
    command(options(__doc__, "layers.json", list(PARTS), 240), argv, run, Results, "layers_gpu")


if __name__ == "__main__":
    main()
