"""Packed sequences of a hybrid model spread over two ranks in a Trainer run: the losses are those of one rank."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from torch.distributed.run import main as torchrun

import kernel_compat

over = kernel_compat.ContextParallel()  # over all ranks


class ContextParallelTrainer(transformers.Trainer):
    """A Trainer whose ranks share each batch."""

    def get_train_dataloader(self):  # type: ignore[no-untyped-def]
        """The same batches on every rank."""
        return torch.utils.data.DataLoader(self.train_dataset, self.args.train_batch_size, collate_fn=pack)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore[no-untyped-def]
        """The rank's share; each rank has counted the tokens of the whole batch."""
        return super().compute_loss(
            model, over.shard(inputs), return_outputs, num_items_in_batch / self.args.world_size
        )


def pack(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sequences in one row; no token predicts the first of another one."""
    ids, positions = torch.cat(rows)[None], torch.cat([torch.arange(len(row)) for row in rows])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def train(file: str) -> None:
    """Train for 6 steps on this rank, and write the losses to a file. On GPUs, use kernel="auto"."""
    kernel_compat.register_attention("flash_over_ranks", "flash_attention_reference", context_parallel=over)
    kernel_compat.install()
    transformers.set_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Lfm2Config(**sizes, num_key_value_heads=2, layer_types=["conv", "full_attention"])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flash_over_ranks")
    data = [torch.randint(3, 100, (n,)) for n in (30, 8, 17, 21, 39, 12, 9, 25)]
    options = {"max_steps": 6, "learning_rate": 0.01, "logging_steps": 1, "report_to": [], "disable_tqdm": True}
    arguments = transformers.TrainingArguments(f"{file}.out", per_device_train_batch_size=4, use_cpu=True, **options)
    (trainer := ContextParallelTrainer(model, arguments, train_dataset=data)).train()
    Path(file).write_text(json.dumps([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))


if __name__ == "__main__":
    transformers.PrinterCallback.on_log = lambda *args, **kwargs: None  # the losses are printed once, below
    if len(sys.argv) > 1:
        train(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            for ranks in "12":
                torchrun(["--standalone", f"--nproc-per-node={ranks}", __file__, f"{folder}/{ranks}"])
            one, two = (json.loads(Path(folder, ranks).read_text()) for ranks in "12")
        print("loss:", *(f"{loss:.3f}" for loss in two))
        print("equal to one rank's:", torch.allclose(torch.tensor(one), torch.tensor(two), atol=1e-4))
