"""The proof itself: right models are equal, and a kernel that is wrong, refuses or crashes is found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import CAUSAL_LMS

import kernel_compat
from kernel_compat import cli
from kernel_compat.errors import UnsupportedFeatureError
from kernel_compat.kernels import Functions, Kernel, known_kernels
from kernel_compat.proving import QUICK, proof, prove_config, prove_type, sweep
from kernel_compat.proving.architectures import model_types

NAME = "broken_flash"


@pytest.fixture
def broken() -> Iterator[Callable[[Callable[..., Any]], str]]:
    """Register a name whose kernel is the reference one, with every call changed."""

    def register(change: Callable[[Callable[..., Any], dict[str, Any]], Any]) -> str:
        original = known_kernels()["flash_attention_reference"]
        functions = original.load()
        kernel = Kernel("broken", original.providers)

        def changed(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: change(lambda **more: function(*args, **{**kwargs, **more}), kwargs)

        dense, varlen = (changed(f) for f in (functions.flash_attn_func, functions.flash_attn_varlen_func))
        kernel.preload(original.features, Functions(dense, varlen, None))
        kernel_compat.register_attention(NAME, kernel=kernel)
        return NAME

    yield register  # type: ignore[misc]
    kernel_compat.unregister_attention(NAME)


def verdicts(found: proof.Proof) -> dict[str, str]:
    return {outcome.case: outcome.verdict for outcome in found.outcomes}


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_right_model_is_equal(model_type: str) -> None:
    found = prove_type(model_type, QUICK)
    assert verdicts(found) == {case: "not applicable" if case == "cross_attention" else "equal" for case in QUICK}
    assert not kernel_compat.status().installed


def test_an_encoder_decoder_is_equal() -> None:
    found = prove_type("bart", ["plain", "padded_left", "cross_attention", "gradients"])
    whole = [outcome for outcome in found.outcomes if outcome.model == "BartForConditionalGeneration"]
    assert [outcome.verdict for outcome in whole] == ["equal"] * 4


@pytest.mark.parametrize(
    ("model_type", "case", "verdict"),
    [
        ("diffllama", "packed_lengths", "equal"),  # up to 4.57 a class for FlashAttention-2 that takes no lengths
        ("hunyuan_vl", "image", "equal"),  # numbers its images from 0, so that a position is 0 in the middle of a text
        ("gemma4_unified", "packed_positions", "equal"),  # a 4D mask without images
        ("kosmos-2", "plain", "refused"),  # neither a layer nor a mask says whether it is causal, up to 4.57
        ("kosmos-2", "generate", "refused"),  # calls that layer outside its model's forward
        ("recurrent_gemma", "padded_left", "refused"),  # from 5.19 on; a recurrence that runs over padding
        ("recurrent_gemma", "padded_right", "equal"),
    ],
)
def test_types_that_were_wrong(model_type: str, case: str, verdict: str) -> None:
    if model_type not in model_types():
        pytest.skip("newer")
    found = prove_type(model_type, [case])
    if found.outcomes[0].case == "load":
        pytest.skip(found.outcomes[0].reason)
    assert [outcome.verdict for outcome in found.outcomes] == [verdict], found


def test_a_config_is_proven_as_it_is() -> None:
    config = CAUSAL_LMS["qwen2_window"]()
    before = config.to_dict()
    found = prove_config(config, transformers.Qwen2ForCausalLM, QUICK)
    assert found.verdict == "equal"
    assert config.to_dict() == before


def test_a_kernel_that_is_not_causal_is_wrong(broken: Any) -> None:
    name = broken(lambda call, kwargs: call(causal=False))
    found = prove_type("llama", ["plain"], attn_implementation=name)
    assert found.verdict == "wrong"
    assert found.outcomes[0].difference is not None
    assert found.outcomes[0].difference > 0.1


def test_a_kernel_whose_gradients_alone_are_wrong_is_wrong(broken: Any) -> None:
    class Halved(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad / 2

    name = broken(lambda call, kwargs: Halved.apply(call()))
    found = verdicts(prove_type("llama", ["plain", "gradients"], attn_implementation=name))
    assert found == {"plain": "equal", "gradients": "wrong"}


def test_a_kernel_that_crashes_is_told_from_one_that_refuses(broken: Any) -> None:
    def crash(call: Any, kwargs: dict[str, Any]) -> Any:
        if "cu_seqlens_q" in kwargs:
            raise UnsupportedFeatureError("varlen", "broken", "Don't.")
        raise IndexError("out of range")

    name = broken(crash)
    found = prove_type("llama", ["plain", "packed_positions"], attn_implementation=name)
    assert verdicts(found) == {"plain": "crashed", "packed_positions": "refused"}
    assert "IndexError: out of range" in found.outcomes[0].reason
    assert "varlen" in found.outcomes[1].reason


def test_a_type_that_ends_its_process_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    real = proof.prove_type

    def prove(name: str, *args: Any, **options: Any) -> proof.Proof:
        return os._exit(3) if name == "gpt_neox" else real(name, *args, **options)

    monkeypatch.setattr(proof, "prove_type", prove)
    found = {one.model_type: one for one in sweep(["llama", "gpt_neox"], ["plain"], workers=2)}
    assert found["llama"].verdict == "equal"
    assert found["gpt_neox"].verdict == "crashed"
    assert "exit code 3" in found["gpt_neox"].outcomes[0].reason


def test_unknown_types() -> None:
    with pytest.raises(ValueError, match="no_such_model"):
        prove_type("no_such_model")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "proofs.json"
    assert cli.main(["prove", "llama", "--case", "plain", "--json", str(file), "--workers", "1"]) == 0
    assert "1 equal" in capsys.readouterr().out
    document = json.loads(file.read_text())
    assert document["summary"]["equal"] == 1
    assert document["proofs"][0]["outcomes"][0]["case"] == "plain"


def test_the_command_proves_a_registered_name(broken: Any) -> None:
    name = broken(lambda call, kwargs: call(causal=False))
    assert cli.main(["prove", "llama", "--case", "plain", "--attn", name]) == 1


def test_a_folder(tmp_path: Path) -> None:
    config = CAUSAL_LMS["llama"]()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    assert cli.main(["prove", str(tmp_path), "--case", "plain"]) == 0
