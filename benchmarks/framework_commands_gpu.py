"""Commands of frameworks on one GPU, with one line of this library before them and without: tokens a second, and memory.

    python benchmarks/framework_commands_gpu.py --out DIR [--only trl axolotl]

Writes framework_commands_gpu.json and, if matplotlib is installed, framework_commands_gpu.svg, which can be drawn again anywhere:

    uv run --no-project --with matplotlib benchmarks/framework_commands_gpu.py --from DIR/framework_commands_gpu.json --out DIR

A Llama with random weights is trained in bfloat16 on random words, in texts of log-normal lengths. The commands of a framework differ in
the line before them and in the attention's name alone, so that they train on the same batches; losses are compared. A step's time
is that between the lines which the framework prints of two steps; the first steps are left out. Memory is the most that was in
use on the GPU, and that the process had reserved.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORDS, LONGEST, TEXTS, SEED = 32_000, 2048, 1200, 0
#: Of texts, in words.
MEAN, SIGMA = 700, 0.8
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": WORDS + 4,
    "max_position_embeddings": LONGEST,
}
ROWS = 8
FA4 = "kernel_compat_flash_attention_4"
#: By framework and label: the line before the command, and the attention's name.
RUNS: dict[str, dict[str, tuple[list[str], str]]] = {
    "trl": {
        "sdpa": ([], "sdpa"),
        "flash_attention_2": ([], "flash_attention_2"),
        "kernel-compat run, FA4": (["kernel-compat", "run", "--"], FA4),
        "kernel-compat run, FA4, ops auto, padding-free": (
            ["kernel-compat", "run", "--ops", "auto", "--padding-free", "--"],
            FA4,
        ),
    },
    "axolotl": {
        "sdpa": ([], "sdpa"),
        "flash_attention_2": ([], "flash_attention_2"),
        "kernel-compat run, FA4": (["kernel-compat", "run", "--"], FA4),
        "kernel-compat run, FA4, ops auto": (["kernel-compat", "run", "--ops", "auto", "--"], FA4),
    },
}
TITLES = {"trl": f"trl sft, {ROWS} padded rows", "axolotl": f"axolotl train, packed rows of {LONGEST}"}
_LOSS = re.compile(r"'loss': '?([0-9.]+)")


def make_files(model: Path, texts: Path) -> None:
    """A model with its tokenizer, and texts."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"w{number}" for number in range(WORDS)]
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocabulary = {word: number for number, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {f"{name}_token": word for name, word in zip(("pad", "bos", "eos", "unk"), special, strict=True)}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(model)
    torch.manual_seed(SEED)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, dtype="bfloat16")).save_pretrained(model)
    rng = random.Random(SEED)
    texts.parent.mkdir(exist_ok=True)
    with open(texts, "w") as file:
        for _ in range(TEXTS):
            length = min(LONGEST, max(16, round(rng.lognormvariate(0, SIGMA) * MEAN)))
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=length))}) + "\n")


