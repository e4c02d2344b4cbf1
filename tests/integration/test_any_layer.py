"""``kernel="auto"`` and kernels with masks of any kind, against eager: models that no plain flash kernel computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from any_layer import LENGTH, MODELS, ids, llama4, packed, pair, separates_chunks, there
from tiny import SHAPE, VOCAB, distance, gradients
from transformers.models.t5 import modeling_t5

import kernel_compat

pytestmark = pytest.mark.usefixtures("installed_for_all")

AUTO = "any_layer_flash"


@pytest.fixture(scope="module", autouse=True)
def auto(installed_for_all: None) -> Iterator[None]:
    kernel_compat.register_attention(AUTO, kernel="auto")
    yield
    kernel_compat.unregister_attention(AUTO)


def assert_equal(models: tuple[Any, Any], keep: Any = ..., **inputs: Any) -> None:
    """Logits, and the gradients of all parameters."""
    expected, found = (model(**inputs).logits[keep] for model in models)
    assert distance(found, expected) < 1e-5
    assert distance(gradients(models[1], found), gradients(models[0], expected)) < 1e-4


@pytest.mark.parametrize("made", MODELS)
class TestDecoders:
    def test_plain(self, made: Callable[[str], tuple[Any, Any]]) -> None:
        assert_equal(made(AUTO), input_ids=ids())

    def test_padded(self, made: Callable[[str], tuple[Any, Any]]) -> None:
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, :10] = 0
        assert_equal(made(AUTO), mask.bool(), input_ids=ids(), attention_mask=mask)

    def test_packed(self, made: Callable[[str], tuple[Any, Any]]) -> None:
        """Two sequences in a row: as each alone."""
        models, (tokens, positions, sequences) = made(AUTO), packed()
        if made is llama4 and not separates_chunks():
            with pytest.raises(kernel_compat.UnsupportedFeatureError, match="packed sequences"):
                models[1](input_ids=tokens, position_ids=positions, use_cache=False)
            return
        found = models[1](input_ids=tokens, position_ids=positions, use_cache=False).logits
        expected = torch.cat([models[0](input_ids=tokens[:, part]).logits for part in sequences], 1)
        assert distance(found, expected) < 1e-5
        assert distance(gradients(models[1], found), gradients(models[0], expected)) < 1e-4


@pytest.mark.skipif(
    not hasattr(modeling_t5, "ALL_ATTENTION_FUNCTIONS"),
    reason="this release's T5 computes its own attention: its name is refused",
)
class TestT5:
    """A bias of relative positions is added to the scores of every layer, and trained."""

    @pytest.fixture
    def models(self) -> tuple[Any, Any]:
        config = transformers.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCAB, decoder_start_token_id=0
        )
        return pair(transformers.T5ForConditionalGeneration, config, AUTO)

    def test_plain(self, models: tuple[Any, Any]) -> None:
        assert_equal(models, input_ids=ids(), decoder_input_ids=ids()[:, :9])

    def test_padded(self, models: tuple[Any, Any]) -> None:
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, 14:] = 0
        assert_equal(models, input_ids=ids(), attention_mask=mask, decoder_input_ids=ids()[:, :9])


class TestMasksOfTheUser:
    def models(self) -> tuple[Any, Any]:
        return pair(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SHAPE), AUTO)

    def test_hidden_pairs(self) -> None:
        visible = (torch.rand(2, 1, LENGTH, LENGTH) < 0.5) | torch.eye(LENGTH, dtype=torch.bool)
        mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
        assert_equal(self.models(), input_ids=ids(), attention_mask=mask)

    def test_a_bias(self) -> None:
        bias = torch.linspace(-1, 1, LENGTH**2).view(1, 1, LENGTH, LENGTH).expand(2, -1, -1, -1)
        visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        mask = torch.where(visible, bias, torch.finfo(torch.float32).min)
        assert_equal(self.models(), input_ids=ids(), attention_mask=mask)


@there("PaliGemmaForConditionalGeneration")
@pytest.mark.parametrize("training", [False, True])
def test_the_prefix_of_paligemma(training: bool) -> None:
    """The image and the prompt see each other both ways; the answer is causal."""
    text = transformers.GemmaConfig(**SHAPE, head_dim=8)
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = transformers.SiglipVisionConfig(**tower, image_size=16, patch_size=8, vision_use_head=False)
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_index=VOCAB - 1, projection_dim=64, hidden_size=64
    )
    models = pair(transformers.PaliGemmaForConditionalGeneration, config, AUTO)
    tokens = ids()
    tokens[:, :4] = VOCAB - 1
    inputs = {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 16, 16), "attention_mask": torch.ones_like(tokens)}
    if training:
        kinds = torch.zeros_like(tokens)
        kinds[:, 12:] = 1
        inputs |= {"token_type_ids": kinds, "labels": tokens}
        for model in models:
            model.train()
    assert_equal(models, **inputs)
