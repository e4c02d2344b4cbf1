"""What padding_free saves: a padded batch over the same tokens packed by hand, and over transformers' own attentions.

Run by hand on a GPU: python benchmarks/padding_free_gpu.py --out DIR. Writes padding_free.json, padding_free_gpu.md and, if matplotlib is
installed, padding_free_gpu.svg. The last two can be written again from padding_free.json on any machine:

    uv run --no-project --with matplotlib benchmarks/padding_free_gpu.py --from DIR/padding_free.json --out DIR

bfloat16. It measures as attention_gpu.py does, and memory in a call of its own, above what is allocated before it. --tiny runs small
problems on the CPU, to test the script.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
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

ROWS, LENGTH, VOCABULARY = 8, 2048, 128256
STEPS, STEP = 200, "training step"
NAME = "padding_free_flash"
#: By part: the title, and a ratio of the second candidate's time to the first's, for pairs without a target of their own.
PARTS = {
    "model": ("Llama of 1B shape, 8 x 2048, half of it padding", 1.0),
    "step": ("A training step of Llama of 1B shape with a vocabulary of 128,256", 1.0),
}


def batch(device: str, shrink: int, vocabulary: int, padded: bool = True) -> dict[str, Tensor]:
    """Rows of random lengths, half of the length on average, padded on the right; labels that are the tokens."""
    generator = torch.Generator().manual_seed(0)
    length = LENGTH // shrink
    lengths = torch.randint(1, length + 1, (ROWS, 1), generator=generator)
    lengths[0] = length
    if not padded:
        lengths[:] = length
    mask = (torch.arange(length) < lengths).long()
    ids = torch.randint(3, vocabulary, mask.shape, generator=generator).where(mask.bool(), 0)
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), -100)}
    return {name: value.to(device) for name, value in given.items()}


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
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=name, dtype=dtype).to(device)


def no_gradients(model: Any, given: dict[str, Any]) -> None:
    with torch.no_grad():
        model(**given)


def both(model: Any, given: dict[str, Any]) -> None:
    model.zero_grad()
    model(**given).loss.backward()


def step(model: Any, optimizer: Any, given: dict[str, Any]) -> float:
    loss = model(**given).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def peak(cell: Cell) -> None:
    """Record the memory of a call in GiB, above what was allocated before."""
    if not torch.cuda.is_available():
        return
    with attempt(cell):
        cell.run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        cell.run()
        torch.cuda.synchronize()
        cell.facts["remark"] = f"{(torch.cuda.max_memory_allocated() - before) / 2**30:.2f} GiB"


def pair(case: str, mode: str, target: float, first: tuple[str, Any], second: tuple[str, Any]) -> list[Cell]:
    cells = [Cell(case, mode, name, "installed", 1, run) for name, run in (first, second)]
    cells[1].facts["target"] = target
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
            if padded:
                yield pair("half padding", mode, 1.03, ("packed by hand", partial(run, plain, by_hand)), ours)
                yield pair(
                    "half padding", mode, 1 / 1.75, (f"transformers' {own}", partial(run, upstream, given)), ours
                )
                yield pair("half padding", mode, 1.0, ("with padding", partial(run, plain, given)), ours)
            else:
                yield pair("no padding", mode, 1.01, ("without padding_free", partial(run, plain, given)), ours)


def step_part(shrink: int, device: str) -> Iterator[list[Cell]]:
    vocabulary = VOCABULARY if device == "cuda" else 100
    given = batch(device, shrink, vocabulary)
    by_hand = packed_by_hand(given)

    def candidate(name: str, prepare: Callable[[Any], Any] = lambda model: None, inputs: dict[str, Any] = given) -> Any:
        model = build(name, vocabulary, device)
        prepare(model)
        return partial(step, model, torch.optim.AdamW(model.parameters(), lr=1e-5), inputs)

    def chosen(model: Any) -> None:
        values = ops.OpsConfig.auto(model=model).values()
        del values["attn_implementation"]
        ops.apply_ops(model, ops.OpsConfig(**values))

    def ours(model: Any) -> None:
        chosen(model)
        padding_free(model)

    free = ("padding_free, OpsConfig.auto", candidate(NAME, ours))
    own = "sdpa" if device == "cpu" else "flash_attention_2"
    others = [
        (1.03, "packed by hand, OpsConfig.auto", candidate(NAME, chosen, by_hand)),
        (1 / 2.35, "sdpa", candidate("sdpa")),
    ]
    if device == "cuda":
        others.append((1 / 1.58, "flash_attention_2, Liger", candidate(own, use_liger_kernel)))
    for target, name, run in others:
        yield pair("half padding", STEP, target, (name, run), free)


def curves(device: str, shrink: int) -> dict[str, list[float]]:
    """The losses of the same steps on the same batches of a small corpus."""
    vocabulary, found = 100, {}
    for name in ("sdpa", NAME):
        model = build(name, vocabulary, device)
        if name == NAME:
            padding_free(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        given = batch(device, shrink * 8, vocabulary)
        generator = torch.Generator().manual_seed(1)
        rows = [torch.randperm(ROWS, generator=generator)[: ROWS // 2] for _ in range(STEPS if device == "cuda" else 5)]
        found[name] = [
            step(model, optimizer, {key: value[some.to(device)] for key, value in given.items()}) for some in rows
        ]
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
                peak(cell)
            measure(cells, host_ms if args.tiny else running_ms, 2 if args.tiny else 7, begun + args.seconds)
            results["cells"] += recorded(part, cells)
            (out / "padding_free.json").write_text(json.dumps(results))
            print(f"{part}, {cells[0].case}, {cells[0].mode}: {time.monotonic() - begun:.0f} s", flush=True)
    results["curves"] = curves(device, shrink)
    (out / "padding_free.json").write_text(json.dumps(results))
    return results


class Results(Pairs):
    """The measurements. Needs no torch."""

    parts, name = PARTS, "padding_free_gpu"

    def __init__(self, results: dict[str, Any]) -> None:
        super().__init__(results)
        self.curves, self.kernel = results["curves"], results["kernel"]

    def markdown(self, plotted: bool) -> str:
        """All tables as Markdown."""
        first, second = self.curves.values()
        apart = max(abs(a - b) for a, b in zip(first, second, strict=True))
        text = f"Kernel: `{self.kernel}`. Over {len(first)} steps the losses of sdpa and padding_free differ by at most {apart:.1e}.\n"
        return f"{super().markdown(plotted)}\n{text}"

    def plot(self, path: Path) -> bool:
        """The times; and the losses of the steps, in a plot of their own."""
        from attention_gpu import plotter

        if not super().plot(path):
            return False
        figure, axis = plotter(path).subplots(figsize=(5, 3), layout="constrained")
        for (name, losses), style in zip(self.curves.items(), ("-", "--"), strict=True):
            axis.plot(losses, style, label="padding_free" if name == NAME else name)
        axis.set(xlabel="step", ylabel="loss")
        axis.legend()
        figure.savefig(path.with_name("padding_free_curves.svg"), metadata={"Date": None})
        return True


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__, "padding_free.json", list(PARTS), 300)
    parser.add_argument("--kernel", default="flash_attention_2")
    command(parser, argv, run, Results, "padding_free_gpu")


if __name__ == "__main__":
    main()
