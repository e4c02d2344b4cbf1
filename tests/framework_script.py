"""Scripts as users of frameworks without a command write them, for `framework_commands`: no line of them is this library's.

``framework_script.py CASE MODEL ATTENTION ROWS FOLDER`` trains a model on rows and saves it with its losses in a folder.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 6
ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "seed": 0,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
}


def different_words(completions: list[str], **_: Any) -> list[float]:
    """A reward for TRL's GRPO."""
    return [float(len(set(text.split()))) for text in completions]


def trainer(model: str, attention: str, rows: list[str], out: str) -> None:
    """transformers' Trainer, over as many processes as there are, replicated or, where `accelerate launch` says so, sharded."""
    import transformers

    words = transformers.AutoTokenizer.from_pretrained(model)
    inputs = [words(text, padding="max_length", max_length=16, truncation=True) for text in rows]
    for row in inputs:
        row["labels"] = [-100 if token == words.pad_token_id else token for token in row["input_ids"]]

    kind: Any = transformers.Trainer
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":  # which accelerate leaves out without a GPU
        from fsdp2 import ShardingTrainer

        kind = ShardingTrainer
    kind(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation=attention),
        args=transformers.TrainingArguments(output_dir=out, **ARGUMENTS),
        train_dataset=inputs,
    ).train()


def sentence_transformers(model: str, attention: str, rows: list[str], out: str) -> None:
    import sentence_transformers as st
    from datasets import Dataset
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    encoder = st.SentenceTransformer(model, device="cpu", model_kwargs={"attn_implementation": attention})
    encoder.tokenizer.pad_token = "<pad>"
    st.SentenceTransformerTrainer(
        model=encoder,
        args=st.SentenceTransformerTrainingArguments(output_dir=out, **ARGUMENTS),
        train_dataset=Dataset.from_dict({"anchor": rows[::2], "positive": rows[1::2]}),
        loss=MultipleNegativesRankingLoss(encoder),
    ).train()


CASES: dict[str, Callable[[str, str, list[str], str], None]] = {
    case.__name__: case for case in (trainer, sentence_transformers)
}

if __name__ == "__main__":
    case, model, attention, path, out = sys.argv[1:]
    CASES[case](model, attention, [json.loads(line)["text"] for line in Path(path).read_text().splitlines()], out)
