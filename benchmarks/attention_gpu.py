"""Compare torch's varlen attention with FlashAttention's own packages, called directly and through a Llama of 1B shape.

Run by hand on a GPU: python benchmarks/attention_gpu.py --out DIR. Writes results.json, attention_gpu.md and, if matplotlib is
installed, attention_gpu.svg. The last two can be written again from results.json on any machine:

    uv run --no-project --with matplotlib benchmarks/attention_gpu.py --from DIR/results.json --out DIR

bfloat16, causal. The candidates of a table take turns, round by round, so that a drifting clock affects all of them; times are
medians over the rounds, ratios are medians of the ratios of each round. Before timing, kernels are compared with float64 and models
with the first model that runs. A kernel's time is device time: its calls are queued while the device is kept busy; host time has a
table of its own. --tiny runs small problems on the CPU with the reference kernel, to test the script.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

try:
    import torch

    import kernel_compat
    from kernel_compat.kernels.reference import flash_attn_varlen_func as reference
except ImportError:  # --from needs neither
    if not any(argument.startswith("--from") for argument in sys.argv):
        raise

FORWARD, BOTH = MODES = ("forward", "forward+backward")
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CASES = ([4096] * 4, [16384], [512] * 8)
PADDED, PACKED = [4096, 3584, 2560, 2048], [4096, 3072, 2048, 1024, 5120, 1024]
LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32000}
TINY = {"hidden_size": 512, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100}
#: By name: the situation (see `situated`), the module of flash_attn_varlen_func (or ":" and a kernel's name), the modes.
KERNELS = {
    "torch varlen": ("installed", "torch", MODES),
    "flash_attention_torch": ("installed", ":flash_attention_torch", MODES),
    "torch varlen, again": ("installed", "torch", MODES),  # the difference of two equal measurements
    "FA2": ("installed", "flash_attn", MODES),
    "FA3 forward": ("installed", "fa3_fwd_interface", (FORWARD,)),
    "FA4": ("installed", "flash_attn.cute", MODES),
    "torch varlen, FA4 active": ("FA4", "torch", MODES),
    "flash_attention_torch, FA4 active": ("FA4", ":flash_attention_torch", MODES),
}
#: By name: the situation, and the kernel to register; None for transformers' own flash_attention_2.
MODELS = {
    "transformers' own flash_attention_2": ("upstream", None),
    "flash_attention_2": ("installed", "flash_attention_2"),
    "flash_attention_torch": ("installed", "flash_attention_torch"),
    "flash_attention_torch, FA4 active": ("FA4", "flash_attention_torch"),
    "flash_attention_4": ("installed", "flash_attention_4"),
}
#: (candidate, base, lowest accepted ratio of their speeds).
TARGETS = (("flash_attention_torch", "torch varlen", 0.99), ("torch varlen, FA4 active", "FA4", 0.95))
TITLES = {
    "kernels": "Kernels: ms / TFLOP/s / speed over torch varlen",
    "host": "The host's part of a call: µs / speed over torch varlen",
    "model": "Llama of 1B shape: ms (synchronisations of a forward)",
}


@dataclass
class Cell:
    """One number of a table: a candidate on one input in one mode, and its samples or the reason why there are none."""

    case: str
    mode: str
    name: str
    situation: str
    calls: int
    run: Callable[[], Any] = lambda: None
    ms: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


@contextmanager
def attempt(*cells: Cell) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        for cell in cells:
            cell.reason = f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"


@contextmanager
def situated(situation: str) -> Iterator[None]:
    """Without kernel-compat ("upstream"), with it ("installed"), or with it and torch's FlashAttention-4 backend ("FA4")."""
    with ExitStack() as stack:
        if situation != "upstream":
            stack.enter_context(kernel_compat.installed())
        if situation == "FA4":
            stack.enter_context(kernel_compat.use_torch_flash_backend("FA4"))
        yield


def measure(cells: list[Cell], sample: Callable[[Cell], float], rounds: int, deadline: float) -> None:
    """Fill in the samples. The first round is discarded; past the deadline three rounds are enough.

    The order is random in each round, because the device's temperature depends on the previous candidate.
    """
    orders = random.Random(0)
    for number in range(rounds + 1):
        if number > 3 and time.monotonic() > deadline:
            break
        order = orders.sample(cells, len(cells))
        for situation in dict.fromkeys(cell.situation for cell in order if not cell.reason):
            todo = [cell for cell in order if cell.situation == situation and not cell.reason]
            with attempt(*todo), situated(situation):
                for cell in todo:
                    with attempt(cell):
                        cell.ms.append(round(sample(cell), 6))
    for cell in cells:
        del cell.ms[0:1]


