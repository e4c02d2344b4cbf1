"""TRL's trainers under a registered name: the loss of every step is eager's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import kernel_compat

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

import torch  # noqa: E402
from frameworks import load, preferences, sentences  # noqa: E402
from tiny import NAME  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

TRL = Version(trl.__version__)
#: Float32 rounding, which training amplifies from step to step.
ROUNDING = {"rtol": 2e-6, "atol": 2e-6}


def arguments(config: Any, folder: Path, **more: Any) -> Any:
    common = {"max_steps": 20, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "seed": 0, "use_cpu": True}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "bf16": False}
    return config(output_dir=str(folder), **{**common, **quiet, **more})


def losses(trainer: Callable[..., Any], model: Any, args: Any, rows: Any, **more: Any) -> torch.Tensor:
    """The loss of every step, of a trainer that is made with these arguments."""
    found: list[float] = []

    class Recording(trainer):  # type: ignore[misc, valid-type]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            found.append(loss.item())
            return loss

    words = AutoTokenizer.from_pretrained(model.name_or_path)
    Recording(model=model, args=args, train_dataset=rows, processing_class=words, **more).train()
    assert len(found) == args.max_steps
    return torch.tensor(found, dtype=torch.float64)


def require_same(ours: torch.Tensor, eager: torch.Tensor) -> None:
    assert eager[0] != eager[-1]
    torch.testing.assert_close(ours, eager, **ROUNDING)


def texts() -> Any:
    return datasets.Dataset.from_list([{"text": text} for text in sentences()])


PACKINGS: dict[str, dict[str, Any]] = {
    "packed": {"packing": True, "max_length": 32, "per_device_train_batch_size": 2},
    "padding-free": {"padding_free": True, "max_length": None},
    "padded": {},
}


@pytest.mark.parametrize("how", PACKINGS)
def test_sft(how: str, model: Path, installed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(trl.SFTConfig, tmp_path, **PACKINGS[how])
    eager = losses(_sft_with_positions() if how != "padded" else trl.SFTTrainer, load(model, "eager"), args, texts())
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        ours = losses(trl.SFTTrainer, load(model, NAME), args, texts())
    require_same(ours, eager)
    if Version("0.23.1") <= TRL:
        assert "lash attention" not in caplog.text.replace("A", "a")


def test_sft_and_dpo_with_the_library_s_padding_free(model: Path, installed: Any, tmp_path: Path) -> None:
    for trainer, config, rows in (
        (trl.SFTTrainer, trl.SFTConfig, texts()),
        (trl.DPOTrainer, trl.DPOConfig, datasets.Dataset.from_list(preferences())),
    ):
        args = arguments(config, tmp_path)
        eager = losses(trainer, load(model, "eager"), args, rows)
        ours = load(model, NAME)
        with kernel_compat.models.padding_free(ours):
            require_same(losses(trainer, ours, args, rows), eager)


def test_dpo(model: Path, installed: Any, tmp_path: Path) -> None:
    args, rows = arguments(trl.DPOConfig, tmp_path), datasets.Dataset.from_list(preferences())
    eager, ours = (losses(trl.DPOTrainer, load(model, name), args, rows) for name in ("eager", NAME))
    require_same(ours, eager)


def test_grpo(model: Path, installed: Any, tmp_path: Path) -> None:
    def different_words(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    rows = datasets.Dataset.from_list([{"prompt": row["prompt"]} for row in preferences()])
    more = {"max_steps": 8, "num_generations": 4, "max_completion_length": 8, "beta": 0.1}
    args = arguments(trl.GRPOConfig, tmp_path, **more)
    eager, ours = (
        losses(trl.GRPOTrainer, load(model, name), args, rows, reward_funcs=different_words) for name in ("eager", NAME)
    )
    require_same(ours, eager)
    without_padding = load(model, NAME)
    with kernel_compat.models.padding_free(without_padding):
        require_same(losses(trl.GRPOTrainer, without_padding, args, rows, reward_funcs=different_words), eager)


@pytest.mark.skipif(not Version("0.23.1") <= TRL < Version("1.16"), reason=f"trl {TRL} has no list")
def test_the_list_of_sft(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Upstream warns of cross-contamination under a registered name; not under one whose kernel takes packed sequences."""
    kernel_compat.register_attention(NAME, kernel="flash_attention_reference")
    args = arguments(trl.SFTConfig, tmp_path, **PACKINGS["packed"])
    warned = []
    for skip in (["trl_flash_names"], []):
        with kernel_compat.installed(skip=skip), caplog.at_level(logging.WARNING):
            caplog.clear()
            trl.SFTTrainer(
                load(model, NAME), args, train_dataset=texts(), processing_class=AutoTokenizer.from_pretrained(model)
            )
            warned.append("cross-contamination" in caplog.text)
    assert warned == [True, False]
    assert type(trl.trainer.sft_trainer.FLASH_ATTENTION_VARIANTS) is set


@pytest.mark.skipif(not Version("0.20") <= TRL < Version("0.23.1"), reason=f"trl {TRL} returns the positions")
def test_the_positions_of_sft(model: Path, tmp_path: Path) -> None:
    """Upstream mixes packed sequences under a registered name: its collator returns no positions."""
    kernel_compat.register_attention(NAME, kernel="flash_attention_reference")
    args = arguments(trl.SFTConfig, tmp_path, **PACKINGS["packed"])
    right = losses(_sft_with_positions(), load(model, "eager"), args, texts())
    with kernel_compat.installed(skip=["trl_positions"]):
        upstream = losses(trl.SFTTrainer, load(model, NAME), args, texts())
    assert (upstream - right).abs().min() > 1e-3
    with kernel_compat.installed():
        require_same(losses(trl.SFTTrainer, load(model, NAME), args, texts()), right)


def _sft_with_positions() -> Any:
    """A reference for batches without padding, where before trl 0.23.1 eager attention gets no positions, or a mask of ones."""

    class WithPositions(trl.SFTTrainer):  # type: ignore[name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            trainer: Any = self
            collator = trainer.data_collator
            collator.return_position_ids = True
            trainer.data_collator = lambda rows: {
                key: x for key, x in collator(rows).items() if key != "attention_mask"
            }
            # With a cache, eager attention up to transformers 4.55 takes no notice of them.
            trainer.model.config.use_cache = False

    return WithPositions
