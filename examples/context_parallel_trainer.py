"""A Trainer of transformers', as it is, over two ranks that share each sequence: the losses are those of one rank."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from accelerate import ParallelismConfig
from torch.distributed.run import main as torchrun

import kernel_compat


def pack(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sequences in one row; no token predicts the first of another one."""
    ids, positions = torch.cat(rows)[None], torch.cat([torch.arange(len(row)) for row in rows])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def train(file: str, config: ParallelismConfig | None) -> None:
    """Train for 6 steps on this rank, and write the losses to a file. On GPUs, use kernel="auto" and FSDP2."""
    transformers.set_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    of_model = transformers.Lfm2Config(**sizes, num_key_value_heads=2, layer_types=["conv", "full_attention"])
    model = transformers.AutoModelForCausalLM.from_config(of_model, attn_implementation="flash_over_ranks")
    data = [torch.randint(3, 100, (n,)) for n in (30, 8, 17, 21, 39, 12, 9, 25)]
    options = {"max_steps": 6, "learning_rate": 0.01, "logging_steps": 1, "report_to": [], "disable_tqdm": True}
    options |= {"per_device_train_batch_size": 4, "use_cpu": True, "parallelism_config": config, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(f"{file}.out", **options)
    (trainer := transformers.Trainer(model, arguments, train_dataset=data, data_collator=pack)).train()
    Path(file).write_text(json.dumps([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))


if __name__ == "__main__":
    transformers.PrinterCallback.on_log = lambda *args, **kwargs: None  # the losses are printed once, below
    over = kernel_compat.ContextParallel(kernel_compat.accelerate_mesh)
    kernel_compat.register_attention("flash_over_ranks", "flash_attention_reference", context_parallel=over)
    kernel_compat.install()
    if len(sys.argv) > 1:  # with cp_size=2, sp_size=2 keys travel between two pairs of ranks, which share the heads
        train(sys.argv[1], ParallelismConfig(cp_size=2))
    else:
        with tempfile.TemporaryDirectory() as folder:
            train(f"{folder}/1", None)
            torchrun(["--standalone", "--nproc-per-node=2", __file__, f"{folder}/2"])
            one, two = (json.loads(Path(folder, ranks).read_text()) for ranks in "12")
        print("loss:", *(f"{loss:.3f}" for loss in two))
        print("equal to one rank's:", torch.allclose(torch.tensor(one), torch.tensor(two), atol=1e-4))
