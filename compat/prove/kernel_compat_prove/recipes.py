"""Values for tiny configs of model types that the rules of `tiny` get wrong."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["constructor", "overrides"]

_Recipes = Mapping[str, Mapping[str, Any] | Callable[[], Mapping[str, Any]]]


def _resnet() -> dict[str, Any]:
    """A backbone of transformers instead of another library's."""
    from transformers import ResNetConfig

    widths, depths, stages = [16, 16, 32, 32], [1, 1, 1, 1], ["stage1", "stage2", "stage3", "stage4"]
    backbone = ResNetConfig(embedding_size=16, hidden_sizes=widths, depths=depths, out_features=stages)
    return {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": backbone}


def _siglip(**attributes: Any) -> dict[str, Any]:
    """A vision tower of transformers instead of another library's, with these attributes more."""
    from transformers import SiglipVisionConfig

    tower = SiglipVisionConfig()
    vars(tower).update(attributes)
    return {"vision_config": tower}


def _edgetam() -> dict[str, Any]:
    """A vision tower that is not downloaded from a model hub."""
    from transformers import TimmWrapperConfig

    stages = {"in_chans": 3, "features_only": True, "out_indices": [1, 2, 3, 4]}
    backbone = TimmWrapperConfig(architecture="test_resnet", model_args=stages)
    return {"backbone_config": backbone, "backbone_channel_list": [96, 192, 48, 32]}


def _edgetam_tower() -> dict[str, Any]:
    from transformers import EdgeTamVisionConfig

    return {"vision_config": EdgeTamVisionConfig(**_edgetam())}


def _parts(**model_types: str) -> Callable[[], dict[str, Any]]:
    """A function that returns default configs of these model types; a decoder attends to its encoder."""

    def arguments() -> dict[str, Any]:
        from transformers import AutoConfig

        attends = {"decoder": {"is_decoder": True, "add_cross_attention": True}}
        return {
            part: AutoConfig.for_model(name, **attends.get(part, {})).to_dict() for part, name in model_types.items()
        }

    return arguments


def _image_vocabulary() -> dict[str, Any]:
    images = {f"IMGIMG{'A' if i < 10 else 'B'}{chr(65 + i % 10)}Z": 10 + i for i in range(20)}
    return {"vocabulary_map": {"<image>": 70, "<reserved08706>": 71, **images}}


#: Constructor arguments for config classes whose defaults make no model that can be built here.
_CONSTRUCTOR: _Recipes = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "chameleon": _image_vocabulary,
    "emu3": _image_vocabulary,
    "conditional_detr": _resnet,
    "deformable_detr": _resnet,
    "detr": _resnet,
    "edgetam": _edgetam_tower,
    "edgetam_video": _edgetam_tower,
    "edgetam_vision_model": _edgetam,
    "fast_vlm": _siglip,
    "granite4_vision": {"deepstack_layer_map": [[0, 0], [1, 1]], "downsample_rate": "1/2"},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["mamba", "attention", "mamba", "attention"]},
    "lw_detr": {"projector_scale_factors": [1.0]},
    "phi4_multimodal": {"vision_config": {}, "audio_config": {}},
    "qwen2_vl": {"vision_start_token_id": 151652},
    "qwen2_5_vl": {"vision_start_token_id": 151652},
    "timm_backbone": {"backbone": "test_resnet", "use_pretrained_backbone": False},
    "encoder-decoder": _parts(encoder="bert", decoder="bert"),
    "speech-encoder-decoder": _parts(encoder="wav2vec2", decoder="bert"),
    "vision-encoder-decoder": _parts(encoder="vit", decoder="bert"),
    "vision-text-dual-encoder": _parts(vision_config="vit", text_config="bert"),
    "xmod": {"default_language": "en_XX"},
}

_COMPASS = {
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]}
        for kind in ("full_attention", "sliding_attention")
    },
    "layer_types": ["sliding_attention", "full_attention"],
}
_HIERA = {
    "hidden_size": 16,
    "num_attention_heads": 1,
    "embed_dim_per_stage": [16, 32, 64, 128],
    "num_attention_heads_per_stage": [1, 2, 4, 8],
    "blocks_per_stage": [1, 2, 2, 1],
    "global_attention_blocks": [4],
    "window_size_per_stage": [4, 4, 4, 4],
    "window_positional_embedding_background_size": [4, 4],
    "image_size": [64, 64],
}
_SAM2_VISION = {"backbone_config": _HIERA, "backbone_channel_list": [128, 64, 32, 16]}

#: Values for the tiny config; a nested config is a mapping under its name.
_OVERRIDES: _Recipes = {
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}, "ffn_config": {"ffn_hidden_size": 64}},
    "diffusion_gemma": {"text_config": {"top_k_experts": 4}},
    "falcon_h1": {"mamba_d_head": 16},
    "mamba2": {"num_heads": 8},
    "jetmoe": {"num_key_value_heads": 1},
    "gemma3n": lambda: {
        "text_config": {"num_kv_shared_layers": 0},
        **_siglip(rms_norm_eps=1e-6, vocab_size=8, vocab_offset=80),
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "instructblip": {"image_token_index": 90, "image_token_id": 90},
    "instructblipvideo": {"video_token_index": 90, "video_token_id": 90},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "perception_lm": lambda: _siglip(model_args={"embed_dim": 64}),
    "recurrent_gemma": {"num_hidden_layers": 3},
    "sam2": {"vision_config": _SAM2_VISION},
    "sam2_hiera_det_model": _HIERA,
    "sam2_video": {"vision_config": _SAM2_VISION},
    "sam2_vision_model": _SAM2_VISION,
    "zamba2": {"use_mem_rope": True},
    "zamba": {"num_hidden_layers": 8, "layers_block_type": None, "attention_hidden_size": 128},
}


def constructor(model_type: str, config_class: type[Any]) -> dict[str, Any]:
    """Constructor arguments for a config class, without arguments that this release of it does not take."""
    values = _recipe(_CONSTRUCTOR, model_type)
    names = inspect.signature(config_class.__init__).parameters
    if dataclasses.is_dataclass(config_class):
        # transformers 5.4 annotates some flags as int, and newer releases of its hub library check the type.
        for field in dataclasses.fields(config_class):
            if isinstance(field.default, bool) and "int" in str(field.type) and "bool" not in str(field.type):
                values.setdefault(field.name, int(field.default))
    return {name: value for name, value in values.items() if name in names or name != "use_timm_backbone"}


def overrides(model_type: str) -> dict[str, Any]:
    """Values for the tiny config of a model type."""
    return _recipe(_OVERRIDES, model_type)


def _recipe(recipes: _Recipes, model_type: str) -> dict[str, Any]:
    recipe = recipes.get(model_type, {})
    return dict(recipe() if callable(recipe) else recipe)
