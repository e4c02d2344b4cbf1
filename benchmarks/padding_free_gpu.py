"""What padding_free saves: a padded batch over the same tokens packed by hand, and over transformers' own attentions.

Run by hand on a GPU: python benchmarks/padding_free_gpu.py --out DIR. Writes padding_free.json, padding_free_gpu.md and, if matplotlib is
installed, padding_free_gpu.svg and padding_free_step.svg. All but the first can be written again from padding_free.json on any machine:

    uv run --no-project --with matplotlib benchmarks/padding_free_gpu.py --from DIR/padding_free.json --out DIR

bfloat16. It measures as attention_gpu.py does, and memory in a call of its own, above what is allocated before it. The curves are the losses
of training on this project's documentation, a byte a token; sdpa on the rows in reverse order shows what rounding alone changes. --tiny runs small problems on the CPU, to test the script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attention_gpu import (
    BOTH,
    FORWARD,
    LLAMA,
    TINY,
    Cell,
    attempt,
    command,
    describe,
    host_ms,
    measure,
    options,
    plotter,
    recorded,
    running_ms,
)
from layers_gpu import Results as Pairs

try:
    import torch
    import transformers
    from torch import Tensor

    import kernel_compat
    from kernel_compat import ops
    from kernel_compat.models import padding_free, use_liger_kernel
except ImportError:  # --from needs neither
    if not any(argument.startswith("--from") for argument in sys.argv):
        raise

LENGTH, VOCABULARY = 2048, 128256
#: Real tokens of the rows: 8952 of 16384.
LENGTHS = (2048, 1664, 1408, 1152, 960, 768, 576, 376)
STEPS, STEP = 200, "training step"
NAME, OURS = "padding_free_flash", "padding_free, OpsConfig.auto"
REVERSED = "sdpa, rows in reverse order"
COLORS = ("tab:gray", "tab:orange", "tab:blue")
#: By part: the title, and a ratio of the second candidate's time to the first's, for pairs without a target of their own.
PARTS = {
    "model": ("Llama of 1B shape, 8 x 2048, half of it padding", 1.0),
    "step": ("A training step of Llama of 1B shape with a vocabulary of 128,256", 1.0),
}


def lengths_of(shrink: int, padded: bool = True) -> list[int]:
    return [max(1, length // shrink) if padded else LENGTH // shrink for length in LENGTHS]


def padded_batch(rows: list[Tensor], length: int, device: str) -> dict[str, Tensor]:
    """Rows padded on the right, with labels that are the tokens."""
    ids = torch.stack([torch.nn.functional.pad(row, (0, length - len(row))) for row in rows])
    mask = torch.arange(length) < torch.tensor([[len(row)] for row in rows])
    given = {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}
    return {name: value.to(device) for name, value in given.items()}


def batch(device: str, shrink: int, vocabulary: int, padded: bool = True) -> dict[str, Tensor]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths_of(shrink, padded)]
    return padded_batch(rows, LENGTH // shrink, device)


def corpus(device: str, shrink: int, steps: int) -> Iterator[dict[str, Tensor]]:
    """Batches of random pieces of the documentation."""
    files = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files)))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (len(LENGTHS),), generator=generator).tolist()
        rows = [text[start : start + length] for start, length in zip(starts, lengths_of(shrink), strict=True)]
        yield padded_batch(rows, LENGTH // shrink, device)


def packed_by_hand(given: dict[str, Tensor]) -> dict[str, Any]:
    """The same tokens in one row, with given lengths; no sequence predicts the next one's first token."""
    mask = given["attention_mask"].bool()
    lengths = mask.sum(1)
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    labels = given["labels"].clone()
    labels[:, 0] = -100
    found: dict[str, Any] = {"input_ids": given["input_ids"], "position_ids": positions, "labels": labels}
    found = {name: value[mask][None] for name, value in found.items()}
    longest = int(lengths.max())
    return {**found, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}