def line(framework: str, attention: str, model: Path, texts: Path, out: Path, steps: int) -> list[str]:
    """The framework's command."""
    options: dict[str, Any] = {
        "max_steps": steps,
        "learning_rate": 1e-5,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "seed": SEED,
        "bf16": True,
        "save_strategy": "no",
        "attn_implementation": attention,
    }
    if framework == "trl":
        options |= {"model_name_or_path": model, "dtype": "bfloat16", "dataset_name": texts.parent, "output_dir": out}
        options |= {"max_length": LONGEST, "per_device_train_batch_size": ROWS, "report_to": "none"}
        return ["trl", "sft", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    options |= {
        "base_model": str(model),
        "sample_packing": True,
        "micro_batch_size": ROWS,
        "datasets": [{"path": str(texts), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(out / "prepared"),
        "output_dir": str(out),
        "sequence_len": LONGEST,
        "pad_to_sequence_len": True,
        "gradient_accumulation_steps": 1,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "val_set_size": 0,
        "special_tokens": {"pad_token": "<pad>"},
    }
    config = out / "config.yaml"
    config.write_text(json.dumps(options))  # which is YAML, too
    return ["axolotl", "train", str(config)]


def run(command: list[str], skipped: int) -> dict[str, Any]:
    """A command's losses, the times of its steps behind those skipped, and the most memory in use."""
    import pynvml

    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.05):
            most = max(most, pynvml.nvmlDeviceGetMemoryInfo(device).used)

    watcher = threading.Thread(target=watch)
    watcher.start()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    times, losses, log = [], [], []
    assert process.stdout is not None
    for text in process.stdout:
        log.append(text)
        if match := _LOSS.search(text):
            times.append(time.perf_counter())
            losses.append(float(match[1]))
    over.set()
    watcher.join()
    if process.wait():
        print("".join(log)[-6000:])
        return {}
    steps = [b - a for a, b in zip(times[skipped:], times[skipped + 1 :], strict=False)]
    ours = [text.strip() for text in log if text.startswith("kernel-compat")]
    return {"ms": [1e3 * step for step in steps], "losses": losses, "gib": most / 2**30, "said": ours}


def measure(args: argparse.Namespace, file: Path) -> None:
    """Write the results of all commands, each as soon as it is known."""
    from attention_gpu import describe

    model, texts = args.out / "model", args.out / "texts" / "train.jsonl"
    # In a process of its own, whose memory on the GPU isn't the commands'.
    making = multiprocessing.get_context("spawn").Process(target=make_files, args=(model, texts))
    making.start()
    making.join()
    results: dict[str, Any] = {framework: {} for framework in args.only}
    for framework in args.only:
        for label, (before, attention) in RUNS[framework].items():
            out = args.out / f"{framework} {label}".replace(" ", "-").replace(",", "")
            out.mkdir()
            cell = run([*before, *line(framework, attention, model, texts, out, args.steps)], args.skipped)
            results[framework][label] = cell
            file.write_text(json.dumps({"environment": {}, "results": results}, indent=1))
            print(framework, label, cell and f"{statistics.median(cell['ms']):.0f} ms", cell.get("said"), flush=True)
    file.write_text(json.dumps({"environment": describe("cuda"), "results": results}, indent=1))


def rows(results: dict[str, Any]) -> Iterator[str]:
    yield "| command | line and attention | a step, ms | times as fast as sdpa | GPU memory, GiB | losses apart from sdpa's |"
    yield "|---|---|---|---|---|---|"
    for framework, cells in results.items():
        base = cells.get("sdpa")
        for label, cell in cells.items():
            if not cell or not base:
                yield f"| {TITLES[framework]} | {label} | failed | | | |"
                continue
            took = statistics.median(cell["ms"])
            apart = max(abs(a - b) for a, b in zip(cell["losses"], base["losses"], strict=True))
            faster = statistics.median(base["ms"]) / took
            texts = [TITLES[framework], label, f"{took:.0f}", f"{faster:.2f}", f"{cell['gib']:.1f}", f"{apart:.4f}"]
            yield f"| {' | '.join(texts)} |"


def plot(results: dict[str, Any], path: Path) -> None:
    from attention_gpu import plotter

    if (pyplot := plotter(path)) is None:
        return
    figure, axes = pyplot.subplots(
        len(results), 2, figsize=(11, 2.2 * len(results)), layout="constrained", squeeze=False
    )
    for row, (framework, cells) in zip(axes, results.items(), strict=True):
        for axis, unit in zip(row, ("a step, ms", "GPU memory, GiB"), strict=True):
            shown = {label: cell for label, cell in cells.items() if cell}
            values = [statistics.median(cell["ms"]) if unit == "a step, ms" else cell["gib"] for cell in shown.values()]
            bars = axis.barh([*shown], values, color=[f"C{number}" for number in range(len(shown))])
            axis.bar_label(bars, fmt="%.0f", padding=2)
            axis.invert_yaxis()
            axis.set(title=TITLES[framework], xlabel=unit)
            axis.margins(x=0.12)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--from", dest="source", type=Path, help="draw and print the results of this file")
    parser.add_argument("--only", nargs="+", choices=[*RUNS], default=[*RUNS])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--skipped", type=int, default=8)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "framework_commands_gpu.json"
    if args.source is None:
        measure(args, file)
    report = json.loads((args.source or file).read_text())
    print("\n".join(rows(report["results"])))
    plot(report["results"], args.out / "framework_commands_gpu.svg")


if __name__ == "__main__":
    main()