def recorded(part: str, cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Measured cells as they are written to the file of measurements."""
    return [
        {
            **{"part": part, "case": cell.case, "mode": cell.mode, "name": cell.name},
            **{"ms": [] if cell.reason else cell.ms, **cell.facts, "reason": cell.reason},
        }
        for cell in cells
    ]


def host_ms(cell: Cell) -> float:
    """Host time of a call with almost no work for the device, in ms; on the CPU the time of the call."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    cell.run()
    synchronize()
    start = time.perf_counter()
    for _ in range(cell.calls):
        cell.run()
    synchronize()
    return (time.perf_counter() - start) * 1e3 / cell.calls


def running_ms(cell: Cell) -> float:
    """Device time of a call among others, in ms, as in a training loop: the device is busy at the start and may become idle."""
    for _ in range(2):
        cell.run()
    return _timed(cell)[0]


def device_ms(cell: Cell) -> float:
    """Device time of a call in ms; all calls are queued before the first one starts.

    The same number of untimed calls comes first, so that the candidate itself and not the one before it determines the device's clocks
    and temperature.
    """
    cell.run()
    for head_start in (4, 16, 64):
        torch.cuda.synchronize()
        torch.cuda._sleep(int(head_start * 2e6))  # clock cycles, about 2e6 a millisecond
        for _ in range(cell.calls):
            cell.run()
        ms, overtaken = _timed(cell)
        if not overtaken:
            return ms
    cell.facts["remark"] = "the call waits for the device, so its time includes the host's"
    return ms


def _timed(cell: Cell) -> tuple[float, bool]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(cell.calls):
        cell.run()
    end.record()
    overtaken = start.query()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / cell.calls, overtaken


def kernel(source: str) -> Callable[..., Any]:
    """A candidate as (q, k, v, offsets, longest) -> output."""
    if source == "torch":
        varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        gqa = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
        causal = partial(varlen_attn, window_size=(-1, 0), **gqa)
        return lambda q, k, v, cu, longest: causal(q, k, v, cu, cu, longest, longest)
    ours = source.startswith(":")
    owner: Any = kernel_compat.known_kernels()[source[1:]].load() if ours else importlib.import_module(source)
    function = owner.flash_attn_varlen_func

    def call(q: Any, k: Any, v: Any, cu: Any, longest: int) -> Any:
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
        out = function(q, k, v, **lengths, causal=True)
        return out[0] if isinstance(out, tuple) else out

    return call


class Inputs:
    """Random inputs, and in float64 the outputs of the last queries of each sequence and the gradients through them."""

    def __init__(self, lengths: list[int], device: str) -> None:
        tail, total = min(64, *lengths), sum(lengths)
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
        self.leaves = [torch.randn(total, heads, HEAD_DIM, **options) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        self.plain = [x.detach() for x in self.leaves]
        self.gradient = torch.randn_like(self.plain[0])
        offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
        self.lengths = (offsets.to(torch.int32), max(lengths))
        last = torch.cat([end - tail + torch.arange(tail, device=device) for end in offsets[1:]])
        exact = [x.double().requires_grad_() for x in self.plain]
        some = torch.arange(len(lengths) + 1, device=device) * tail
        out = reference(exact[0][last], exact[1], exact[2], some, offsets, tail, max(lengths), causal=True)
        gradients = torch.autograd.grad(out, exact, self.gradient[last].double())
        self.last, self.expected = last, {FORWARD: (out.detach(),), BOTH: gradients}

    def run(self, call: Callable[..., Any], mode: str, gradient: Any) -> Any:
        if mode == FORWARD:
            return (call(*self.plain, *self.lengths),)
        return torch.autograd.grad(call(*self.leaves, *self.lengths), self.leaves, gradient)

    def error(self, call: Callable[..., Any], mode: str) -> float:
        """The relative error of a kernel's output, or the largest one of its gradients, against float64.

        Raises:
            ArithmeticError: it is larger than rounding explains, or some values are not finite.
        """
        poison = [torch.full_like(x, math.nan) for x in self.plain * 2]
        del poison  # the next allocations contain NaN
        found = self.run(call, mode, torch.zeros_like(self.gradient).index_copy(0, self.last, self.gradient[self.last]))
        numbers = all(bool(x.isfinite().all()) for x in found)
        if mode == FORWARD:
            found = (found[0][self.last],)
        errors = [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, self.expected[mode], strict=True)]
        # bfloat16 rounds by 2^-8: the weights and the output; in a backward also the weights' gradient and the result.
        allowed = (2 if mode == FORWARD else 4) * 2**-8
        if not numbers or max(errors) > allowed:
            raise ArithmeticError(f"wrong: errors {errors}, rounding explains {allowed}; all finite: {numbers}")
        return max(errors)


def flops(lengths: list[int], mode: str) -> float:
    """Operations as FlashAttention counts them: half of all pairs of queries and keys; a backward is 2.5 forwards."""
    return 4 * HEADS * HEAD_DIM * sum(n * n / 2 for n in lengths) * (1 if mode == FORWARD else 3.5)


def kernel_cells(case: str, lengths: list[int], device: str, calls: int | None) -> list[Cell]:
    inputs, cells = Inputs(lengths, device), []
    for mode in MODES:
        several = calls or max(3, min(20, round(3e12 / flops(lengths, mode))))  # some milliseconds
        for name, (situation, source, modes) in KERNELS.items():
            if mode in modes:
                cells.append(cell := Cell(case, mode, name, situation, several))
                with attempt(cell), situated(situation):
                    call = kernel(source)
                    cell.facts["error"] = inputs.error(call, mode)
                    cell.run = partial(inputs.run, call, mode, inputs.gradient)
    return cells


def batches(padded: list[int], packed: list[int], vocabulary: int, device: str) -> dict[str, Callable[[], Any]]:
    """Each call makes new tensors for mask and lengths, because lengths read from a tensor are kept as long as it lives."""
    # Padding on the left: there a dropped mask changes the tokens after it.
    mask = (max(padded) - torch.arange(max(padded)) <= torch.tensor(padded)[:, None]).long().to(device)
    ids, row = (torch.randint(vocabulary, shape, device=device) for shape in (mask.shape, (1, sum(packed))))
    positions = torch.cat([torch.arange(n) for n in packed])[None].to(device)
    offsets = torch.tensor([0, *packed]).cumsum(0).to(device, torch.int32)

    def lengths() -> dict[str, Any]:
        longest = dict.fromkeys(("max_length_q", "max_length_k"), max(packed))
        return dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), offsets.clone()) | longest

    return {
        "padded": lambda: {"input_ids": ids, "attention_mask": mask.clone()},
        "position_ids": lambda: {"input_ids": row, "position_ids": positions.clone()},
        "cu_seq_lens": lambda: {"input_ids": row, "position_ids": positions.clone(), **lengths()},
    }


