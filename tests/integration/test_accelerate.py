"""accelerate's context parallelism and a Trainer under it, over processes on CPUs, compared with one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from tiny import NAME, TRANSFORMERS

import kernel_compat

accelerate = pytest.importorskip("accelerate", minversion="1.12")
if TRANSFORMERS.release < (5, 16):
    pytest.skip("this Trainer splits no batches for an evaluation", allow_module_level=True)

from accelerated import CASES, both, start  # noqa: E402
from accelerated import model as load  # noqa: E402
from ranks import KERNEL  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accelerated")


run = cache(start)


#: Those on four ranks have all that those on two have, and data or heads beside it.
RUNS = [pytest.param(name, marks=pytest.mark.slow if case.ranks == 2 else ()) for name, case in CASES.items()]


@pytest.mark.parametrize("name", RUNS)
def test_same_training_as_in_one_process(folder: Path, name: str) -> None:
    case = CASES[name]
    results = run(folder, case.ranks)
    kernel_compat.register_attention(NAME, KERNEL)
    with kernel_compat.installed():
        alone = both(name, case, folder, alone=True)
    for how, expected in alone.items():
        ours = results[how]
        assert bool(ours.pop("sharded")) is case.sharded
        assert not expected.pop("sharded")
        assert ours.keys() == expected.keys()
        assert expected["loss"][0] != expected["loss"][-1]
        for key, value in expected.items():
            # A Trainer sums the losses that it logs in float32.
            allowed = {"rtol": 1e-6, "atol": 0} if (how, key) == (name, "loss") else {"rtol": 1e-9, "atol": 1e-12}
            torch.testing.assert_close(ours[key], value, **allowed, msg=lambda text, at=(how, key): f"{at}: {text}")


def test_refused_on_every_rank(folder: Path) -> None:
    for rank, messages in enumerate(run(folder, 4)["refused"]):
        assert "does not support attn_implementation='my_flash_alone'" in messages["not spread"]
        assert "maybe_context_parallel" in messages["buffers"]
        assert "label_smoothing_factor" in messages["label smoothing"]
        assert "compute_loss_func" in messages["a loss function"]
        assert "average_tokens_across_devices=False" in messages["a mean of each rank"]
        assert "logits of an evaluation" in messages["metrics"]
        assert "does not support attn_implementation='my_flash_alone'" in messages["a Trainer, not spread"]
        of_rank = [0, 1] if rank < 2 else [2, 3]
        assert (
            f"over the ranks [0, 1, 2, 3], and accelerate's context parallelism over {of_rank}"
            in messages["another group"]
        )
        for what in ("sdpa and heads", "a Trainer, sdpa and heads"):
            assert "does not support 'sdpa' on CPUs, or beside an sp_size" in messages[what]


def test_sizes_of_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import ParallelismConfig

    def sizes(**given: int) -> tuple[int, int, int, int]:
        config = ParallelismConfig(**given)
        return config.cp_size, config.sp_size, config.ulysses_size, config.total_size

    with kernel_compat.installed():
        assert sizes(cp_size=3, sp_size=2) == (6, 1, 2, 6)
        assert sizes(cp_size=3) == (3, 1, 1, 3)
        assert sizes(sp_size=2) == (1, 2, 1, 2)  # DeepSpeed's
        monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
        monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "4")
        assert sizes(dp_shard_size=2) == (8, 1, 4, 16)
        assert sizes(sp_size=1) == (2, 1, 1, 2)
    with pytest.raises(ValueError, match="mutually exclusive"):
        ParallelismConfig()


def test_the_mesh_of_an_accelerator_before_install() -> None:
    from accelerate.state import AcceleratorState

    assert kernel_compat.accelerate_mesh() is None
    AcceleratorState._shared_state |= {"parallelism_config": accelerate.ParallelismConfig(cp_size=2)}
    try:
        with pytest.raises(ValueError, match=r"call kernel_compat.install\(\) before the Accelerator is made"):
            kernel_compat.accelerate_mesh()
    finally:
        AcceleratorState._reset_state()


def test_a_seam_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the shim attention would see a rank's tokens alone, without an error."""
    monkeypatch.setattr(accelerate.Accelerator, "_prepare_cp", lambda self, models, *, more: models)
    with pytest.warns(kernel_compat.UnprotectedWarning, match="_prepare_cp"):
        report = kernel_compat.install()
    try:
        assert report["accelerate_context_parallel"].state == "failed"
        kernel_compat.register_attention(NAME, KERNEL)
        with pytest.raises(kernel_compat.UnprotectedError):
            accelerate.Accelerator._prepare_cp(object(), load(NAME))
    finally:
        kernel_compat.uninstall()


def test_uninstalled() -> None:
    from transformers import Trainer

    places = [
        (accelerate.ParallelismConfig, "__post_init__"),
        (accelerate.ParallelismConfig, "_validate_accelerator"),
        (accelerate.Accelerator, "_prepare_cp"),
        (Trainer, "_prepare_context_parallel_inputs"),
        (Trainer, "prediction_step"),
    ]
    before = [getattr(*place) for place in places]
    with kernel_compat.installed() as report:
        assert {report[name].state for name in ("accelerate_context_parallel", "tf5_16_trainer")} == {"applied"}
        assert all(getattr(*place) is not original for place, original in zip(places, before, strict=True))
    assert [getattr(*place) for place in places] == before
