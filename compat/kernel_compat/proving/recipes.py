"""Values for tiny configs of model types that the rules of `tiny` get wrong."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .tiny import WINDOW

__all__ = ["GENTLE", "constructor", "overrides"]

#: Model types whose output lengths grow with their weights: they keep their initial weights.
GENTLE = frozenset({"vits"})


def _resnet(stages: int = 4) -> dict[str, Any]:
    """A backbone of transformers instead of another library's, which returns the feature maps of its last stages."""
    from transformers import ResNetConfig

    features = ["stage1", "stage2", "stage3", "stage4"][-stages:]
    backbone = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], out_features=features
    )
    return {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": backbone}


def _siglip() -> dict[str, Any]:
    """A vision tower of transformers instead of another library's."""
    from transformers import SiglipVisionConfig

    return {"vision_config": SiglipVisionConfig()}


def _image_vocabulary() -> dict[str, Any]:
    words = {"<image>": 70, "<reserved08706>": 71}
    return {
        "vocabulary_map": {**words, **{f"IMGIMG{'A' if i < 10 else 'B'}{chr(65 + i % 10)}Z": 10 + i for i in range(20)}}
    }


def _text_pair() -> dict[str, Any]:
    from transformers import BertConfig

    return {"encoder": BertConfig().to_dict(), "decoder": _decoder()}


def _speech_pair() -> dict[str, Any]:
    from transformers import Wav2Vec2Config

    return {"encoder": Wav2Vec2Config().to_dict(), "decoder": _decoder()}


def _vision_pair() -> dict[str, Any]:
    from transformers import ViTConfig

    return {"encoder": ViTConfig().to_dict(), "decoder": _decoder()}


def _decoder() -> dict[str, Any]:
    from transformers import BertConfig

    return dict(BertConfig(is_decoder=True, add_cross_attention=True).to_dict())


def _vision_and_text() -> dict[str, Any]:
    from transformers import BertConfig, ViTConfig

    return {"vision_config": ViTConfig().to_dict(), "text_config": BertConfig().to_dict()}


def _omdet() -> dict[str, Any]:
    return {**_resnet(3), "encoder_in_channels": [16, 32, 32], "apply_layernorm_after_vision_backbone": False}


def _edgetam() -> dict[str, Any]:
    """A vision tower that is not downloaded from a model hub."""
    from transformers import TimmWrapperConfig

    stages = {"in_chans": 3, "features_only": True, "out_indices": [1, 2, 3, 4]}
    backbone = TimmWrapperConfig(architecture="test_resnet", model_args=stages)
    return {
        "backbone_config": backbone,
        "backbone_channel_list": [96, 192, 48, 32],
    }


def _edgetam_tower() -> dict[str, Any]:
    from transformers import EdgeTamVisionConfig

    return {"vision_config": EdgeTamVisionConfig(**_edgetam())}


def _every_stage(backbone: str, stages: list[int], **more: Any) -> Callable[[], dict[str, Any]]:
    """A function that returns arguments for a backbone which returns the feature maps of these stages."""

    def arguments() -> dict[str, Any]:
        from transformers import AutoConfig

        return {"backbone_config": AutoConfig.for_model(backbone, out_indices=stages), **more}

    return arguments


#: The kernel, the stride and the padding of each convolution.
_INTRACLASS = {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0]} | {
    f"{name}_{ratio}ratio": [kernel, [1, 1], [k // 2 for k in kernel]]
    for ratio, size in (("long", 7), ("mid", 5), ("short", 3))
    for name, kernel in (
        ("vertical_long_to_small_conv", [size, 1]),
        ("horizontal_small_to_long_conv", [1, size]),
        ("symmetric_conv_long", [size, size]),
    )
}

#: Constructor arguments for config classes whose defaults make no model that can be built here.
_CONSTRUCTOR: Mapping[str, Mapping[str, Any] | Callable[[], dict[str, Any]]] = {
    "autoformer": {"prediction_length": 4, "context_length": 8, "num_time_features": 1},
    "informer": {"prediction_length": 4, "context_length": 8, "num_time_features": 1},
    "time_series_transformer": {"prediction_length": 4, "context_length": 8, "num_time_features": 1},
    "chameleon": _image_vocabulary,
    "emu3": _image_vocabulary,
    "conditional_detr": _resnet,
    "dab-detr": _resnet,
    "deformable_detr": _resnet,
    "detr": _resnet,
    "deta": _resnet,
    "omdet-turbo": _omdet,
    "table-transformer": _resnet,
    "edgetam": _edgetam_tower,
    "edgetam_video": _edgetam_tower,
    "edgetam_vision_model": _edgetam,
    "fast_vlm": _siglip,
    "granite4_vision": {"deepstack_layer_map": [[0, 0], [1, 1]], "downsample_rate": "1/2"},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["mamba", "attention", "mamba", "attention"]},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "phi4_multimodal": {"vision_config": {}, "audio_config": {}},
    "lw_detr": {"projector_scale_factors": [1.0]},
    "pp_ocrv6_medium_det": _every_stage("pp_lcnet_v4", [1, 2, 3, 4], intraclass_block_config=_INTRACLASS),
    "pp_ocrv6_small_det": _every_stage("pp_lcnet_v4", [1, 2, 3, 4], layer_list_out_channels=[96, 96, 192, 384]),
    "uvdoc": _every_stage("uvdoc_backbone", [1, 2, 3, 4, 5, 6]),
    "qwen2_vl": {"vision_start_token_id": 151652},
    "qwen2_5_vl": {"vision_start_token_id": 151652},
    "timm_wrapper": {"architecture": "resnet50"},
    "timm_backbone": {"backbone": "test_resnet", "use_pretrained_backbone": False},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
    "zamba": {"num_hidden_layers": 8},
    "encoder-decoder": _text_pair,
    "speech-encoder-decoder": _speech_pair,
    "vision-encoder-decoder": _vision_pair,
    "vision-text-dual-encoder": _vision_and_text,
    "xmod": {"default_language": "en_XX"},
}


def _gemma3n() -> dict[str, Any]:
    tower = _siglip()["vision_config"]
    tower.rms_norm_eps, tower.vocab_size, tower.vocab_offset = 1e-6, 8, 80
    return {"text_config": {"num_kv_shared_layers": 0}, "vision_config": tower}


def _perception_lm() -> dict[str, Any]:
    tower = _siglip()["vision_config"]
    tower.model_args = {"embed_dim": 64}
    return {"vision_config": tower}


def _compass() -> dict[str, Any]:
    ropes = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
    kinds = ["sliding_attention", "full_attention"]
    return {"rope_parameters": ropes, "layer_types": kinds, "sliding_window": WINDOW, "num_hidden_layers": 2}


_EFFICIENTNET = {"width_coefficient": 0.05, "depth_coefficient": 0.1, "hidden_dim": 64, "image_size": 64}
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
_SAM2_VISION = {
    "backbone_config": _HIERA,
    "backbone_channel_list": [128, 64, 32, 16],
}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
_SLIDING_AND_FULL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

#: Values for the tiny config; a nested config is a mapping under its name.
_OVERRIDES: Mapping[str, Mapping[str, Any] | Callable[[], dict[str, Any]]] = {
    "cohere_compass": lambda: {"text_config": _compass()},
    "cohere_compass_text": _compass,
    "align": {"vision_config": _EFFICIENTNET, "projection_dim": 16},
    "blip-2": {"image_token_index": 90, "image_token_id": 90},
    "clvp": {
        "decoder_config": {"decoder_fixing_codes": [83, 45, 45, 48]},
        "speech_config": {"num_attention_heads": 2},
        "text_config": {"num_attention_heads": 2},
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}, "ffn_config": {"ffn_hidden_size": 64}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "depth_pro": {
        "patch_size": 16,
        "intermediate_hook_ids": [1, 0],
        "intermediate_feature_dims": [16, 16],
        "scaled_images_feature_dims": [32, 32, 16],
        "fusion_hidden_size": 16,
        "merge_padding_value": 0,
    },
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 4, "moe_intermediate_size": 32}},
    "dots3_note": {"text_config": {"qk_rope_head_dim": 4}},
    "dots3_note_text": {"qk_rope_head_dim": 4},
    "edgetam_video": {
        "perceiver_resampler_attention_head_dim": 64,
        "perceiver_resampler_num_latents_2d": 4,
        "memory_attention_rope_k_sizes": [2, 2],
    },
    "efficientloftr": {"num_attention_heads": 8},
    "efficientnet": _EFFICIENTNET,
    "evolla": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_head": 16, "mamba_n_heads": 8, "mamba_d_ssm": 128},
    "fastspeech2_conformer_with_hifigan": {"vocoder_config": {"model_in_dim": 16}},
    "gemma3n": _gemma3n,
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "instructblip": {"image_token_index": 90, "image_token_id": 90},
    "instructblipvideo": {"video_token_index": 90, "video_token_id": 90},
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": None},
    "jetmoe": {"num_key_value_heads": 1},
    "layoutlmv3": {"coordinate_size": 10, "shape_size": 12, "hidden_size": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 96, "channel_shrink_ratio": 4},
    "mamba2": {"num_heads": 8},
    "mobilebert": {"embedding_size": 64, "true_hidden_size": 64, "intra_bottleneck_size": 64},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "perception_lm": _perception_lm,
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "retribert": {"position_embedding_type": "absolute"},
    "sam2": {"vision_config": _SAM2_VISION},
    "sam2_hiera_det_model": _HIERA,
    "sam2_video": {"vision_config": _SAM2_VISION},
    "sam2_vision_model": _SAM2_VISION,
    "step3p7": {"text_config": _SLIDING_AND_FULL},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "transfo-xl": {"cutoffs": [20, 40, 60], "div_val": 1, "d_head": 16},
    "tvp": {"max_img_size": 64, "visual_prompt_size": 8, "type_vocab_size": 2},
    "xcodec": {"codebook_dim": 192},
    "xlstm": {"qk_dim_factor": 1.0},
    "zamba2": {"use_mem_rope": True},
    "zamba": {
        "num_hidden_layers": 8,
        "layers_block_type": None,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
}


def constructor(model_type: str, config_class: type[Any]) -> dict[str, Any]:
    """Constructor arguments for a config class, without arguments that this release of it does not take."""
    recipe = _CONSTRUCTOR.get(model_type, {})
    values = dict(recipe() if callable(recipe) else recipe)
    names = inspect.signature(config_class.__init__).parameters
    if dataclasses.is_dataclass(config_class):
        # transformers 5.4 annotates some flags as int, and newer releases of its hub library check the type.
        for field in dataclasses.fields(config_class):
            if isinstance(field.default, bool) and "int" in str(field.type) and "bool" not in str(field.type):
                values.setdefault(field.name, int(field.default))
    return {name: value for name, value in values.items() if name in names or name != "use_timm_backbone"}


def overrides(model_type: str) -> dict[str, Any]:
    """Values for the tiny config of a model type."""
    recipe = _OVERRIDES.get(model_type, {})
    return dict(recipe() if callable(recipe) else recipe)
