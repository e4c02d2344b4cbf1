"""``kernel="auto"`` and kernels with masks of any kind, against eager: models that no plain flash kernel computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from tiny import SHAPE, VOCAB, distance, gradients, randomize
from transformers import masking_utils
from transformers.models.t5 import modeling_t5

import kernel_compat

pytestmark = pytest.mark.usefixtures("installed_for_all")

AUTO = "any_layer_flash"
LENGTH = 24


@pytest.fixture(scope="module", autouse=True)
def auto(installed_for_all: None) -> Iterator[None]:
    kernel_compat.register_attention(AUTO, kernel="auto")
    yield
    kernel_compat.unregister_attention(AUTO)


def there(*classes: str) -> pytest.MarkDecorator:
    missing = [name for name in classes if not hasattr(transformers, name)]
    return pytest.mark.skipif(bool(missing), reason=f"this release has no {', '.join(missing)}")


def pair(class_: Any, config: Any) -> tuple[Any, Any]:
    """The same model with eager attention and with `AUTO`."""
    eager = randomize(class_._from_config(copy.deepcopy(config), attn_implementation="eager")).eval()
    ours = class_._from_config(copy.deepcopy(config), attn_implementation=AUTO).eval()
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def assert_equal(models: tuple[Any, Any], keep: Any = ..., **inputs: Any) -> None:
    """Logits, and the gradients of all parameters."""
    expected, found = (model(**inputs).logits[keep] for model in models)
    assert distance(found, expected) < 1e-5
    assert distance(gradients(models[1], found), gradients(models[0], expected)) < 1e-4


def ids(rows: int = 2) -> torch.Tensor:
    return torch.randint(3, VOCAB - 7, (rows, LENGTH))


def llama4() -> Any:
    of_layers = {"attention_chunk_size": 8, "no_rope_layers": [1, 0]}
    config = transformers.Llama4TextConfig(
        **SHAPE, head_dim=8, intermediate_size_mlp=64, num_local_experts=2, **of_layers
    )
    return pair(transformers.Llama4ForCausalLM, config)


def gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=8, layer_types=kinds)
    return pair(transformers.Gemma3ForCausalLM, config)


def gemma4() -> Any:
    """Its sliding layers have another head dimension than its global ones."""
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma4TextConfig(
        **SHAPE,
        head_dim=16,
        global_head_dim=32,
        sliding_window=8,
        layer_types=kinds,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=0,
    )
    return pair(transformers.Gemma4ForCausalLM, config)


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(
        **SHAPE, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=8
    )
    return pair(transformers.GptOssForCausalLM, config)


def deepseek() -> Any:
    """The value's head dimension is smaller than the query's."""
    config = transformers.DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4},
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    )
    return pair(transformers.DeepseekV3ForCausalLM, config)


MODELS = [
    pytest.param(gemma3, marks=there("Gemma3ForCausalLM"), id="gemma3"),
    pytest.param(gemma4, marks=there("Gemma4ForCausalLM"), id="gemma4"),
    pytest.param(gpt_oss, marks=there("GptOssForCausalLM"), id="gpt_oss"),
    pytest.param(llama4, marks=there("Llama4ForCausalLM"), id="llama4"),
    pytest.param(deepseek, marks=there("DeepseekV3ForCausalLM"), id="deepseek_v3"),
]


@pytest.mark.parametrize("made", MODELS)
class TestDecoders:
    def test_plain(self, made: Callable[[], tuple[Any, Any]]) -> None:
        assert_equal(made(), input_ids=ids())

    def test_padded(self, made: Callable[[], tuple[Any, Any]]) -> None:
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, :10] = 0
        assert_equal(made(), mask.bool(), input_ids=ids(), attention_mask=mask)

    def test_packed(self, made: Callable[[], tuple[Any, Any]]) -> None:
        """Two sequences in a row: as each alone. Older releases count Llama 4's chunks from the row's first token."""
        models, tokens = made(), ids(1)
        positions = torch.cat([torch.arange(11), torch.arange(LENGTH - 11)])[None]
        if made is llama4 and not hasattr(masking_utils, "packed_sequence_compatibility_function"):
            with pytest.raises(kernel_compat.UnsupportedFeatureError, match="packed sequences"):
                models[1](input_ids=tokens, position_ids=positions, use_cache=False)
            return
        found = models[1](input_ids=tokens, position_ids=positions, use_cache=False).logits
        parts = [models[0](input_ids=part).logits for part in (tokens[:, :11], tokens[:, 11:])]
        expected = torch.cat(parts, 1)
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
        return pair(transformers.T5ForConditionalGeneration, config)

    def test_plain(self, models: tuple[Any, Any]) -> None:
        assert_equal(models, input_ids=ids(), decoder_input_ids=ids()[:, :9])

    def test_padded(self, models: tuple[Any, Any]) -> None:
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, 14:] = 0
        assert_equal(models, input_ids=ids(), attention_mask=mask, decoder_input_ids=ids()[:, :9])


class TestMasksOfTheUser:
    def models(self) -> tuple[Any, Any]:
        return pair(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SHAPE))

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
    models = pair(transformers.PaliGemmaForConditionalGeneration, config)
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
