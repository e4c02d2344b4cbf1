"""ms-swift's loader, arguments and training under a registered name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import kernel_compat

os.environ.setdefault("USE_HF", "1")
pytest.importorskip("swift.arguments")

import torch
from framework_ranks import batch, step
from frameworks import preferences
from tiny import NAME


def arguments(model: Path, rows: Path, folder: Path, name: str, **more: Any) -> Any:
    from swift.arguments import SftArguments

    what = {
        "model": str(model),
        "model_type": "llama",
        "template": "default",
        "dataset": [str(rows)],
        "attn_impl": name,
    }
    how = {"torch_dtype": "float32", "bf16": False, "fp16": False, "tuner_type": "full", "use_cpu": True, "seed": 0}
    steps = {"max_steps": 20, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1}
    none = {"report_to": ["none"], "save_strategy": "no", "eval_strategy": "no", "split_dataset_ratio": 0}
    workers = {"dataset_num_proc": 1, "dataloader_num_workers": 0, "gradient_checkpointing": False}
    return SftArguments(output_dir=str(folder / "out"), **{**what, **how, **steps, **none, **workers, **more})


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for row in preferences():
            turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]
            print(json.dumps({"messages": turns}), file=file)
    return path


def test_the_loader(model: Path, installed: Any) -> None:
    from swift.model import get_model_processor

    ours, eager = (
        get_model_processor(str(model), model_type="llama", torch_dtype=torch.float32, attn_impl=name)[0]
        for name in (NAME, "eager")
    )
    assert ours.config._attn_implementation == NAME
    for packed in (False, True):
        found, expected = step(ours, batch(packed)), step(eager, batch(packed))
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-6)


def test_packing_takes_the_name(model: Path, rows: Path, tmp_path: Path) -> None:
    kernel_compat.register_attention(NAME, kernel="flash_attention_reference")
    for feature in ("packing", "padding_free"):
        with kernel_compat.installed(skip=["ms_swift_padding_free"]), pytest.raises(ValueError, match=feature):
            arguments(model, rows, tmp_path, NAME, **{feature: True})
        with kernel_compat.installed():
            assert arguments(model, rows, tmp_path, NAME, **{feature: True}).attn_impl == NAME
            with pytest.raises(ValueError, match=feature):
                arguments(model, rows, tmp_path, "sdpa", **{feature: True})


@pytest.mark.slow
def test_training(model: Path, rows: Path, tmp_path: Path, installed: Any) -> None:
    """Without padding, the loss of every step is eager's with padding."""
    from swift import sft_main

    losses = []
    for name, more in (("eager", {}), (NAME, {"padding_free": True})):
        log = sft_main(arguments(model, rows, tmp_path, name, **more))["log_history"]
        losses.append(torch.tensor([entry["loss"] for entry in log if "loss" in entry], dtype=torch.float64))
    assert len(losses[0]) == 20
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
