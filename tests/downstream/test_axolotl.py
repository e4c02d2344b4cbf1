"""axolotl's configuration, loader and training under a registered name: the loss of every step is eager's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("axolotl")

from frameworks import sentences
from tiny import NAME

#: A program: axolotl starts processes that import the main module.
PROGRAM = f"""
import json, sys
from pathlib import Path
import yaml
import kernel_compat

def train(config):
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import train

    path = Path(config["output_dir"] + ".yml")
    path.write_text(yaml.safe_dump(config))
    found = load_cfg(str(path))
    model, _, trainer = train(cfg=found, dataset_meta=load_datasets(cfg=found, cli_args=TrainerCliArgs()))
    assert model.config._attn_implementation == config["attn_implementation"]
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

if __name__ == "__main__":
    config, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    kernel_compat.register_attention({NAME!r}, kernel="flash_attention_reference")
    losses = {{}}
    try:
        with kernel_compat.installed(skip=["axolotl_flash_names"]):
            train({{**config, "attn_implementation": {NAME!r}}})
    except ValueError as error:
        losses["refused"] = str(error)
    with kernel_compat.installed():
        for packed in (False, True):
            for name in ("eager", {NAME!r}):
                how = {{"attn_implementation": name, "sample_packing": packed, "micro_batch_size": 1 if packed else 4}}
                losses[f"{{name}} {{packed}}"] = train({{**config, **how}})
    (folder / "losses.json").write_text(json.dumps(losses))
"""


@pytest.mark.slow
def test_training(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences()))
    config: dict[str, Any] = {
        "base_model": str(model),
        "datasets": [{"path": str(rows), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(tmp_path / "prepared"),
        "dataset_num_proc": 1,
        "output_dir": str(tmp_path / "out"),
        "sequence_len": 64,
        "pad_to_sequence_len": False,
        "gradient_accumulation_steps": 1,
        "max_steps": 10,
        "learning_rate": 1e-3,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "seed": 0,
        "val_set_size": 0,
        "special_tokens": {"pad_token": "<pad>"},
    }
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "AXOLOTL_DO_NOT_TRACK": "1", "KERNEL_COMPAT_UNPROVEN": "allow"}
    command = [sys.executable, str(program), json.dumps(config), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert NAME in losses["refused"]
    for packed in (False, True):
        eager = losses[f"eager {packed}"]
        assert len(eager) == 10
        assert losses[f"{NAME} {packed}"] == pytest.approx(eager, rel=2e-6, abs=2e-6)
