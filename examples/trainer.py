"""A private attention name in a Trainer run: the losses are those of eager attention.

The reference kernel runs on any machine; on a GPU, bind the name to "flash_attention_2" or to "auto" instead.
"""

from __future__ import annotations

import tempfile

import torch
import transformers

import kernel_compat

NAME = "acme_flash_attention"


def dataset() -> list[dict[str, list[int]]]:
    """Sequences of 8 to 24 tokens, which the collator pads."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 25, (32,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, 100, (n,), generator=generator).tolist()} for n in lengths]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A padded batch."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def losses(name: str) -> list[float]:
    """The losses of 8 steps under an attention name."""
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=8, learning_rate=0.01, logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=dataset(), data_collator=collate)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    transformers.PrinterCallback.on_log = lambda *args, **kwargs: None  # the losses are printed once, below
    kernel_compat.register_attention(NAME, kernel="flash_attention_reference")
    kernel_compat.install()
    ours, eager = losses(NAME), losses("eager")
    print("loss:", *(f"{loss:.3f}" for loss in ours))
    print("equal to eager's:", torch.allclose(torch.tensor(ours), torch.tensor(eager), atol=1e-4))
