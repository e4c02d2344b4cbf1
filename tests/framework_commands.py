"""Frameworks as their users start them: each one's own command on a tiny model, with its exit code, its log and what it trained.

`COMMANDS` has them by name, the framework's first; none has a line of this library in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from framework_script import STEPS
from frameworks import preferences, saved_model, sentences, tokenizer
from packaging.specifiers import SpecifierSet
from safetensors.torch import load_file
from tiny import SHAPE
from torch import Tensor

#: The line of ours.
RUN = ("kernel-compat", "run", "--")
TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Place:
    """The files of a command: what it reads, which all commands share, and the folder that it writes."""

    shared: Path
    out: Path

    @property
    def model(self) -> Path:
        """A Llama in float32."""
        return saved_model(self.shared / "model")

    @property
    def refused(self) -> Path:
        """A model that attends as no flash kernel does: each of its queries chooses its keys."""
        folder = self.shared / "refused"
        if not folder.exists():
            transformers.DogeForCausalLM(transformers.DogeConfig(**SHAPE)).save_pretrained(folder)
            tokenizer().save_pretrained(folder)
        return folder

    @property
    def texts(self) -> Path:
        return self._rows("texts", [{"text": text} for text in sentences()])

    @property
    def preferences(self) -> Path:
        return self._rows("preferences", preferences())

    @property
    def prompts(self) -> Path:
        return self._rows("prompts", [{"prompt": row["prompt"]} for row in preferences()])

    @property
    def messages(self) -> Path:
        roles = {"user": "prompt", "assistant": "chosen"}
        rows = [[{"role": role, "content": row[key]} for role, key in roles.items()] for row in preferences()]
        return self._rows("messages", [{"messages": row} for row in rows])

    def _rows(self, name: str, rows: Sequence[Any]) -> Path:
        """A folder with one file of rows, which `datasets.load_dataset` reads, too."""
        path = self.shared / name / "train.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def config(self, values: dict[str, Any]) -> Path:
        """A configuration file."""
        path = self.out / "config.yaml"
        path.write_text(yaml.safe_dump(values))
        return path


@dataclass(frozen=True)
class Finished:
    """A command that has ended.

    Attributes:
        code: its exit code.
        log: everything that it has printed.
        losses: one for each step, as it has logged them. Empty if it has trained nothing.
        checkpoints: files of weights and optimizers that it has saved.
        parameters: those of a whole model that it has saved.
    """

    code: int
    log: str
    losses: Tensor
    checkpoints: list[Path]
    parameters: dict[str, Tensor]


def of_trainer(out: Path) -> list[float]:
    """The losses in the state of transformers' Trainer, in full precision from 5.0 on."""
    states = sorted(out.rglob("trainer_state.json"))
    return (
        [entry["loss"] for entry in json.loads(states[-1].read_text())["log_history"] if "loss" in entry]
        if states
        else []
    )


@dataclass(frozen=True)
class Command:
    """A framework's command.

    Attributes:
        distribution: the framework's.
        line: the command for a model, an attention name and the files.
        losses: reads the losses from what it has written.
        eager: eager attention's name in it.
        environment: its variables.
        releases: those of the framework that it is started on.
    """

    distribution: str
    line: Callable[[Path, str, Place], Sequence[object]]
    losses: Callable[[Path], list[float]] = of_trainer
    eager: str = "eager"
    environment: dict[str, str] = field(default_factory=dict)
    releases: str = ""

    @property
    def installed(self) -> bool:
        """Whether such a release is in this environment."""
        try:
            return version(self.distribution) in SpecifierSet(self.releases)
        except PackageNotFoundError:
            return False

    def run(self, model: Path, attention: str, place: Place, ours: Sequence[str] = RUN) -> Finished:
        """The command in an activated environment, with a line of ours before it."""
        place.out.mkdir(parents=True)
        variables = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        variables |= {
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        }
        variables |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "VIRTUAL_ENV": sys.prefix}
        variables |= {"HF_DATASETS_CACHE": str(place.shared / "cache"), "PYTHONUNBUFFERED": "1"}
        line = [*ours, *map(str, self.line(model, attention, place))]
        done = subprocess.run(
            line,
            cwd=place.out,
            env=variables | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=600,
        )
        losses = torch.tensor(self.losses(place.out), dtype=torch.float64)
        checkpoints = sorted(
            path for kind in ("model", "optim", "pytorch_model") for path in place.out.rglob(f"{kind}*")
        )
        whole = [path for path in checkpoints if path.name == "model.safetensors"]
        return Finished(done.returncode, done.stdout, losses, checkpoints, load_file(whole[-1]) if whole else {})


