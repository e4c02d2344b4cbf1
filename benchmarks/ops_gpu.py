"""Compare the kernels of kernel selection with eager code and with their libraries called directly; time a training step.

Run by hand on a GPU, with liger-kernel, flash-linear-attention and quack-kernels installed: python benchmarks/ops_gpu.py --out DIR.
Writes ops.json, ops_gpu.md and, if matplotlib is installed, ops_gpu.svg. The last two can be written again from ops.json:

    uv run --no-project --with matplotlib benchmarks/ops_gpu.py --from DIR/ops.json --out DIR

bfloat16. The candidates of a case take turns, round by round; times are medians over the rounds, speeds are medians of the ratios of
each round. Before timing, every candidate is compared with the first of its case. Memory is the peak of one call above the memory
allocated before it. --tiny runs small problems on the CPU with chunk_loss, to test the script.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

from attention_gpu import (
    BOTH,
    FORWARD,
    MODES,
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

    from kernel_compat import ops
    from kernel_compat_ops import registry
except ImportError:  # --from needs neither
    if not any(argument.startswith("--from") for argument in sys.argv):
        raise

EAGER, DIRECT, OURS, MEMORY, AGAIN = "eager", "directly", "ours", "memory", ", again"
LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
TOKENS = 16384
PARTS = ("kernels", "loss", "step")
LIGER = {
    f"{op}_implementation": "liger_kernel" for op in ("cross_entropy_loss", "rms_norm", "swiglu_mlp", "rotary_pos_emb")
}
#: (part, candidate, base, quantity, lowest accepted ratio); None for two equal candidates, whose difference is the noise.
TARGETS = (
    ("kernels", "liger_kernel", "liger-kernel, directly", "speed", 0.98),
    ("kernels", "fla", "flash-linear-attention, directly", "speed", 0.98),
    ("kernels", "fused_triton", "liger-kernel, directly", "speed", 0.98),
    ("loss", "liger_kernel", "liger-kernel, directly", "speed", 0.98),
    ("loss", f"liger-kernel, directly{AGAIN}", "liger-kernel, directly", "speed", None),
    ("loss", "liger_kernel", EAGER, MEMORY, 5.0),
    ("loss", "chunk_loss", EAGER, MEMORY, 5.0),
    ("step", "liger_kernel", "liger-kernel's own patching", "speed", 0.99),
    ("step", "OpsConfig.auto", "liger-kernel's own patching", "speed", 1.0),
    ("step", f"liger-kernel's own patching{AGAIN}", "liger-kernel's own patching", "speed", None),
    ("step", "liger_kernel", "liger-kernel's own patching", MEMORY, 1 / 1.02),
)

#: A function or module that computes a case from its inputs.
Candidate = Callable[..., Any]


def randn(*shape: int, scale: float = 1.0, grad: bool = True) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return (torch.randn(*shape, device=device, dtype=torch.float32) * scale).bfloat16().requires_grad_(grad)


def chosen(module: Any, **values: str) -> Any:
    """Apply kernels to a module; returns the module."""
    ops.apply_ops(module, ops.OpsConfig(**{f"{op}_implementation": value for op, value in values.items()}))
    return module


def kernel_of(op: str, value: str, variant: str) -> Callable[..., Any]:
    (spec,) = [s for s in registry.registered_kernels(op) if s.name == value and s.variant == variant]
    return spec.load()


def modeling(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def made(build: Callable[[], Any]) -> Any:
    """Build a module on the device, with the same weights at every call."""
    torch.manual_seed(0)
    return build().to("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)


if "torch" in globals():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    class Rotating(torch.nn.Module):
        """The rotation of an attention layer with the code before and after it."""

        def __init__(self) -> None:
            super().__init__()
            self.rotary_emb = LlamaRotaryEmbedding(LlamaConfig(hidden_size=256, num_attention_heads=4))

        def forward(self, query: Any, key: Any, cos: Any, sin: Any) -> Any:
            shape = (*query.shape[:2], -1, cos.shape[-1])
            query = query.neg().view(shape).transpose(1, 2)
            key = key.neg().view(shape).transpose(1, 2)
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
            return torch.cat([query.transpose(1, 2).flatten(2), key.transpose(1, 2).flatten(2)], -1)


# Cases. Each returns its inputs and, by name, functions that build the candidates; one that can't run here raises.


def rms_norm(hidden: int, tokens: int) -> tuple[list[Any], dict[str, Callable[[], Candidate]]]:
    """The output's gradient comes from another function and has no other user, so that Liger may write into it."""

    def build() -> Any:
        module = made(lambda: modeling("llama").LlamaRMSNorm(hidden, 1e-6))
        torch.nn.init.normal_(module.weight)
        return module

    def directly() -> Candidate:
        from liger_kernel.transformers.functional import liger_rms_norm

        module = build()
        return lambda x: used(liger_rms_norm(x, module.weight, 1e-6, 0.0, "llama"))

    def bound(**values: str) -> Candidate:
        module = chosen(build(), **values)
        return lambda x: used(module(x))

    def used(x: Any) -> Any:
        return x.neg() if x.requires_grad else x

    return [randn(1, tokens, hidden)], {
        EAGER: bound,
        "liger-kernel, directly": directly,
        "liger_kernel": lambda: bound(rms_norm="liger_kernel"),
        "triton": lambda: bound(rms_norm="triton"),
    }


