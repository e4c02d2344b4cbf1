"""accelerate, and transformers' Trainer over it, under a registered name."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

import kernel_compat

accelerate = pytest.importorskip("accelerate")

import torch  # noqa: E402
from framework_ranks import run  # noqa: E402
from frameworks import saved_model  # noqa: E402
from tiny import NAME  # noqa: E402


@pytest.mark.slow
def test_a_trainer_on_two_ranks(tmp_path: Path) -> None:
    """Replicated by DDP, and sharded by FSDP2: the losses and the trained parameters are eager's."""
    saved_model(tmp_path / "model")
    found = run("with_trainer", tmp_path)
    for how in ("ddp", "fsdp2"):
        ours, eager = found[f"{how} {NAME}"], found[f"{how} eager"]
        assert bool(ours["sharded"]) is (how == "fsdp2")
        assert eager["losses"][0] != eager["losses"][-1]
        for key, value in eager.items():
            torch.testing.assert_close(
                ours[key], value, rtol=2e-5, atol=2e-5, msg=lambda text, at=(how, key): f"{at}: {text}"
            )


@pytest.mark.skipif(Version(accelerate.__version__) < Version("1.12"), reason="no sequence parallelism")
def test_sequence_parallelism_takes_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    kernel_compat.register_attention(NAME, kernel="flash_attention_reference")
    with kernel_compat.installed(skip=["accelerate_sequence_parallel"]), pytest.raises(ValueError, match=NAME):
        DeepSpeedSequenceParallelConfig(sp_attn_implementation=NAME)
    with kernel_compat.installed():
        found = DeepSpeedSequenceParallelConfig(sp_attn_implementation=NAME).sp_attn_implementation
        assert (type(found), found) == (str, NAME)
        assert found != "flash_attention_2"
        monkeypatch.setenv("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", NAME)
        assert DeepSpeedSequenceParallelConfig().sp_attn_implementation == NAME
        assert DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa").sp_attn_implementation == "sdpa"
        for name in ("eager", "not_registered"):
            with pytest.raises(ValueError, match=name):
                DeepSpeedSequenceParallelConfig(sp_attn_implementation=name)
