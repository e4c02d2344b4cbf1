"""What is proven of a model before its padded batches are computed without their padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from any_layer import pair
from padded import batch, llama
from tiny import NAME, TRANSFORMERS, distance

import kernel_compat
from kernel_compat.attention.unpadding.model_call import FLAG
from kernel_compat.models import padding_free
from kernel_compat_prove import Outcome, Proof, at_load, prove_config

pytestmark = pytest.mark.usefixtures("installed_for_all")


class Mixing(transformers.LlamaForCausalLM):
    """A model that mixes the tokens of a row between its layers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[-1].register_forward_pre_hook(mix)


def mix(layer: Any, args: Any) -> Any:
    return (args[0] + args[0].roll(1, 1), *args[1:])


class TestProofs:
    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(at_load, "_proofs", {})
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.delenv("KERNEL_COMPAT_UNPROVEN")  # the tests' own proves nothing

    @pytest.mark.slow
    def test_a_type_is_proven_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _, ours = pair(transformers.LlamaForCausalLM, llama(), NAME)
        with padding_free(ours):
            pass
        (kept,) = (tmp_path / "kernel-compat" / "proofs").glob("*-padding-free.json")
        proof = Proof.from_json(json.loads(kept.read_text()))
        assert [(o.case, o.verdict) for o in proof.outcomes] == [("padding_free", "equal")]
        monkeypatch.setattr(at_load, "_proofs", {})
        monkeypatch.setattr(at_load, "prove_here", None)
        with padding_free(ours):
            pass

    def test_a_type_that_differs_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            at_load,
            "prove_here",
            lambda owner, config, free: prove_config(config, owner, ["padding_free"] if free else ["plain"]),
        )
        _, ours = pair(Mixing, llama(), NAME)
        with pytest.raises(kernel_compat.UnsupportedFeatureError, match=r"Mixing.*padding_free refuses it"):
            padding_free(ours)
        assert FLAG not in vars(ours)
        kernel_compat.register_attention("free_flash", "flash_attention_reference", padding_free=True)
        try:
            with pytest.raises(kernel_compat.UnsupportedFeatureError, match="Mixing"):
                pair(Mixing, llama(), "free_flash")
            eager, ours = pair(transformers.LlamaForCausalLM, llama(), "free_flash")
            given = batch("right")
            real = given["attention_mask"].bool()
            logits = ours(**given).logits
            assert distance(logits[real], eager(**given).logits[real]) < 1e-5
            assert not logits[~real].any()
        finally:
            kernel_compat.unregister_attention("free_flash")

    def test_answers_to_questions_are_refused(self) -> None:
        """Their loss is over all columns, padding included."""
        (found,) = prove_config(llama(), transformers.LlamaForQuestionAnswering, ["padding_free"]).outcomes
        assert found.verdict == "refused"

    def test_heads_of_sequences_are_proven(self) -> None:
        (found,) = prove_config(llama(), transformers.LlamaForSequenceClassification, ["padding_free"]).outcomes
        assert found.verdict == "equal"

    def test_a_type_without_a_proof(self, monkeypatch: pytest.MonkeyPatch) -> None:
        proof = Proof("llama", str(TRANSFORMERS), no_recipe="none")
        monkeypatch.setattr(at_load, "prove_here", lambda *_: proof)
        _, ours = pair(transformers.LlamaForCausalLM, llama(), NAME)
        with pytest.warns(UserWarning, match="isn't proven to compute the same without padding"):
            padding_free(ours).undo()
        monkeypatch.setenv("KERNEL_COMPAT_UNPROVEN", "refuse")
        with pytest.raises(kernel_compat.UnsupportedFeatureError, match="no tiny model"):
            padding_free(ours)
        found = Outcome("LlamaForCausalLM", "padding_free", "not applicable", reason="it takes no tokens")
        (key,) = at_load._proofs
        at_load._proofs[key] = Proof("llama", str(TRANSFORMERS), (found,))
        with pytest.raises(
            kernel_compat.UnsupportedFeatureError, match="it takes no tokens.*prove llama --case padding_free"
        ):
            padding_free(ours)
