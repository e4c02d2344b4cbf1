"""A tiny language model, its tokenizer and texts, for the frameworks that are tested on the library."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny import SHAPE

WORDS = [f"w{number}" for number in range(90)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def tokenizer() -> Any:
    """A word a token. No file of the hub is needed."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*SPECIAL, *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )


def saved_model(folder: Path) -> Path:
    """A Llama in float32 with its tokenizer, saved once."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path, attention: str) -> Any:
    """The model, with the same weights under every name."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(3, 14)))


def sentences(count: int = 200) -> list[str]:
    """Texts of different lengths."""
    rng = random.Random(0)
    return [sentence(rng) for _ in range(count)]


def preferences(count: int = 100) -> list[dict[str, str]]:
    """Prompts with a better and a worse completion each."""
    rng = random.Random(0)
    return [{key: sentence(rng) for key in ("prompt", "chosen", "rejected")} for _ in range(count)]