def rotary(tokens: int) -> tuple[list[Any], dict[str, Callable[[], Candidate]]]:
    """The inputs are outputs of projections without other users, so that Liger may write into them."""
    heads, groups, width = HEADS.values()
    query, key = randn(1, tokens, heads * width), randn(1, tokens, groups * width)
    angles = torch.outer(torch.arange(tokens), 1e4 ** -(torch.arange(0, width, 2) / width)).to(query.device)
    cos, sin = (getattr(torch.cat([angles] * 2, -1), name)()[None].bfloat16() for name in ("cos", "sin"))

    def bound(value: str) -> Candidate:
        return partial(chosen(Rotating(), rotary_pos_emb=value), cos=cos, sin=sin)

    def directly() -> Candidate:
        from liger_kernel.transformers.rope import liger_rotary_pos_emb

        forward = Rotating.forward
        changed = FunctionType(forward.__code__, {**forward.__globals__, "apply_rotary_pos_emb": liger_rotary_pos_emb})
        return partial(changed, None, cos=cos, sin=sin)

    return [query, key], {
        EAGER: lambda: partial(Rotating(), cos=cos, sin=sin),
        "liger-kernel, directly": directly,
        "liger_kernel": partial(bound, "liger_kernel"),
        "triton": partial(bound, "triton"),
    }


def swiglu(hidden: int, intermediate: int, tokens: int) -> tuple[list[Any], dict[str, Callable[[], Candidate]]]:
    import transformers

    config = transformers.LlamaConfig(hidden_size=hidden, intermediate_size=intermediate)

    def of(value: str | None) -> Candidate:
        module = made(lambda: modeling("llama").LlamaMLP(config))
        return module if value is None else chosen(module, swiglu_mlp=value)  # type: ignore[no-any-return]

    def directly() -> Candidate:
        from liger_kernel.transformers.swiglu import LigerSwiGLUMLP

        return made(lambda: LigerSwiGLUMLP(config))  # type: ignore[no-any-return]

    return [randn(1, tokens, hidden)], {
        EAGER: partial(of, None),
        "liger-kernel, directly": directly,
        "liger_kernel": partial(of, "liger_kernel"),
    }


def gated(rows: int, width: int) -> tuple[list[Any], dict[str, Callable[[], Candidate]]]:
    def of(value: str | None) -> Candidate:
        module = made(lambda: modeling("qwen3_next").Qwen3NextRMSNormGated(width))
        return module if value is None else chosen(module, rms_norm_gated=value)  # type: ignore[no-any-return]

    def directly() -> Candidate:
        from fla.modules import FusedRMSNormGated

        return made(lambda: FusedRMSNormGated(width, eps=1e-6))  # type: ignore[no-any-return]

    return [randn(rows, width), randn(rows, width)], {
        EAGER: partial(of, None),
        "flash-linear-attention, directly": directly,
        "fla": partial(of, "fla"),
    }