def build(name: str, vocabulary: int, device: str) -> Any:
    torch.manual_seed(0)
    shape = {**(TINY if device == "cpu" else LLAMA), "vocab_size": vocabulary, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(**shape, num_attention_heads=32, pad_token_id=0, use_cache=False)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        return transformers.LlamaForCausalLM._from_config(config, attn_implementation=name, dtype=dtype)


def no_gradients(model: Any, given: dict[str, Any]) -> None:
    with torch.no_grad():
        model(**given)


def both(model: Any, given: dict[str, Any]) -> None:
    model.zero_grad()
    model(**given).loss.backward()


def step(model: Any, optimizer: Any, given: dict[str, Any]) -> Tensor:
    loss: Tensor = model(**given).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def peak(cell: Cell) -> None:
    """Record the memory of a call in GiB, above what was allocated before it."""
    if not torch.cuda.is_available():
        return
    with attempt(cell):
        cell.run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        cell.run()
        torch.cuda.synchronize()
        cell.facts["memory"] = (torch.cuda.max_memory_allocated() - before) / 2**30


def pair(
    case: str, mode: str, target: float, memory: float, first: tuple[str, Any], second: tuple[str, Any]
) -> list[Cell]:
    """Two candidates, and the highest accepted ratios of the second's time and memory to the first's."""
    cells = [Cell(case, mode, name, "installed", 1, run) for name, run in (first, second)]
    cells[1].facts.update(target=target, memory_target=memory)
    return cells


def model_part(shrink: int, device: str) -> Iterator[list[Cell]]:
    own = "sdpa" if device == "cpu" else "flash_attention_2"
    vocabulary = 32000 if device == "cuda" else 100
    for padded in (True, False):
        given = batch(device, shrink, vocabulary, padded)
        free, plain, upstream = (build(name, vocabulary, device) for name in (NAME, NAME, own))
        padding_free(free)
        by_hand = packed_by_hand(given)
        for mode, run in ((FORWARD, no_gradients), (BOTH, both)):
            ours = ("padding_free", partial(run, free, given))
            pairs = [(1.01, 1.01, "without padding_free", partial(run, plain, given))]
            if padded:
                pairs = [
                    (1.03, 1.03, "packed by hand", partial(run, plain, by_hand)),
                    (1 / 1.75, 1.0, f"transformers' {own}", partial(run, upstream, given)),
                    (1.0, 1.0, "with padding", partial(run, plain, given)),
                ]
            for target, memory, name, other in pairs:
                yield pair("half padding" if padded else "no padding", mode, target, memory, (name, other), ours)


def chosen(model: Any) -> None:
    values = ops.OpsConfig.auto(model=model).values()
    del values["attn_implementation"]
    ops.apply_ops(model, ops.OpsConfig(**values))


def without_padding(model: Any) -> None:
    chosen(model)
    padding_free(model)


def upstreams(device: str) -> dict[str, tuple[str, Callable[[Any], Any]]]:
    """The candidates without the library: an attention, and what is done with the model."""
    found: dict[str, tuple[str, Callable[[Any], Any]]] = {"sdpa": ("sdpa", lambda model: None)}
    if device == "cuda":
        found["flash_attention_2, Liger"] = ("flash_attention_2", use_liger_kernel)
    return found


def trained(name: str, prepare: Callable[[Any], Any], device: str, rate: float) -> tuple[Any, Any]:
    """A model and its optimizer, transformers' default."""
    model = build(name, VOCABULARY if device == "cuda" else 256, device)
    prepare(model)
    return model, torch.optim.AdamW(model.parameters(), lr=rate, fused=True)


def step_part(shrink: int, device: str) -> Iterator[list[Cell]]:
    given = batch(device, shrink, VOCABULARY if device == "cuda" else 256)
    by_hand = packed_by_hand(given)
    free = (OURS, partial(step, *trained(NAME, without_padding, device, 1e-5), given))
    packed = partial(step, *trained(NAME, chosen, device, 1e-5), by_hand)
    yield pair("half padding", STEP, 1.03, 1.03, ("packed by hand, OpsConfig.auto", packed), free)
    del packed
    targets = {"sdpa": (1 / 2.35, 1 / 4), "flash_attention_2, Liger": (1 / 1.58, 0.6)}
    for name, (attention, prepare) in upstreams(device).items():
        theirs = partial(step, *trained(attention, prepare, device, 1e-5), given)
        yield pair("half padding", STEP, *targets[name], (name, theirs), free)


def curves(device: str, shrink: int) -> dict[str, list[float]]:
    """The losses of the same steps by each candidate."""
    found = {}
    candidates = upstreams(device)
    for name, (attention, prepare) in {
        **candidates,
        OURS: (NAME, without_padding),
        REVERSED: candidates["sdpa"],
    }.items():
        model, optimizer = trained(attention, prepare, device, 1e-4)
        batches = corpus(device, shrink, STEPS if device == "cuda" else 5)
        if name == REVERSED:
            batches = ({key: rows.flip(0) for key, rows in given.items()} for given in batches)
        found[name] = [float(step(model, optimizer, given)) for given in batches]
        del model, optimizer
    return found


def run(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    device, shrink, begun = ("cpu", 64, time.monotonic()) if args.tiny else ("cuda", 1, time.monotonic())
    transformers.logging.set_verbosity_error()
    kernel = "flash_attention_reference" if args.tiny else args.kernel
    kernel_compat.register_attention(NAME, kernel=kernel)
    kernel_compat.install(unproven="allow")
    results: dict[str, Any] = {"environment": describe(device), "kernel": kernel, "cells": []}
    for part, pairs in (("model", model_part), ("step", step_part)):
        for cells in pairs(shrink, device) if part in args.parts else ():
            for cell in cells:
                if cell.mode != FORWARD:
                    peak(cell)
            measure(cells, host_ms if args.tiny else running_ms, 2 if args.tiny else 15, begun + args.seconds)
            results["cells"] += recorded(part, cells)
            (out / "padding_free.json").write_text(json.dumps(results))
            print(f"{part}, {cells[0].case}, {cells[0].mode}: {time.monotonic() - begun:.0f} s", flush=True)
            del cells, cell
    if "curves" in args.parts:
        results["curves"] = curves(device, shrink)
    (out / "padding_free.json").write_text(json.dumps(results))
    return results


class Results(Pairs):
    """The measurements. Needs no torch."""

    parts, name = PARTS, "padding_free_gpu"

    def __init__(self, results: dict[str, Any]) -> None:
        super().__init__(results)
        self.curves, self.kernel = results.get("curves"), results["kernel"]

    def markdown(self, plotted: bool) -> str:
        """All tables as Markdown."""
        text = [f"{super().markdown(plotted)}\nKernel: `{self.kernel}`."]
        measured = [pair for part in self.parts for pair in self.pairs(part) if all("memory" in cell for cell in pair)]
        if measured:
            text += ["", "### Memory of a training step, above what is allocated before it", ""]
            text += ["| | first, GiB | second, GiB | ratio | at most | |", "| --- | --- | --- | --- | --- | --- |"]
        for first, second in measured:
            ratio, target = second["memory"] / first["memory"], second["memory_target"]
            label = f"{first['case']}, {first['mode']}: {second['name']} over {first['name']}"
            sizes = f"{first['memory']:.2f} | {second['memory']:.2f} | {ratio:.3f} | {target:.3g}"
            text.append(f"| {label} | {sizes} | {'pass' if ratio <= target else 'miss'} |")
        if self.curves:
            names, losses = list(self.curves), list(self.curves.values())
            text += ["", f"Losses of {len(losses[0])} steps, from {losses[0][0]:.2f} to {losses[0][-1]:.2f}:", ""]
            for name, found in zip(names[1:], losses[1:], strict=True):
                apart = [abs(a - b) for a, b in zip(losses[0], found, strict=True)]
                text.append(
                    f"- {name} differs from {names[0]} by {statistics.fmean(apart):.1e} on average, {max(apart):.1e} at most"
                )
        return "\n".join(text) + "\n"

    def candidates(self, part: str, mode: str) -> dict[str, dict[str, Any]]:
        """The candidates on the padded batch: times of all pairs, and memory."""
        found: dict[str, dict[str, Any]] = {}
        for cell in (cell for pair in self.pairs(part) for cell in pair):
            if cell["case"] == "half padding" and cell["mode"] == mode and cell["ms"]:
                one = found.setdefault(cell["name"], {"ms": [], "memory": cell.get("memory", 0.0)})
                one["ms"] += cell["ms"]
        return found

    def plot(self, path: Path) -> bool:
        """The times of the model; and in a plot of its own a step's time, its memory and the losses."""
        pyplot = plotter(path)
        if pyplot is None:
            return False

        def bars(axis: Any, title: str, values: dict[str, float], colors: Sequence[str]) -> None:
            drawn = axis.barh([name.replace(", ", ",\n") for name in values], list(values.values()), color=colors)
            axis.bar_label(drawn, [f"{value:.{0 if value >= 100 else 1}f}" for value in values.values()], padding=2)
            axis.invert_yaxis()
            axis.set(title=title)
            axis.margins(x=0.15)

        def times(part: str, mode: str) -> dict[str, float]:
            found = {name: statistics.median(one["ms"]) for name, one in self.candidates(part, mode).items()}
            return dict(sorted(found.items(), key=lambda one: -one[1]))

        figure, axes = pyplot.subplots(1, 2, figsize=(8, 2.3), layout="constrained")
        for axis, mode in zip(axes, (FORWARD, BOTH), strict=True):
            bars(axis, f"{mode}, ms", times("model", mode), COLORS[-1:])
        axes[1].set_yticks([])
        figure.savefig(path, metadata={"Date": None})
        if self.curves:
            steps = self.candidates("step", STEP)
            figure, axes = pyplot.subplots(1, 3, figsize=(11, 2.8), layout="constrained")
            shown = {name: steps[name] for name in self.curves if name in steps}
            medians = {name: statistics.median(one["ms"]) for name, one in shown.items()}
            bars(axes[0], "a training step, ms", medians, COLORS)
            bars(axes[1], "its memory, GiB", {name: one["memory"] for name, one in shown.items()}, COLORS)
            axes[1].set_yticks([])
            drawn = [name for name in self.curves if name != REVERSED]
            for name, color, style in zip(drawn, COLORS, ("-", "--", ":"), strict=False):
                axes[2].plot(self.curves[name], style, color=color, label=name)
            axes[2].set(title="loss", xlabel="step")
            axes[2].legend()
            figure.savefig(path.with_name("padding_free_step.svg"), metadata={"Date": None})
        return True


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__, "padding_free.json", [*PARTS, "curves"], 300)
    parser.add_argument("--kernel", default="flash_attention_2")
    command(parser, argv, run, Results, "padding_free_gpu")


if __name__ == "__main__":
    main()
