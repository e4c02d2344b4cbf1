"""Tiny configs: a model's own config with all sizes reduced, so that a model of its class is built in milliseconds.

Sizes are chosen by the names of the config's attributes. All configs of one model get the same sizes, so that a vision tower
still fits its text model. One layer of each kind is kept.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["LEVELS", "VOCABULARY", "WINDOW", "Level", "shrink"]

HIDDEN = 64
HEADS = 4
HEAD_DIM = 16
KEY_VALUE_HEADS = 2
INTERMEDIATE = 96
EXPERTS = 4
VOCABULARY = 100
#: The number of positions: more than any case has tokens.
POSITIONS = 128
WINDOW = 5
CHUNK = 6
IMAGE = 16
PATCH = 4
#: The largest number of layers of one config.
MOST_LAYERS = 6

#: Names of attributes with a number of layers.
_LAYERS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|depth|layers|num_blocks|(\w+_)?(en|de)coder_layers|num_(en|de)coder_layers|num_self_attends_per_block|num_res_blocks|"
    r"\w+_num_hidden_layers|\w+_num_layers|num_(global|spatial|temporal|auxiliary|residual|adapter|lstm)_layers|"
    r"(\w+_)?depth|num_encoder_blocks|num_mel_attn_blocks|lqe_layers|\w+_predictor_layers|resampler_depth|"
    r"num_timestamp_prediction_layers|speech_decoder_postnet_layers|parcae_num_coda_layers|num_loops|inference_num_steps)$"
)
#: Attributes that hold a config's number of layers, in the order of precedence.
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth")
#: Names of attributes with a list of layer indices.
_INDICES = re.compile(r"(index|indexes|indices|idxs|_ids|_layers|layers_idx|_layer_list)$")
#: Lists of layer indices that must keep their length, because other parts have as many entries.
_EACH_INDEX = re.compile(
    r"^_?(backbone_)?out_indices$|^intermediate_(layers|hidden_state)_ind\w+$|^intermediate_hook_ids$"
)

#: Patterns for attribute names, and the size; the first match counts. A size is never increased.
_SIZES: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile(pattern), size)
    for pattern, size in (
        # Experts: every token goes to all of them, so that rounding never changes the routing.
        (r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_routed_experts)$", EXPERTS),
        (r"^(n_group|topk_group|num_expert_groups?|num_expert_group)$", 1),
        (r"^(moe_intermediate_size|\w*expert_(intermediate_size|dim)|\w*expert_ffn\w*|moe_hidden_size)$", 32),
        (r"^shared_experts_intermediate_size$|^shared_intermediate_size$", 32),
        # Vocabularies.
        (
            r"(^|_)vocab_size(_per_layer_input|_base)?$|hash_byte_group_vocab$|^n_vocab$|^vocab_offset$|^num_res_types$",
            VOCABULARY,
        ),
        (r"^(codebook_size|num_codes|n_codes_total|num_embeds|num_embeddings|num_quantizers_size)$", 32),
        # Multi-head latent attention and similar.
        (r"^q_lora_rank$|^o_lora_rank$", 32),
        (r"^(kv_lora_rank|\w*lora_rank\w*|laurel_rank|gated_norm_rank|hc_lowrank|moe_latent_size)$", 16),
        (r"^(qk_nope_head_dim|qk_rope_head_dim|v_head_dim|linear_(key|value)_head_dim|index_head_dim)$", HEAD_DIM),
        (r"^qk_head_dim$", 2 * HEAD_DIM),
        (r"^index_n_heads$", HEADS),
        (r"^index_topk$", 64),
        # Linear attention and state spaces: twice the width in heads of one dimension.
        (r"^linear_num_value_heads$", 4),
        (r"^linear_num_key_heads$", 2),
        (r"^(mamba_n_heads|mamba_num_heads|n_mamba_heads)$", 2 * HEADS),
        (r"^(mamba_d_state|state_size|ssm_state_size)$", 16),
        (r"^(mamba_n_groups|n_groups)$", 2),
        (r"^(mamba_d_ssm|mamba_intermediate_size)$", 2 * HIDDEN),
        (r"^(time_step_rank|mamba_dt_rank)$", 8),
        (r"^(mamba_)?(chunk_size|chunk_length)$", 8),
        # Windows and chunks.
        (r"^local_attention$", 2 * (WINDOW // 2 + 1)),
        (r"^attention_window$", 2 * (WINDOW // 2 + 1)),
        (
            r"^(sliding_window|sliding_window_size|local_attention_window_len|swa_window_size|attention_window_size)$",
            WINDOW,
        ),
        (r"^attention_chunk_size$", CHUNK),
        # Heads.
        (r"^rotary_dim$", HEAD_DIM // 2),
        (
            r"(^|_)(head_dim|dim_head|d_head|d_kv|kv_channels)$|^(head_dim|global_head_dim|attention_head_dim)\w*$",
            HEAD_DIM,
        ),
        (r"^(\w+_)?(attention_heads|num_heads|n_heads?|num_attention_heads|heads|num_attn_heads)$", HEADS),
        (r"^cross_num_attention_heads$|^decoder_cross_attention_heads$|^num_sliding_attention_heads$", HEADS),
        # Positions.
        (
            r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_len|max_sequence_length|model_max_length)$",
            POSITIONS,
        ),
        (
            r"^(max_target_positions|context_length|max_text_len|max_text_tokens|\w+_max_position_embeddings)$",
            POSITIONS,
        ),
        (r"^max_source_positions$", 64),
        (r"^max_2d_position_embeddings$", 1024),
        # Widths of feed-forward networks.
        (
            r"^(\w+_)?(intermediate_size|ffn_dim|ffn_hidden_size|mlp_dim|d_ff|dff|d_inner|dim_ff|n_inner)(_mlp|_global)?$",
            INTERMEDIATE,
        ),
        (
            r"^(\w+_)?(dim_feedforward|feedforward_dim|linear_units|feed_forward_hidden_size|mlp_hidden_size)$",
            INTERMEDIATE,
        ),
        (r"^(\w+_)?(intermediate_dim|block_ff_dim|feed_forward_size|mlp_hidden_dim)$", INTERMEDIATE),
        # Widths.
        (r"^(hidden_size_per_layer_input)$", 16),
        (r"^(hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|emb_dim|width|hidden_channels)$", HIDDEN),
        (
            r"^(\w+_)?(hidden_size|embed_dim|embedding_size|embedding_dim|projection_dim|project_dim|output_dim)$",
            HIDDEN,
        ),
        (
            r"^(\w+_)?(hidden_size_global|proj_dim|emb_dim|hidden_dim|hidden_channels|embeds_hidden_size|d_model)$",
            HIDDEN,
        ),
        (
            r"^(\w+_)?(input_dim|output_dim|out_dim|in_dim|output_dims|proj_dims|codevector_dim|proj_size|query_dim)$",
            HIDDEN,
        ),
        (
            r"^(projection_size|pooler_output_size|bottleneck_\w+|vision_dim|fusion_dim|vit_dim|kv_dim|query_dim)$",
            HIDDEN,
        ),
        (
            r"^(mask_feature_size|conv_output_size|xvector_output_dim|classifier_proj_size|upsample_initial_channel)$",
            HIDDEN,
        ),
        (r"^(codebook_dim|latent_dim|vector_quantization_hidden_dimension|latent_size|condition_dim)$", 32),
        # Images and sounds.
        (r"^mm_tokens_per_image$", 4),
        (r"^num_mel_bins$|^n_mels$|^input_feat_size$|^feature_size_mel$", 16),
        (r"^num_position_embeddings$", 64),
        (r"^num_conv_pos_embeddings$", 16),
        (r"^num_queries$|^num_query_tokens$|^resampler_n_latents$|^resampler_num_latents$|^latent_query_num$", 8),
        (r"^(conv_channels|subsampling_conv_channels|stem_channels)$", 16),
        (r"^num_filters$", 4),
        (r"^base_channels$", 32),
        (r"^num_groups$", 4),
        (r"^x4_feat_dim$", 16),
        (r"^(d_latents|d_embed)$", HIDDEN),
        (r"^num_latents$", 8),
        (r"^depthwise_separable_out_channel$|^nemo_conv_channels$|^ext_pw_out_channel$", HIDDEN),
        (r"^num_hash_buckets$", 64),
    )
)
#: Names of the number of experts for a token.
_EXPERTS_PER_TOKEN = re.compile(
    r"^(num_experts_per_tok|num_experts_per_token|moe_top_?k|moe_k|top_k_experts|num_selected_experts|router_top_k|"
    r"num_experts_per_topk|moe_num_active_primary_experts|experts_top_k)$"
)
_KEY_VALUE_HEADS = re.compile(
    r"(^|_)(num_key_value_heads|num_kv_heads|kv_n_heads|n_head_kv|num_global_key_value_heads)$"
)
#: Names of the period in which kinds of layers alternate.
_PERIODS = re.compile(
    r"^(\w+_period|full_attention_interval|global_attn_every_n_layers|_?sliding_window_pattern|layer_group_size)$"
)
_OFFSETS = re.compile(
    r"^(attn_layer_offset|expert_layer_offset|max_window_layers|num_dense_layers|first_k_dense_replace)$"
)
_RANDOM = re.compile(r"drop|^mask_(time|feature)_prob$|^router_jitter_noise$|^layerdrop$|jitter")
#: The attribute with values of single layers that differ from the config's, by layer index; from transformers 5.20 on.
_PER_LAYER = "per_layer_config"
_TOKEN = re.compile(r"(^|_)(token_(id|index)s?|token_ids)$|^(bos|eos|pad|sep|cls|mask|unk)_(index|id)$")


#: Values for attributes that are None in configs from which no model can be built.
_MISSING: Mapping[str, Any] = {
    "head_dim": HEAD_DIM,
    "num_key_value_heads": HEADS,
    "n_routed_experts": EXPERTS,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "moe_intermediate_size": 32,
    "rope_scaling": {"rope_type": "default", "type": "default"},
}


@dataclasses.dataclass(frozen=True)
class Level:
    """The extent to which a config is shrunk.

    Attributes:
        widths: whether layers also become narrower: the widths of consecutive convolutions often have to fit each other.
        missing: whether numbers that are None in the config are filled in.
    """

    widths: bool = True
    missing: bool = False


#: The levels in the order of trying, smallest models first.
LEVELS = (Level(), Level(missing=True), Level(widths=False), Level(widths=False, missing=True))


def shrink(
    config: Any,
    overrides: Mapping[str, Any] | None = None,
    *,
    level: Level = LEVELS[0],
    multimodal_rope: bool = False,
) -> Any:
    """A config of the same class and kinds of layers, with small sizes and without dropout.

    Args:
        config: an instance of any config class, with or without nested configs. It is not modified.
        overrides: values that take precedence over the rules; for a nested config, a mapping under its name.
        level: the extent to which sizes are reduced.
        multimodal_rope: whether the model divides rotary channels into sections; then each config without sections gets
            sections that fit the smaller heads.
    """
    tiny = _shrink(config, overrides or {}, _Tokens(_vocabulary_of(config)), level)
    if multimodal_rope:
        _add_sections(tiny)
    return tiny


def _add_sections(config: Any) -> None:
    """Add sections to each rope of a text model that has none."""
    for value in vars(config).values():
        if _is_config(value):
            _add_sections(value)
    heads, vocabulary = (_get(config, name) for name in ("num_attention_heads", "vocab_size"))
    if heads is None or vocabulary is None:
        return
    head_dim = _get(config, "head_dim") or config.hidden_size // heads
    for name in ("rope_parameters", "rope_scaling"):
        if name not in vars(config) and not isinstance(_get(config, name), dict):
            continue
        rope = _get(config, name)
        if rope is None and name == "rope_scaling":
            rope = {"rope_type": "default", "type": "default"}
        if not isinstance(rope, dict) or "mrope_section" in rope:
            continue
        _set(config, name, _with_sections(rope, head_dim, _get(config, "partial_rotary_factor") or 1))


def _with_sections(rope: dict[str, Any], head_dim: int, partial: float) -> dict[str, Any]:
    """Parameters of a rope, or of one rope for each kind of layer, with sections that fit."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {k: _with_sections(v, head_dim, partial) if isinstance(v, dict) else v for k, v in rope.items()}
    partial = rope.get("partial_rotary_factor") or partial
    return {**rope, "mrope_section": _sections([1, 1, 1], int(head_dim * partial) // 2)}


def _get(config: Any, name: str) -> Any:
    """The attribute, or None; if layers have their own values, the value of the config."""
    try:
        return getattr(config, name, None)
    except Exception:  # from 5.20 on some that differ by layer raise
        return vars(config).get(name)


class _Tokens:
    """New ids for special tokens; one token gets the same id in all configs of a model."""

    def __init__(self, vocabulary: int) -> None:
        self._next = min(vocabulary, VOCABULARY) - 1
        self._moved: dict[int, int] = {}

    def __call__(self, token: int) -> int:
        if token < 0 or token < 5:
            return token
        if token not in self._moved:
            self._moved[token] = max(self._next, 5)
            self._next -= 1
        return self._moved[token]


def _vocabulary_of(config: Any) -> int:
    size = _get(config, "vocab_size")
    return size if isinstance(size, int) and size > 30 else VOCABULARY


def _shrink(config: Any, overrides: Mapping[str, Any], tokens: _Tokens, level: Level) -> Any:
    values = _values(config)
    changed: dict[str, Any] = {}
    if level.missing:
        changed.update({name: value for name, value in _MISSING.items() if name in values and values[name] is None})
    picks = _picked_layers(config, values)
    experts = min([EXPERTS, *(v for k, v in values.items() if _is_experts(k) and _is_int(v) and v > 0)])
    for name, value in values.items():
        if _is_config(value):
            override = overrides.get(name)
            nested, wins = (override, {}) if _is_config(override) else (value, override or {})
            changed[name] = _shrink(nested, wins, tokens, level)
            continue
        new = _smaller(name, value, values, picks, experts, tokens, level)
        if new is not value and (type(new) is not type(value) or new != value):
            changed[name] = new
    if isinstance(values.get("architecture"), str):  # a name of another library's model
        changed.update(_timm(values))
    if values.get("use_sliding_window") is False and "sliding_window" in values:
        changed.update(use_sliding_window=True, sliding_window=WINDOW)
        if "max_window_layers" in values:
            changed["max_window_layers"] = 1
        if isinstance(values.get("layer_types"), list):
            changed["layer_types"] = ["full_attention", "sliding_attention"]
    changed.update({name: value for name, value in overrides.items() if not _is_config(values.get(name))})
    new = _rebuilt(config, values, changed)
    if not hasattr(new, "pad_token_id"):
        _set(new, "pad_token_id", None)  # some classes of transformers 5.0 take it from the checkpoint
    for name, value in overrides.items():
        if _is_config(value):
            vars(new)[name] = changed[name]  # the constructor would make it of another class
    if "_out_indices" in vars(config):
        _set_outputs(config, new)
    return new


def _timm(values: Mapping[str, Any]) -> dict[str, Any]:
    """The smallest architecture of timm in the same family."""
    arguments = values.get("model_args") or {}
    if values["architecture"].startswith("vit"):
        return {"architecture": "test_vit", "model_args": {**arguments, "img_size": 64}}
    return {"architecture": "test_resnet"}


def _set_outputs(config: Any, new: Any) -> None:
    """Make a backbone return as many feature maps as before, from stages that it still has."""
    wanted = len(vars(config)["_out_indices"] or [-1])
    number = _layers_of(new)
    if not _has_stages(vars(config)) and number is not None:
        vars(new)["stage_names"] = ["stem"] + [f"stage{i + 1}" for i in range(number)]
        indices = list(range(number + 1))[-wanted:]
    else:
        indices = list(vars(config)["_out_indices"] or [-1])
    stages = vars(new).get("stage_names") or []
    if stages and max(indices) < len(stages):
        vars(new)["_out_indices"] = indices
        vars(new)["_out_features"] = [stages[index] for index in indices]


def _values(config: Any) -> dict[str, Any]:
    """The values of the constructor's parameters, then of all other public attributes."""
    found: dict[str, Any] = {}
    for name in _parameters(type(config)):
        if name in vars(config):
            found[name] = vars(config)[name]
    for name, value in vars(config).items():
        if not name.startswith("_"):
            found.setdefault(name, value)
    if own := config.to_dict().get(_PER_LAYER):
        found[_PER_LAYER] = own
    return found


def _parameters(klass: type) -> list[str]:
    if dataclasses.is_dataclass(klass):
        return [field.name for field in dataclasses.fields(klass) if field.init]
    parameters = inspect.signature(klass.__init__).parameters.values()  # type: ignore[misc]
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]


def _is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(type(value), "model_type")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_experts(name: str) -> bool:
    return _SIZES[0][0].match(name) is not None


def _layers_of(config: Any) -> int | None:
    for name in (*_LAYER_COUNTS, "encoder_layers"):
        if _is_int(number := _get(config, name)):
            return int(number)
    return None


def _picked_layers(config: Any, values: Mapping[str, Any]) -> list[int] | None:
    """The indices of the layers that are kept: one of each kind, at least two. None if all layers are alike."""
    number = _layers_of(config)
    if not number or number < 2 or _has_stages(values):
        return None
    kinds: list[list[Any]] = [[] for _ in range(number)]
    wanted: set[int] = set()
    found = False
    for name, value in values.items():
        if not isinstance(value, (list, tuple)) or not value:
            continue
        if _EACH_INDEX.search(name) and all(_is_int(v) for v in value):
            if len(value) > 1 and max(value) <= number:
                wanted |= {min(v, number - 1) for v in value if v >= 0}
                found = True
        elif len(value) == number and not _is_stages(name):
            found = True
            for kind, v in zip(kinds, value, strict=True):
                kind.append(repr(v))
        elif _is_indices(name, value, number):
            found = True
            for index, kind in enumerate(kinds):
                kind.append(index in value)
    if not found:
        return None
    seen: list[list[Any]] = []
    picks = []
    for index, kind in enumerate(kinds):
        if index in wanted or kind not in seen:
            picks.append(index)
            seen.append(kind)
    picks = picks[:MOST_LAYERS]
    for index in range(number):
        if len(picks) >= 2:
            break
        if index not in picks:
            picks.append(index)
    return sorted(picks)


def _has_stages(values: Mapping[str, Any]) -> bool:
    """Whether the layers come in stages of different widths."""
    return any(isinstance(values.get(name), (list, tuple)) for name in ("depths", "blocks_per_stage", "block_sizes"))


def _is_stages(name: str) -> bool:
    return name in ("depths", "hidden_sizes", "num_heads", "embed_dims")


def _is_indices(name: str, value: Any, number: int) -> bool:
    return (
        _INDICES.search(name) is not None
        and _TOKEN.search(name) is None
        and all(_is_int(v) and 0 <= v < number for v in value)
        and len(set(value)) == len(value)
    )


def _smaller(
    name: str,
    value: Any,
    values: Mapping[str, Any],
    picks: list[int] | None,
    experts: int,
    tokens: _Tokens,
    level: Level,
) -> Any:
    if isinstance(value, dict):
        if name == _PER_LAYER:
            return _smaller_layers(value, values, picks)
        return _smaller_mapping(name, value, values, tokens)
    if isinstance(value, (list, tuple)) and value:
        smaller = _smaller_list(name, list(value), values, picks, tokens, level)
        return type(value)(smaller) if type(value) in (list, tuple) else smaller
    if _RANDOM.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return type(value)(0) if name != "drop_path_rate" or not isinstance(value, int) else 0
    if name == "apply_spec_augment":
        return False
    if name == "use_mamba_kernels":
        return False  # the torch path runs on all devices
    if not _is_int(value):
        return value
    if _TOKEN.search(name):
        return tokens(value)
    if not level.widths and not _LAYERS.match(name) and name not in _NEVER_WIDTHS:
        return value
    return _smaller_int(name, value, values, picks, experts)


#: Sizes that are reduced at every level.
_NEVER_WIDTHS = ("vocab_size", "image_size", "max_position_embeddings", "sliding_window", "num_experts_per_tok")


def _smaller_int(name: str, value: int, values: Mapping[str, Any], picks: list[int] | None, experts: int) -> int:
    if value <= 0:
        return value
    if _LAYERS.match(name):
        if _has_stages(values) and name in ("num_layers", "num_encoder_blocks", "num_hidden_layers"):
            return value
        if picks is not None and name in _LAYER_COUNTS:
            return len(picks)
        return min(value, 2)
    if _EXPERTS_PER_TOKEN.match(name):
        return experts
    if name == "top_k" and any(map(_is_experts, values)):
        return experts
    if _KEY_VALUE_HEADS.search(name):
        heads = next(
            (v for n in ("num_attention_heads", "n_head", "n_heads", "num_heads") if _is_int(v := values.get(n))), 0
        )
        return min(value, HEADS if value == heads else KEY_VALUE_HEADS)
    if _PERIODS.match(name):
        return min(value, 2)
    if _OFFSETS.match(name):
        return min(value, 1)
    if name in ("image_size", "img_size", "max_image_size", "crop_size"):
        return min(value, 64 if _is_hierarchical(values) else IMAGE)
    if name == "encoder_hidden_size" and "downsampling_ratios" in values:
        return min(value, 8)  # it doubles with every ratio
    if name == "upsample_groups":
        return min(value, HIDDEN)
    if name == "patch_size":
        return value if _is_hierarchical(values) else min(value, PATCH)
    if name == "embed_dim" and _is_hierarchical(values):
        heads = values.get("num_heads")
        return 8 * heads[0] if isinstance(heads, (list, tuple)) and heads and _is_int(heads[0]) else value // 4
    if name == "window_size" and "attention_types" in values:  # of local attention
        return min(value, WINDOW)
    if name == "window_size":
        # In pixels, in patches, or in tokens.
        return 16 if value >= 64 else min(value, 2 if _has_stages(values) else 4)
    for pattern, size in _SIZES:
        if pattern.search(name):
            return min(value, size)
    return value


def _is_hierarchical(values: Mapping[str, Any]) -> bool:
    return any(
        isinstance(values.get(name), (list, tuple)) for name in ("depths", "hidden_sizes", "num_heads", "embed_dims")
    )


def _smaller_list(
    name: str, value: list[Any], values: Mapping[str, Any], picks: list[int] | None, tokens: _Tokens, level: Level
) -> list[Any]:
    number = next((v for n in _LAYER_COUNTS if _is_int(v := values.get(n))), None)
    if all(_is_int(v) for v in value):
        if _TOKEN.search(name):
            return [tokens(v) for v in value]
        if name == "mrope_section":
            return _sections(value, HEAD_DIM // 2)
        if picks is not None and number:
            if len(value) == number and not _is_stages(name):
                return [_smaller_int(_single(name), value[p], values, None, EXPERTS) for p in picks]
            if _EACH_INDEX.search(name):
                return [picks.index(p) if (p := min(v, number - 1)) in picks else v for v in value]
            if _is_indices(name, value, number):
                return [picks.index(v) for v in value if v in picks]
        elif _EACH_INDEX.search(name) and number and not _is_hierarchical(values):
            return [min(v, 2) if v > 0 else v for v in value]
        if name.endswith(("rope_feat_sizes", "rope_q_sizes")):
            return [4, 4]  # the last of the `backbone_feature_sizes`
        if name == "tubelet_size":
            return [value[0], *(min(v, PATCH) for v in value[1:])]
        if name in (
            "depths",
            "stage_num_blocks",
            "stage_numb_of_layers",
            "blocks_per_stage",
            "layers",
            "block_repeats",
        ):
            return [min(v, 2) for v in value]
        if not level.widths:
            return value
        if name in ("conv_dim", "tdnn_dim"):
            return [min(v, 16) for v in value]
        if name == "decoder_in_channels":
            return [min(v, HIDDEN) for v in value]
        if name == "stem_channels" or re.match(r"stage_\w+_channels$", name):
            return [v // 8 or v for v in value]  # as the widths of stages below; the first may be an image's channels
        if name == "image_size":
            return [v // min(value) * min(64 if _is_hierarchical(values) else IMAGE, *value) for v in value]
        if name in (
            "hidden_sizes",
            "embed_dims",
            "embed_dim",
            "neck_hidden_sizes",
            "encoder_hidden_sizes",
            "embed_dim_per_stage",
        ):
            heads = (
                values.get("num_attention_heads")
                or values.get("num_heads")
                or values.get("num_attention_heads_per_stage")
            )
            if isinstance(heads, (list, tuple)) and len(heads) == len(value):
                return [8 * h for h in heads]
            return [v // 8 for v in value] if all(v % 8 == 0 for v in value) and min(value) >= 64 else value
        return value
    if name == "backbone_feature_sizes":  # of an image of 64 pixels whose patches have 4, or one of 16 that is scaled
        return [[16, 16], [8, 8], [4, 4]]
    if name == "image_grid_pinpoints":
        return [[2 * IMAGE, IMAGE], [IMAGE, 2 * IMAGE], [2 * IMAGE, 2 * IMAGE]]
    if picks is not None and number and len(value) == number:
        return [value[p] for p in picks]
    return value


def _single(name: str) -> str:
    """The attribute name of a single layer's value, for a list with a value for each layer."""
    return re.sub(r"_per_layer$", "", name)


def _sections(value: list[int], total: int) -> list[int]:
    """Positive numbers in about the same proportion whose sum is `total`."""
    old = sum(value)
    new = [max(1, v * total // old) for v in value]
    new[-1] += total - sum(new)
    return new


def _smaller_layers(value: dict[Any, Any], values: Mapping[str, Any], picks: list[int] | None) -> dict[int, Any]:
    """The values of single layers that differ from the config's, for the layers that are kept."""
    new = {}
    for key, layer in value.items():
        if str(key).isdecimal() and int(key) in (picks or ()):
            both = {**values, **layer}
            sizes = {k: _smaller_int(k, v, both, None, EXPERTS) if _is_int(v) else v for k, v in layer.items()}
            new[(picks or []).index(int(key))] = sizes
    return new


def _smaller_mapping(name: str, value: dict[Any, Any], values: Mapping[str, Any], tokens: _Tokens) -> dict[Any, Any]:
    new = copy.deepcopy(value)
    for key, inner in value.items():
        if isinstance(inner, dict):
            new[key] = _smaller_mapping(str(key), inner, values, tokens)
        elif key == "mrope_section":
            partial = value.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1
            new[key] = _sections(inner, int(HEAD_DIM * partial) // 2)
        elif isinstance(inner, list) and key in ("short_factor", "long_factor"):
            new[key] = inner[: HEAD_DIM // 2]
    return new


def _rebuilt(config: Any, values: Mapping[str, Any], changed: dict[str, Any]) -> Any:
    """A config of the same class with these values: by its constructor if that takes them, else by setting attributes."""
    klass = type(config)
    parameters = _parameters(klass)
    given = {
        name: value for name, value in values.items() if name in parameters and not _is_default(klass, name, value)
    }
    given.update({name: value for name, value in changed.items() if name in parameters or name == _PER_LAYER})
    rest = {name: value for name, value in changed.items() if name not in given}
    for nested in (_plain, _same):
        try:
            new = klass(**{name: nested(value) for name, value in copy.deepcopy(given).items()})
        except Exception:  # a constructor may raise anything
            continue
        for name, value in rest.items():
            # Values that the constructor derives from the new sizes are kept.
            if _is_config(value) or vars(new).get(name) == vars(config).get(name):
                _set(new, name, value)
        for name, value in vars(config).items():
            if name not in vars(new):
                _set(new, name, changed.get(name, copy.deepcopy(value)))
        return new
    new = copy.deepcopy(config)
    for name, value in changed.items():
        _set(new, name, value)
    return new


def _is_default(klass: type, name: str, value: Any) -> bool:
    default = getattr(klass, name, inspect.Parameter.empty)
    parameter = inspect.signature(klass.__init__).parameters.get(name)  # type: ignore[misc]
    if parameter is not None:
        default = parameter.default
    try:
        return type(default) is type(value) and bool(default == value)
    except Exception:
        return False


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # a property without a setter, or a validator
        vars(config)[name] = value


def _plain(value: Any) -> Any:
    return value.to_dict() if _is_config(value) else value


def _same(value: Any) -> Any:
    return value