def balancing(layers: int, experts: int, top_k: int, tokens: int) -> tuple[list[Any], dict[str, Callable[[], Any]]]:
    upstream = modeling("qwen3_moe").load_balancing_loss_func

    def of(function: Candidate) -> Candidate:
        return lambda *logits: function(logits, experts, top_k)

    # In half precision upstream's gradient is mostly rounding error, and useless as a reference.
    logits = [randn(tokens, experts, grad=False).float().requires_grad_() for _ in range(layers)]
    return logits, {
        EAGER: lambda: of(upstream),
        "triton": lambda: of(kernel_of("load_balancing_loss", "triton", "standard")),
    }


def moe(
    hidden: int, intermediate: int, experts: int, top_k: int, tokens: int
) -> tuple[list[Any], dict[str, Callable[[], Candidate]]]:
    import transformers

    sizes = {"hidden_size": hidden, "moe_intermediate_size": intermediate, "num_experts": experts}
    states = randn(tokens, hidden)
    scores = torch.rand(tokens, experts, device=states.device).topk(top_k)
    index, weights = scores.indices, scores.values.bfloat16()

    def build(implementation: str) -> Any:
        config = transformers.Qwen3MoeConfig(**sizes)
        config._experts_implementation = implementation
        layer = made(lambda: modeling("qwen3_moe").Qwen3MoeExperts(config))
        torch.manual_seed(1)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        return layer

    def of(implementation: str, value: str | None = None) -> Candidate:
        layer = build(implementation)
        if value is not None:
            chosen(layer, moe=value)
        return lambda x: layer(x, index, weights)

    def liger() -> Candidate:
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

        layer, few = build("eager"), index.to(torch.int32)
        return lambda x: LigerFusedMoEFunction.apply(x, layer.gate_up_proj, layer.down_proj, few, weights)

    return [states], {
        EAGER: partial(of, "eager"),
        "transformers' grouped_mm": partial(of, "grouped_mm"),
        "liger-kernel, directly": liger,
        "fused_triton": partial(of, "eager", "fused_triton"),
        "fused_quack": partial(of, "eager", "fused_quack"),
    }


