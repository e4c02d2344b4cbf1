"""Tiny models whose layers need what not every kernel has: chunks, sinks, two head dimensions, a smaller value.

All their experts take all tokens: bfloat16 would choose others than float32.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from tiny import SHAPE, TRANSFORMERS, VOCAB, randomize
from transformers import masking_utils
from transformers.models.t5 import modeling_t5

LENGTH = 24

#: A model in eager attention and with a name, and inputs.
Made = tuple[tuple[Any, Any], dict[str, Any]]


def there(*classes: str) -> pytest.MarkDecorator:
    missing = [name for name in classes if not hasattr(transformers, name)]
    return pytest.mark.skipif(bool(missing), reason=f"this release has no {', '.join(missing)}")


def pair(class_: Any, config: Any, name: str) -> tuple[Any, Any]:
    """The same model with eager attention and with a name."""
    eager = randomize(class_._from_config(copy.deepcopy(config), attn_implementation="eager")).eval()
    with torch.no_grad():  # scores so large that rounding decides the softmax would tell nothing
        for parameter_name, weight in eager.named_parameters():
            if parameter_name.endswith("q_norm.weight"):  # queries and keys get the norm sqrt(dim)
                weight.mul_(min(1, 4 / weight.numel() ** 0.5))
            elif parameter_name.endswith("Attention.q.weight"):  # of T5, which doesn't scale its scores
                weight.mul_(config.d_kv**-0.5)
    ours = class_._from_config(copy.deepcopy(config), attn_implementation=name).eval()
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def ids(rows: int = 2) -> torch.Tensor:
    return torch.randint(3, VOCAB - 7, (rows, LENGTH))


def llama4(name: str) -> tuple[Any, Any]:
    of_layers = {"attention_chunk_size": 8, "no_rope_layers": [1, 0]}
    config = transformers.Llama4TextConfig(
        **SHAPE, head_dim=8, intermediate_size_mlp=64, num_local_experts=1, **of_layers
    )
    return pair(transformers.Llama4ForCausalLM, config, name)


def gemma3(name: str, layers: int = 2) -> tuple[Any, Any]:
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    shape = {**SHAPE, "num_hidden_layers": layers}
    config = transformers.Gemma3TextConfig(**shape, head_dim=16, sliding_window=8, layer_types=kinds)
    return pair(transformers.Gemma3ForCausalLM, config, name)


def gemma4(name: str, global_head_dim: int = 32) -> tuple[Any, Any]:
    """Its sliding layers have another head dimension than its global ones."""
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma4TextConfig(
        **SHAPE,
        head_dim=16,
        global_head_dim=global_head_dim,
        sliding_window=8,
        layer_types=kinds,
        hidden_size_per_layer_input=32,  # the norms of vectors of 8 multiply rounding errors, in some draws by ten
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=0,
    )
    return pair(transformers.Gemma4ForCausalLM, config, name)


def gpt_oss(name: str) -> tuple[Any, Any]:
    config = transformers.GptOssConfig(
        **SHAPE, head_dim=16, num_local_experts=2, num_experts_per_tok=2, sliding_window=8
    )
    return pair(transformers.GptOssForCausalLM, config, name)


def deepseek(name: str) -> tuple[Any, Any]:
    """The value's head dimension is smaller than the query's."""
    config = transformers.DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4},
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=4,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )
    return pair(transformers.DeepseekV3ForCausalLM, config, name)


def t5(name: str) -> Made:
    """A bias of relative positions is added to the scores of every layer. Its models, and padded inputs."""
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCAB, decoder_start_token_id=0
    )
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, 14:] = 0
    inputs = {"input_ids": ids(), "attention_mask": mask, "decoder_input_ids": ids()[:, :9]}
    return pair(transformers.T5ForConditionalGeneration, config, name), inputs


def paligemma(name: str) -> Made:
    """The image and the prompt see each other both ways. Its models, and inputs with an image of four tokens."""
    text = transformers.GemmaConfig(**SHAPE, head_dim=8)
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = transformers.SiglipVisionConfig(**tower, image_size=16, patch_size=8, vision_use_head=False)
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_index=VOCAB - 1, projection_dim=64, hidden_size=64
    )
    tokens = ids()
    tokens[:, :4] = VOCAB - 1
    inputs = {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 16, 16), "attention_mask": torch.ones_like(tokens)}
    return pair(transformers.PaliGemmaForConditionalGeneration, config, name), inputs


def mllama(name: str) -> Made:
    """Cross-attention to an image. Its models, and inputs of which a row's first tokens see no image."""
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    text = transformers.models.mllama.configuration_mllama.MllamaTextConfig(
        **{**SHAPE, "num_hidden_layers": 3},
        cross_attention_layers=[1],
        **({"rope_scaling": rope} if TRANSFORMERS.major < 5 else {"rope_parameters": rope}),
    )
    vision = transformers.models.mllama.configuration_mllama.MllamaVisionConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_global_layers=1,
        attention_heads=2,
        intermediate_size=32,
        vision_output_dim=32,
        image_size=16,
        patch_size=8,
        max_num_tiles=2,
        supported_aspect_ratios=[[1, 1], [1, 2]],
        intermediate_layers_indices=[0],
    )
    config = transformers.MllamaConfig(vision_config=vision, text_config=text)
    sees = torch.ones(2, LENGTH, 1, 2, dtype=torch.long)
    sees[0, :5] = 0
    inputs = {
        "input_ids": ids(),
        "attention_mask": torch.ones(2, LENGTH, dtype=torch.long),
        "pixel_values": torch.randn(2, 1, 2, 3, 16, 16),
        "aspect_ratio_ids": torch.tensor([[1], [2]]),
        "aspect_ratio_mask": torch.ones(2, 1, 2, dtype=torch.long),
        "cross_attention_mask": sees,
    }
    return pair(transformers.MllamaForConditionalGeneration, config, name), inputs