def build(attention: str, shape: dict[str, int], device: str) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    config = transformers.LlamaConfig(**shape, **heads, max_position_embeddings=16384)
    torch.manual_seed(0)  # the same model under every name
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.to(torch.bfloat16).eval()


def step(model: Any, batch: Callable[[], Any], mode: str) -> Any:
    inputs = batch()
    if mode == FORWARD:
        with torch.no_grad():
            return model(**inputs, use_cache=False).logits
    model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    return model.zero_grad()


def model_cells(padded: list[int], packed: list[int], shape: dict[str, int], device: str) -> list[Cell]:
    cells: list[Cell] = []
    first: dict[str, Any] = {}
    made = batches(padded, packed, shape["vocab_size"], device)
    for name, (situation, of) in MODELS.items():
        mine = [Cell(case, mode, name, situation, 6 if mode == FORWARD else 4) for mode in MODES for case in made]
        cells += mine
        if of is not None:
            kernel_compat.register_attention(f"bench_{of}", kernel=of)
        with attempt(*mine), situated(situation):
            model = build("flash_attention_2" if of is None else f"bench_{of}", shape, device)
            for cell in mine:
                cell.run = partial(step, model, made[cell.case], cell.mode)
                with attempt(cell):
                    logits = cell.run()
                    if cell.mode == FORWARD:
                        check_model(cell, logits, made[cell.case](), first)
    return cells


def check_model(cell: Cell, logits: Any, batch: dict[str, Any], first: dict[str, Any]) -> None:
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    some = logits[real][::16].double()
    expected = first.setdefault(cell.case, some)
    cell.facts["distance"] = distance = float((some - expected).norm() / expected.norm())
    if not distance <= 0.1:  # rounding makes 0.01, sequences that see each other 1
        raise ArithmeticError(f"wrong: its logits are {distance:.2g} away from the first row's")
    if torch.cuda.is_available():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                cell.run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        cell.facts["synchronisations"] = sum("called a synchronizing" in str(warning.message) for warning in caught)