def cases(tiny: bool) -> Iterator[tuple[str, tuple[list[Any], dict[str, Callable[[], Candidate]]]]]:
    few = 64 if tiny else 1
    tokens = TOKENS // few
    yield f"rms_norm {tokens} x 2048", rms_norm(2048, tokens)
    yield f"rms_norm {tokens} x 4096", rms_norm(4096, tokens)
    yield f"rotary_pos_emb {tokens} x (32 + 8) x 64", rotary(tokens)
    yield f"swiglu_mlp {tokens} x 2048 x 8192", swiglu(2048 // few, 8192 // few, tokens)
    yield f"rms_norm_gated {32 * tokens} x 128", gated(32 * tokens, 128)
    yield f"load_balancing_loss 48 x {tokens} x 128", balancing(48 // (few if few == 1 else 16), 128, 8, tokens)
    yield f"moe {tokens} x 2048 x 768 x 128, 8 each", moe(2048 // few, 768 // few, 128 // few, 8 // min(few, 4), tokens)


def parameters(candidate: Any) -> list[Any]:
    """The parameters of a candidate that is a module or has one in its closure."""
    modules = [candidate, *(cell.cell_contents for cell in getattr(candidate, "__closure__", None) or ())]
    found = [p for m in modules if isinstance(m, torch.nn.Module) for p in m.parameters()]
    return list(dict.fromkeys(found))


def once(candidate: Candidate, inputs: list[Any], leaves: list[Any], mode: str, gradients: dict[str, Any]) -> Any:
    if mode == FORWARD:
        with torch.no_grad():
            return (candidate(*(x.detach() for x in inputs)),)
    out = candidate(*inputs)
    return torch.autograd.grad(out, leaves, gradients.setdefault("of the output", torch.randn_like(out)))


def distance(found: Iterable[Any], expected: Iterable[Any]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((x.float() - y.float()).norm() / y.float().norm().clamp_min(1e-12)) for x, y in pairs)


def memory_of(call: Callable[[], Any]) -> int:
    """Peak memory of a second call in bytes, above the memory allocated before it."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def kernel_cells(case: str, inputs: list[Any], candidates: dict[str, Callable[[], Candidate]]) -> list[Cell]:
    cells: list[Cell] = []
    expected: dict[str, Any] = {}
    gradients: dict[str, Any] = {}
    for name, get in candidates.items():
        mine = [Cell(case, mode, name, "upstream", 10) for mode in MODES]
        cells += mine
        with attempt(*mine):
            candidate = get()
            leaves = list(dict.fromkeys([*inputs, *parameters(candidate)]))
            for cell in mine:
                cell.run = partial(once, candidate, inputs, leaves, cell.mode, gradients)
                with attempt(cell):
                    found = [x.detach() for x in cell.run()]
                    reference = expected.setdefault(cell.mode, found)
                    cell.facts["distance"] = distance(found, reference)
                    if not cell.facts["distance"] < 0.05:  # bfloat16 rounds by 0.004; a wrong formula differs by more
                        raise ArithmeticError(f"wrong: {cell.facts['distance']:.2g} away from {EAGER}")
                    del found, reference
    for cell in cells:
        cell.calls = calls_for(cell)
    return cells


def calls_for(cell: Cell) -> int:
    if cell.reason or not torch.cuda.is_available():
        return 2
    cell.run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    cell.run()
    torch.cuda.synchronize()
    return max(2, min(50, round(0.02 / (time.perf_counter() - start))))


# The loss alone and a training step, both of whole models.


def llama(**values: Any) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        **{**LLAMA, **values}, **HEADS, max_position_embeddings=TOKENS, tie_word_embeddings=True, rms_norm_eps=1e-5
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.to(torch.bfloat16).train()


def models(whole: bool, tiny: bool) -> dict[str, Callable[[], tuple[Any, Callable[[], Any]]]]:
    """By name, a function that returns a model and the context manager of its calls."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096} if tiny else {}
    layers = {} if whole and not tiny else {"num_hidden_layers": 2 if whole else 0}

    def of(values: dict[str, str]) -> tuple[Any, Callable[[], Any]]:
        model = llama(**sizes, **layers)
        ops.apply_ops(model, ops.OpsConfig(**values))
        return model, nullcontext

    def liger() -> tuple[Any, Callable[[], Any]]:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
        from liger_kernel.transformers.rope import liger_rotary_pos_emb

        module, model = modeling("llama"), llama(**sizes, **layers)
        before = dict(vars(module))
        parts = dict.fromkeys(("rope", "rms_norm", "swiglu"), whole)
        apply_liger_kernel_to_llama(model=model, cross_entropy=False, fused_linear_cross_entropy=True, **parts)
        vars(module).update(before)  # the module is shared with the other candidates

        @contextmanager
        def within() -> Iterator[None]:  # the other patches are on the model itself
            if whole:
                module.apply_rotary_pos_emb = liger_rotary_pos_emb
            try:
                yield
            finally:
                module.apply_rotary_pos_emb = before["apply_rotary_pos_emb"]

        return model, within

    loss = "cross_entropy_loss_implementation"
    if not whole:
        return {
            EAGER: partial(of, {}),
            "liger-kernel, directly": liger,
            f"liger-kernel, directly{AGAIN}": liger,
            "liger_kernel": partial(of, {loss: "liger_kernel"}),
            "chunk_loss": partial(of, {loss: "chunk_loss"}),
        }
    ours = {
        "chunk_loss": {loss: "chunk_loss"},
        "liger_kernel": LIGER,
        "liger_kernel, chunk_loss": {**LIGER, loss: "chunk_loss"},
        "triton, liger_kernel": {
            **LIGER,
            "rms_norm_implementation": "triton",
            "rotary_pos_emb_implementation": "triton",
        },
    }

    def auto() -> tuple[Any, Callable[[], Any]]:
        model = llama(**sizes, **layers)
        chosen = ops.OpsConfig.auto(model=model).values()
        del chosen["attn_implementation"]  # the same attention for all candidates
        ops.apply_ops(model, ops.OpsConfig(**chosen))
        return model, nullcontext

    return {
        EAGER: partial(of, {}),
        "liger-kernel's own patching": liger,
        f"liger-kernel's own patching{AGAIN}": liger,
        "OpsConfig.auto": auto,
        **{name: partial(of, values) for name, values in ours.items()},
    }


def model_cells(part: str, tiny: bool, names: Iterable[str]) -> list[Cell]:
    whole, tokens = part == "step", TOKENS // (64 if tiny else 1)
    cells: list[Cell] = []
    first: dict[str, float] = {}
    case = f"Llama of 1B shape, {tokens} tokens" if whole else f"{tokens} x 2048 x 128256"
    for name, make in models(whole, tiny).items():
        if names and name not in names:
            continue
        cells.append(cell := Cell(case, BOTH, name, "upstream", 3))
        with attempt(cell):
            model, within = make()
            torch.manual_seed(1)
            vocabulary, hidden = model.config.vocab_size, model.config.hidden_size
            ids = torch.randint(vocabulary, (1, tokens), device=model.device)
            inputs = {"input_ids": ids} if whole else {"inputs_embeds": randn(1, tokens, hidden)}
            optimizer = (
                torch.optim.AdamW(model.parameters(), lr=1e-5, fused=model.device.type == "cuda") if whole else None
            )
            cell.run = partial(train, model, within, {**inputs, "labels": ids}, optimizer)
            cell.facts["loss"] = loss = float(cell.run())
            if abs(loss - first.setdefault(part, loss)) > 0.01 * first[part]:
                raise ArithmeticError(f"wrong: a loss of {loss}, where {EAGER} has {first[part]}")
            if model.device.type == "cuda":
                cell.facts[MEMORY] = memory_of(cell.run)
    return cells


def train(model: Any, within: Callable[[], Any], inputs: dict[str, Any], optimizer: Any) -> Any:
    """One step; returns the loss without synchronising."""
    with within():
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    for given in inputs.values():
        given.grad = None
    return loss.detach()


def run(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    begun = time.monotonic()
    environment = describe("cpu" if args.tiny else "cuda")
    for package in ("liger-kernel", "fla-core", "quack-kernels", "triton"):
        try:
            environment[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    results: dict[str, Any] = {"environment": environment, "cells": []}

    def enter(part: str, cells: list[Cell], sample: Callable[[Cell], float], rounds: int) -> None:
        measure(cells, host_ms if args.tiny else sample, rounds, begun + args.seconds)
        results["cells"] += recorded(part, cells)
        (out / "ops.json").write_text(json.dumps(results))
        print(f"{part}, {cells[0].case}: {time.monotonic() - begun:.0f} s", flush=True)

    if "kernels" in args.parts:
        for case, (inputs, candidates) in cases(args.tiny):
            if not args.only or args.only in case:
                enter("kernels", kernel_cells(case, inputs, candidates), device_ms, args.rounds)
    for part in ("loss", "step"):
        if part in args.parts:
            enter(part, model_cells(part, args.tiny, args.candidates), running_ms, args.rounds)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return results


class Results:
    """The measurements. Needs no torch."""

    def __init__(self, results: dict[str, Any]) -> None:
        self.environment, self.cells = results["environment"], results["cells"]

    def rows(self, part: str) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
        """The case, the mode and the cells of each row."""
        mine = [cell for cell in self.cells if cell["part"] == part]
        for case, mode in dict.fromkeys((cell["case"], cell["mode"]) for cell in mine):
            yield case, mode, [cell for cell in mine if (cell["case"], cell["mode"]) == (case, mode)]

    def markdown(self, plotted: bool) -> str:
        """All tables as Markdown."""

        def table(title: str, head: list[str], rows: Iterable[list[str]]) -> list[str]:
            return [f"### {title}", "", *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)), ""]

        text = ["Measured on " + ", ".join(f"{name} {value}" for name, value in self.environment.items()) + ".", ""]
        text += ["![A training step and the loss alone: time and memory](ops_gpu.svg)", ""] if plotted else []
        for part, title in zip(PARTS, ("Kernels", "The loss alone", "A training step"), strict=True):
            found = list(self.rows(part))
            if not found:
                continue
            rows = [
                [
                    f"{case}, {mode}" if number == 0 else "",
                    cell["name"],
                    f"{_median(cell):.3g}" if cell["ms"] else "-",
                    *(f"{_speed(cell, base):.2f}" if base and cell["ms"] else "-" for base in _bases(cell, cells)),
                    *([f"{cell[MEMORY] / 2**30:.2f}" if MEMORY in cell else "-"] if part != "kernels" else []),
                ]
                for case, mode, cells in found
                for number, cell in enumerate(cells)
            ]
            head = ["", "", "ms", "speed over eager", "over the library"]
            text += table(title, head + (["GiB"] if part != "kernels" else []), rows)
        text += table("Targets", ["", "median (middle half)", "at least", ""], self.targets())
        remarks = dict.fromkeys(
            f"- {cell['case']}, {cell['mode']}, {cell['name']}: {remark}"
            for cell in self.cells
            if (remark := cell["reason"] or cell.get("remark"))
        )
        return "\n".join([*text, *(["### Remarks", "", *remarks] if remarks else [])]).rstrip() + "\n"

    def targets(self) -> Iterator[list[str]]:
        for part, name, base, what, least in TARGETS:
            for case, mode, cells in self.rows(part):
                known = {cell["name"]: cell for cell in cells}
                if name not in known or base not in known:
                    continue
                mine, other = known[name], known[base]
                label = f"{what} of {name} over {base}, {case}, {mode}"
                if what == MEMORY:
                    if MEMORY in mine and MEMORY in other:
                        ratio = other[MEMORY] / mine[MEMORY]
                        yield [label, f"{ratio:.3f}", f"{least:.3f}", "pass" if ratio >= least else "miss"]
                    continue
                ratios = [b / a for a, b in zip(mine["ms"], other["ms"], strict=False)]
                if len(ratios) < 2:
                    yield [label, "-", "-" if least is None else f"{least}", "not measured"]
                    continue
                low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
                measured = f"{median:.3f} ({low:.3f} to {high:.3f})"
                if least is None:
                    yield [label, measured, "-", "the same twice"]
                else:
                    yield [label, measured, f"{least}", "pass" if median >= least else "miss"]

    def plot(self, path: Path) -> bool:
        pyplot = plotter(path)
        if pyplot is None:
            return False

        figure, axes = pyplot.subplots(2, 2, figsize=(11, 6), layout="constrained")
        for row, part in zip(axes, ("step", "loss"), strict=True):
            for axis, what in zip(row, ("ms", MEMORY), strict=True):
                for case, _, cells in self.rows(part):
                    shown = [cell for cell in cells if cell["ms"] and MEMORY in cell]
                    values = [_median(cell) if what == "ms" else cell[MEMORY] / 2**30 for cell in shown]
                    bars = axis.barh(
                        [cell["name"] for cell in shown], values, color=[f"C{n}" for n in range(len(shown))]
                    )
                    axis.bar_label(bars, fmt="%.1f", padding=2)
                    axis.invert_yaxis()
                    title = "ms" if what == "ms" else "GiB above the weights and the optimizer"
                    axis.set(title=f"{'A training step' if part == 'step' else 'The loss alone'}: {case}", xlabel=title)
                    axis.margins(x=0.12)
        figure.savefig(path, metadata={"Date": None})
        return True


def _median(cell: dict[str, Any]) -> float:
    return statistics.median(cell["ms"])


def _speed(cell: dict[str, Any], base: dict[str, Any]) -> float:
    return statistics.median([b / a for a, b in zip(cell["ms"], base["ms"], strict=False)])


def _bases(cell: dict[str, Any], cells: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """The eager candidate, and the library called directly if the cell runs the library's kernel."""
    eager = next((one for one in cells if one["name"] == EAGER and one["ms"]), None)
    library = next((one for one in cells if DIRECT in one["name"] or "own patching" in one["name"]), None)
    ours = cell["name"] in ("liger_kernel", "fla", "fused_triton")
    return [eager, library if library and library["ms"] and ours else None]


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__, "ops.json", PARTS, 300)
    parser.add_argument("--only", metavar="TEXT", help="only kernel cases whose name contains this")
    parser.add_argument(
        "--candidates", nargs="+", default=[], metavar="NAME", help="only these for the loss and the step"
    )
    parser.add_argument("--rounds", type=int, default=15)
    command(parser, argv, run, Results, "ops_gpu")


if __name__ == "__main__":
    main()