#: Arguments that every command line over transformers' Trainer takes.
TRAINER: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "seed": 0,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
}


def options(values: dict[str, Any]) -> list[str]:
    """``--name value`` for each."""
    return [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]


def trl(method: str, rows: str, **more: Any) -> Command:
    def line(model: Path, attention: str, place: Place) -> list[object]:
        what = {"model_name_or_path": model, "attn_implementation": attention}
        data = {"dataset_name": getattr(place, rows).parent, "output_dir": place.out / "trained"}
        absent = {name: value for name, value in more.items() if value is None}  # which an option can't say
        config = ["--config", place.config(absent)] if absent else []
        return ["trl", method, *config, *options({**TRAINER, **what, **data, **more})]

    # Before, eager attention mixes the sequences of a batch without padding: test_trl.py.
    return Command("trl", line, environment={"PYTHONPATH": str(TESTS)}, releases=">=0.23.1")


def script(case: str, distribution: str, *launcher: str) -> Command:
    """A script, for frameworks without a command that trains."""

    def line(model: Path, attention: str, place: Place) -> list[object]:
        return [*launcher, TESTS / "framework_script.py", case, model, attention, place.texts, place.out / "trained"]

    return Command(distribution, line)


def accelerate(*launcher: str) -> Command:
    """On two processes: `--cpu` would start one."""
    both = ("--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0")
    return script("trainer", "accelerate", "accelerate", "launch", *launcher, *both)


def axolotl(packed: bool) -> Command:
    def line(model: Path, attention: str, place: Place) -> list[object]:
        config = {
            "base_model": str(model),
            "attn_implementation": attention,
            "sample_packing": packed,
            "micro_batch_size": 1 if packed else 4,
            "datasets": [{"path": str(place.texts), "ds_type": "json", "type": "completion"}],
            "dataset_prepared_path": str(place.out / "prepared"),
            "dataset_num_proc": 1,
            "output_dir": str(place.out / "trained"),
            "sequence_len": 64,
            "pad_to_sequence_len": False,
            "gradient_accumulation_steps": 1,
            "max_steps": STEPS,
            "learning_rate": 1e-3,
            "optimizer": "adamw_torch",
            "lr_scheduler": "constant",
            "bf16": False,
            "fp16": False,
            "tf32": False,
            "logging_steps": 1,
            "seed": 0,
            "val_set_size": 0,
            "special_tokens": {"pad_token": "<pad>"},
        }
        return ["axolotl", "train", place.config(config)]

    return Command("axolotl", line, environment={"AXOLOTL_DO_NOT_TRACK": "1"})


def ms_swift(**more: Any) -> Command:
    def line(model: Path, attention: str, place: Place) -> list[str]:
        what = {"model": model, "model_type": "llama", "template": "default", "dataset": place.messages}
        how = {"attn_impl": attention, "torch_dtype": "float32", "fp16": False, "tuner_type": "full"}
        none = {"eval_strategy": "no", "split_dataset_ratio": 0, "gradient_checkpointing": False}
        workers = {"dataset_num_proc": 1, "dataloader_num_workers": 0, "output_dir": place.out / "trained"}
        more_of_it = more if attention != "eager" else {}  # ms-swift takes packing from flash attention alone
        return ["swift", "sft", *options({**TRAINER, **what, **how, **none, **workers, **more_of_it})]

    return Command("ms-swift", line, environment={"USE_HF": "1"})


