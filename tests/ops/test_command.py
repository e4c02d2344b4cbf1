"""``kernel-compat ops``, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Cli


@pytest.mark.usefixtures("without_gpu")
def test_it_lists_every_field_and_value_with_the_reason(run: Cli) -> None:
    done = run("ops", "--json")
    found = json.loads(done.stdout)

    assert done.returncode == 0
    choices = {(one["op"], one["value"]): one for one in found["choices"]}
    assert choices["cross_entropy_loss", "chunk_loss"]["reasons"] == []
    assert choices["rms_norm", "eager"]["note"] == "the model's own code"
    liger = choices["rms_norm", "liger_kernel"]
    assert liger["variants"] == ["standard", "offset"]
    assert any("it needs a CUDA device" in reason for reason in liger["reasons"])
    assert found["model"] == ""
    text = run("ops").stdout
    assert "cross_entropy_loss_implementation" in text
    assert "eager" not in text


def test_it_says_what_would_be_bound_to_a_saved_model(run: Cli, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "gemma2",
                "architectures": ["Gemma2ForCausalLM"],
                "hidden_activation": "gelu",
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 8,
                "vocab_size": 50,
            }
        )
    )
    done = run("ops", "--model", str(tmp_path), "--json")
    fits = {(one["op"], one["value"]): one for one in json.loads(done.stdout)["fits"]}

    assert json.loads(done.stdout)["model"] == "Gemma2ForCausalLM"
    assert (fits["rms_norm", "liger_kernel"]["modules"], fits["rms_norm", "liger_kernel"]["variants"]) == (
        9,
        ["offset"],
    )
    assert "it differs from down(silu(gate(x)) * up(x))" in fits["swiglu_mlp", "liger_kernel"]["refused"]
    assert fits["load_balancing_loss", "triton"]["notes"] == ["load_balancing_loss: this model has none"]
    text = run("ops", "--model", str(tmp_path)).stdout
    assert "Gemma2ForCausalLM" in text
    assert "eps 1e-06, gemma casting" in text


def test_an_entry_point_that_failed_ends_in_1(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel_compat_ops.registry.broken", lambda: {"some": "ValueError: no"})
    done = run("ops", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["ok"] is False
    assert "the entry point some failed: ValueError: no" in run("ops").stdout


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (None, "has no config.json"),
        ("{}", "no model can be built from"),
        ('{"model_type": "nonesuch"}', "no model can be built from"),
    ],
)
def test_it_refuses_what_is_no_model(run: Cli, tmp_path: Path, config: str | None, problem: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)

    done = run("ops", "--model", str(tmp_path), "--json")

    assert done.returncode == 2
    assert done.stdout == ""
    assert f"--model: {tmp_path} {problem}" in done.stderr or f"--model: {problem}" in done.stderr