def llama(name: str, visible: torch.Tensor, bias: torch.Tensor | None = None, **config: Any) -> Made:
    """Llama, and inputs with a 4D mask; of the keys more than `LENGTH` are in a cache.

    Args:
        visible: (LENGTH, keys).
        bias: (heads, LENGTH, keys).
    """
    shape = {**SHAPE, **config}
    mask = torch.zeros(2, 1, 1, 1) if bias is None else bias.expand(2, -1, -1, -1)
    inputs = {"input_ids": ids(), "attention_mask": mask.where(visible, torch.finfo(torch.bfloat16).min)}
    if cached := visible.shape[1] - LENGTH:
        keys = (2, shape["num_key_value_heads"], cached, shape["hidden_size"] // shape["num_attention_heads"])
        inputs["past_key_values"] = torch.randn(2, shape["num_hidden_layers"], *keys)
    return pair(transformers.LlamaForCausalLM, transformers.LlamaConfig(**shape), name), inputs


def trees(name: str) -> Made:
    """A draft of several continuations of what is in the cache: each token sees that, and its ancestors."""
    visible = torch.eye(LENGTH, dtype=torch.bool)
    for token in range(1, LENGTH):
        visible[token] |= visible[(token - 1) // 2]
    return llama(name, torch.cat([torch.ones(LENGTH, 9, dtype=torch.bool), visible], 1))


def documents_over_a_cache(name: str) -> Made:
    """Each token sees its own document's tokens before it, of which the first are in the cache."""
    documents = torch.tensor([0] * 5 + [1] * 7 + [0] * 11 + [1] * (LENGTH - 11))
    visible = (documents[12:, None] == documents) & torch.ones(LENGTH, LENGTH + 12, dtype=torch.bool).tril(12)
    return llama(name, visible)


def blocks(name: str) -> Made:
    """Causal, or of the same image."""
    images = torch.arange(LENGTH) // 5
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() | (images[:, None] == images)
    return llama(name, visible)


def random_pairs(name: str) -> Made:
    """Any pair may be hidden."""
    return llama(name, (torch.rand(LENGTH, LENGTH) < 0.5) | torch.eye(LENGTH, dtype=torch.bool))


def alibi(name: str) -> Made:
    """Each head has a bias of its own, for the distance to the key."""
    distance = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    return llama(name, distance <= 0, distance * slopes[:, None, None])


def to_call(inputs: dict[str, Any], device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Inputs of a model in a dtype, with a cache of its own: made of (keys and values, layers, batch, heads, length, dim)."""
    given = {k: v.to(device, dtype) if v.is_floating_point() else v.to(device) for k, v in inputs.items()}
    if "past_key_values" in given:
        cache = transformers.DynamicCache()
        for layer, (keys, values) in enumerate(zip(*given["past_key_values"], strict=True)):
            cache.update(keys, values, layer)
        given["past_key_values"] = cache
    return given


T5 = pytest.mark.skipif(
    not hasattr(modeling_t5, "ALL_ATTENTION_FUNCTIONS"),
    reason="this release's T5 computes its own attention: its name is refused",
)
#: Models whose masks or biases are more than causality, padding and windows, with their inputs.
WITH_INPUTS = [
    pytest.param(t5, marks=T5, id="t5"),
    pytest.param(paligemma, marks=there("PaliGemmaForConditionalGeneration"), id="paligemma"),
    pytest.param(mllama, marks=there("MllamaForConditionalGeneration"), id="mllama"),
    *[trees, documents_over_a_cache, blocks, random_pairs, alibi],
]

MODELS = [
    pytest.param(gemma3, marks=there("Gemma3ForCausalLM"), id="gemma3"),
    pytest.param(gemma4, marks=there("Gemma4ForCausalLM"), id="gemma4"),
    pytest.param(gpt_oss, marks=there("GptOssForCausalLM"), id="gpt_oss"),
    pytest.param(llama4, marks=there("Llama4ForCausalLM"), id="llama4"),
    pytest.param(deepseek, marks=there("DeepseekV3ForCausalLM"), id="deepseek_v3"),
]


def packed() -> tuple[torch.Tensor, torch.Tensor, tuple[slice, slice]]:
    """Two sequences in a row: ids and positions (1, `LENGTH`), and where each sequence is."""
    positions = torch.cat([torch.arange(11), torch.arange(LENGTH - 11)])[None]
    return ids(1), positions, (slice(11), slice(11, None))


def separates_chunks() -> bool:
    """Whether Llama 4's chunks begin with each packed sequence; older releases count them from the row's first token."""
    return hasattr(masking_utils, "remap_positions_for_packed_sequence")