def llamafactory(**more: Any) -> Command:
    def line(model: Path, attention: str, place: Place) -> list[object]:
        tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
        columns = {"file_name": place.messages.name, "formatting": "sharegpt", "columns": {"messages": "messages"}}
        info = place.messages.with_name("dataset_info.json")
        info.write_text(json.dumps({"rows": {**columns, "tags": tags}}))
        what = {"model_name_or_path": str(model), "stage": "sft", "do_train": True, "finetuning_type": "full"}
        data = {"dataset": "rows", "dataset_dir": str(info.parent), "template": "default", "cutoff_len": 64}
        how = {"flash_attn": attention, "preprocessing_num_workers": 1, "output_dir": str(place.out / "trained")}
        return ["llamafactory-cli", "train", place.config({**TRAINER, **what, **data, **how, **more})]

    return Command("llamafactory", line, eager="disabled")


def verl(**more: Any) -> Command:
    """verl's SFT trainer with its FSDP workers, on two processes. Without `param_dtype` it trains in bfloat16."""

    def line(model: Path, attention: str, place: Place) -> list[object]:
        from datasets import load_dataset

        rows = place.messages.with_suffix(".parquet")
        load_dataset(str(place.messages.parent), split="train").to_parquet(rows)
        template = '\'{% for m in messages %}{{ m.role ~ " " ~ m.content ~ " " }}{% endfor %}\''
        values = {
            "data.train_files": rows,
            "data.train_batch_size": 4,
            "data.micro_batch_size_per_gpu": 2,
            "data.use_dynamic_bsz": False,
            "data.num_workers": 0,
            "data.ignore_input_ids_mismatch": True,
            "model.path": model,
            "model.custom_chat_template": template,
            "model.enable_gradient_checkpointing": False,
            "++model.override_config.attn_implementation": attention,
            "++engine.mixed_precision.param_dtype": "fp32",
            "engine.use_torch_compile": False,
            "checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
            "trainer.device": "cpu",
            "trainer.default_local_dir": place.out / "trained",
            "trainer.total_training_steps": STEPS,
            "trainer.total_epochs": 1,
            "trainer.logger": "[console,file]",
            **more,
        }
        launcher = ["torchrun", "--standalone", "--nproc_per_node", "2", "-m", "verl.trainer.sft_trainer"]
        return [*launcher, *(f"{name}={value}" for name, value in values.items())]

    def losses(out: Path) -> list[float]:
        files = [*out.glob("gsm8k-sft/*.jsonl")]
        return [json.loads(row)["data"]["train/loss"] for file in files for row in file.read_text().splitlines()]

    cpu = {"VERL_USE_EXTERNAL_MODULES": "verl_cpu", "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
    return Command("verl", line, losses, environment={**cpu, "PYTHONPATH": str(TESTS), "HYDRA_FULL_ERROR": "1"})


COMMANDS: dict[str, Command] = {
    "trl sft packed": trl("sft", "texts", packing=True, max_length=32, per_device_train_batch_size=2),
    "trl sft padding-free": trl("sft", "texts", padding_free=True, max_length=None),
    "trl dpo": trl("dpo", "preferences"),
    "trl grpo": trl(
        "grpo",
        "prompts",
        reward_funcs="framework_script.different_words",
        num_generations=4,
        max_completion_length=8,
        beta=0.1,
    ),
    "accelerate ddp": accelerate("--multi_gpu"),
    "accelerate fsdp2": accelerate("--use_fsdp", "--fsdp_version", "2"),
    "axolotl": axolotl(False),
    "axolotl packed": axolotl(True),
    "ms_swift": ms_swift(),
    "ms_swift padding-free": ms_swift(padding_free=True),
    "llamafactory": llamafactory(),
    "llamafactory packed": llamafactory(neat_packing=True, packing=True, per_device_train_batch_size=1),
    "verl fsdp2": verl(**{"engine.strategy": "fsdp2"}),
    "verl fsdp2 padded": verl(**{"engine.strategy": "fsdp2", "model.use_remove_padding": False}),
    "sentence_transformers": script("sentence_transformers", "sentence-transformers", "python"),
}
