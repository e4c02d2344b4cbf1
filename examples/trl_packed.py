"""Packed supervised fine-tuning with TRL under a private attention name: no token sees another sequence of its row.

TRL compares attention names with a list of its own: kernel-compat's shims have it take registered names for flash attention.
"""

from __future__ import annotations

import logging
import tempfile

import datasets
import tokenizers
import torch
import transformers
from trl import SFTConfig, SFTTrainer

import kernel_compat

NAME = "acme_flash_attention"
TEXTS = ["to be or not to be", "that is the question", "the rest is silence", "brevity is the soul of wit"] * 8


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token a word."""
    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def losses(name: str) -> list[float]:
    """The losses of 8 steps under an attention name."""
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder, packing=True, max_length=24, max_steps=8, learning_rate=0.02, logging_steps=1, report_to=[],
            use_cpu=True, bf16=False, disable_tqdm=True, gradient_checkpointing=False,
        )  # fmt: skip
        rows = datasets.Dataset.from_dict({"text": TEXTS})
        trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer())
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    datasets.disable_progress_bars()
    logging.getLogger("trl").setLevel(logging.ERROR)
    transformers.PrinterCallback.on_log = lambda *args, **kwargs: None  # the losses are printed once, below
    kernel_compat.register_attention(NAME, kernel="flash_attention_reference")
    kernel_compat.install()
    ours, eager = losses(NAME), losses("eager")
    print("loss:", *(f"{loss:.3f}" for loss in ours))
    print("equal to eager's:", torch.allclose(torch.tensor(ours), torch.tensor(eager), atol=1e-4))