def describe(device: str) -> dict[str, str]:
    found = kernel_compat.Environment.detect()
    machine = {"device": "CPU" if device == "cpu" else torch.cuda.get_device_name()}
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        machine["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
    machine |= {"Python": found.python, **found.packages, "torch": str(torch.__version__)}
    return machine | ({"problems": " ".join(found.problems)} if found.problems else {})


def run(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    device, shrink, begun = ("cpu", 64, time.monotonic()) if args.tiny else ("cuda", 1, time.monotonic())
    if args.tiny:
        KERNELS["reference"] = ("installed", ":flash_attention_reference", MODES)
        MODELS["reference"] = ("installed", "flash_attention_reference")
    results: dict[str, Any] = {"environment": describe(device), "lengths": {}, "cells": []}

    def enter(part: str, cells: list[Cell], sample: Callable[[Cell], float], rounds: int) -> None:
        measure(cells, host_ms if args.tiny else sample, rounds, begun + args.seconds)
        results["cells"] += recorded(part, cells)
        (out / "results.json").write_text(json.dumps(results))
        print(f"{part}, {cells[0].case} ...: {time.monotonic() - begun:.0f} s", flush=True)

    with kernel_compat.installed():  # makes the nested blocks cheap
        for whole in CASES if "kernels" in args.parts else ():
            lengths = [n // shrink for n in whole]
            case = f"{len(lengths)} x {lengths[0]}"
            results["lengths"][case] = lengths
            enter("kernels", kernel_cells(case, lengths, device, 2 if args.tiny else None), device_ms, args.rounds)
        if "host" in args.parts:
            enter("host", kernel_cells("2 x 16", [16] * 2, device, 2 if args.tiny else 100), host_ms, args.rounds)
    if "model" in args.parts:
        padded, packed = ([n // shrink for n in lengths] for lengths in (PADDED, PACKED))
        cells = model_cells(padded, packed, TINY if args.tiny else LLAMA, device)
        enter("model", cells, running_ms, max(2, args.rounds // 3))
    return results


class Results:
    """The measurements by part, case, mode and name. Needs no torch."""

    def __init__(self, results: dict[str, Any]) -> None:
        self.environment, self.lengths = results["environment"], results["lengths"]
        place = itemgetter("part", "case", "mode", "name")
        self.cells: dict[tuple[str, ...], dict[str, Any]] = {place(cell): cell for cell in results["cells"]}

    def among(self, part: str, index: int) -> list[str]:
        """The cases, modes or names of a part."""
        return list(dict.fromkeys(key[index] for key in self.cells if key[0] == part))

    def ms(self, key: tuple[str, ...]) -> list[float]:
        return list(self.cells.get(key, {}).get("ms", ()))

    def speeds(self, key: tuple[str, ...], base: tuple[str, ...]) -> list[float]:
        """How many times as fast as the base, in each round."""
        return [b / a for a, b in zip(self.ms(key), self.ms(base), strict=False)]

    def median(self, key: tuple[str, ...]) -> float:
        return statistics.median(self.ms(key) or [math.nan])

    def tflops(self, key: tuple[str, ...]) -> float:
        return flops(self.lengths[key[1]], key[2]) / self.median(key) * 1e-9

    def shown(self, *key: str) -> str:
        if not self.ms(key):
            return "-"
        if key[0] == "model":
            count = self.cells[key].get("synchronisations")
            return f"{self.median(key):.3g}" + ("" if count is None else f" ({count})")
        ratio = statistics.median(self.speeds(key, (*key[:3], "torch varlen")) or [math.nan])
        if key[0] == "host":
            return f"{self.median(key) * 1e3:.0f} / {ratio:.2f}"
        return f"{self.median(key):.3g} / {self.tflops(key):.0f} / {ratio:.2f}"

    def targets(self) -> Iterator[list[str]]:
        def judged(what: str, key: tuple[str, ...], base: tuple[str, ...], least: float, count: int = 0) -> list[str]:
            ratios = self.speeds(key, base)
            if len(ratios) < 2:
                return [what, "-", f"{least}", "not measured"]
            low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
            verdict = "pass" if median >= least and count <= 2 else "miss" + f", {count} synchronisations" * (count > 2)
            return [what, f"{median:.3f} ({low:.3f} to {high:.3f})", f"{least}", verdict]

        for case, mode, (name, base, least) in product(self.among("kernels", 1), MODES, TARGETS):
            if sum(self.lengths[case]) == max(map(sum, self.lengths.values())):
                at = ("kernels", case, mode)
                yield judged(f"{name} over {base}, {case}, {mode}", (*at, name), (*at, base), least)
        for name, mode in product(self.among("model", 3), MODES):
            packed, given = ("model", "position_ids", mode, name), ("model", "cu_seq_lens", mode, name)
            count = self.cells["model", "position_ids", FORWARD, name].get("synchronisations", 0)
            yield judged(f"position_ids over cu_seq_lens, {name}, {mode}", packed, given, 0.98, count)

    def markdown(self, plotted: bool) -> str:
        """All tables as Markdown."""

        def table(title: str, head: list[str], rows: Iterable[list[str]]) -> str:
            lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
            return "\n".join([f"### {title}", "", *lines, ""])

        text = ["Measured on " + ", ".join(f"{name} {value}" for name, value in self.environment.items()) + ".\n"]
        errors = [[c["error"] for k, c in self.cells.items() if k[2] == mode and "error" in c] for mode in MODES]
        if all(errors):
            found = "{:.1e} for outputs and {:.1e} for gradients".format(*map(max, errors))
            text.append(f"Largest error of a kernel against float64: {found}.\n")
        text += ["![Rates of the kernels, times of the model](attention_gpu.svg)\n"] if plotted else []
        for part, title in TITLES.items():
            columns = list(product(self.among(part, 1), MODES))
            rows = [[name, *(self.shown(part, *column, name) for column in columns)] for name in self.among(part, 3)]
            text += [table(title, ["", *map(", ".join, columns)], rows)] if rows else []
        head = ["speed", "median (middle half)", "at least", "and at most 2 synchronisations"]
        text.append(table("Targets", head, self.targets()))
        remarks: dict[str, dict[str, None]] = {}
        for (part, _, mode, name), cell in self.cells.items():
            if remark := cell["reason"] or cell.get("remark"):
                remarks.setdefault(f"- {name}: {remark}", {})[f"{part} {mode}"] = None
        text += ["### Remarks\n"] if remarks else []
        text += [f"{remark} ({', '.join(where)})" for remark, where in remarks.items()]
        return "\n".join(text) + "\n"

    def plot(self, path: Path) -> bool:
        pyplot = plotter(path)
        if pyplot is None:
            return False

        figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")
        for axis, (part, mode) in zip(axes.flat, product(("kernels", "model"), MODES), strict=True):
            cases, known = self.among(part, 1), [name for name in self.among(part, 3) if "again" not in name]
            names = [name for name in known if any(self.ms((part, case, mode, name)) for case in cases)]
            for number, name in enumerate(names):
                keys = [(part, case, mode, name) for case in cases]
                heights = [self.tflops(key) if part == "kernels" else self.median(key) for key in keys]
                places = [place + (number - len(names) / 2) * 0.8 / len(names) for place in range(len(cases))]
                colour = f"C{known.index(name)}"
                axis.bar(places, heights, 0.8 / len(names), align="edge", label=name, color=colour)
            axis.set_xticks(range(len(cases)), cases)
            axis.set(title=f"{part}, {mode}", ylabel="TFLOP/s" if part == "kernels" else "ms")
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2) if names else axis.remove()
        figure.savefig(path, metadata={"Date": None})
        return True


def plotter(path: Path) -> Any:
    """matplotlib's pyplot, set up to write the same file for the same numbers; None if it isn't installed."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed; --from makes it elsewhere")
        return None
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": path.name, "font.size": 8})
    from matplotlib import pyplot

    return pyplot


def options(text: str | None, source: str, parts: Sequence[str], seconds: float) -> argparse.ArgumentParser:
    """The options of the GPU benchmarks; `source` names the file of measurements."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR")
    parser.add_argument(
        "--from", type=Path, dest="source", metavar=source, help="read measurements instead of measuring"
    )
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--seconds", type=float, default=seconds, help="after so many start no round beyond the third")
    parser.add_argument("--tiny", action="store_true", help="on the CPU")
    return parser


def command(
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    run: Callable[[argparse.Namespace, Path], dict[str, Any]],
    kind: Callable[[dict[str, Any]], Any],
    name: str,
) -> None:
    """Measure, or read measurements, and write the tables and the plot."""
    args = parser.parse_args(argv)
    if not (args.source or args.tiny or torch.cuda.is_available()):
        parser.error("no CUDA device is visible; --tiny tries the script without one")
    args.out.mkdir(parents=True, exist_ok=True)
    results = kind(json.loads(args.source.read_text()) if args.source else run(args, args.out))
    text = results.markdown(results.plot(args.out / f"{name}.svg"))
    (args.out / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__, "results.json", list(TITLES), 180)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of kernels; models get half as many")
    command(parser, argv, run, Results, "attention_gpu")


if __name__ == "__main__":
    main()
