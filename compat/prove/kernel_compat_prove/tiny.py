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
    r"(\w+_)?((decoder|encoder|hidden|adapter|global|spatial|temporal|prediction)_layers|num_layers|depth)|n_layers?|layers|"
    r"num_blocks"
)
#: Attributes that hold a config's number of layers, in the order of precedence.
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth")
#: Names of attributes with a list of layer indices.
_INDICES = re.compile(r"(index|indexes|indices|idxs|_ids|_layers|layers_idx|_layer_list)$")
#: Lists of layer indices that must keep their length, because other parts have as many entries.
_EACH_INDEX = re.compile(
    r"^_?(backbone_)?out_indices$|^intermediate_(layers|hidden_state)_ind\w+$|^intermediate_hook_ids$"
)

_EXPERTS = re.compile(r"(moe_)?num_experts|num_(local|routed)_experts|n_routed_experts")
_EXPERTS_PER_TOKEN = re.compile(
    r"num_experts_per_(tok|token|topk)|(moe|router|experts)_top_?k|top_k_experts|moe_k|num_selected_experts|"
    r"moe_num_active_primary_experts"
)
_KEY_VALUE_HEADS = re.compile(
    r"(^|_)(num_key_value_heads|num_kv_heads|kv_n_heads|n_head_kv|num_global_key_value_heads)$"
)
_RANDOM = re.compile(r"drop|^mask_(time|feature)_prob$|jitter")
_TOKEN = re.compile(r"(^|_)token_(id|index)s?$|^(bos|eos|pad|sep|cls|mask|unk)_(index|id)$")
#: The attribute with values of single layers that differ from the config's, by layer index; from transformers 5.20 on.
_PER_LAYER = "per_layer_config"

#: The size by the end of an attribute's name, whatever words are before it; the first match counts. No size is increased.
_SIZES = tuple(
    (re.compile(rf"(\w+_)?({pattern})"), size)
    for pattern, size in (
        # The period in which kinds of layers alternate, and the number of layers before.
        (r"period|full_attention_interval|global_attn_every_n_layers|_?sliding_window_pattern|layer_group_size", 2),
        (r"(attn|expert)_layer_offset|max_window_layers|num_dense_layers|first_k_dense_replace", 1),
        # Every token goes to all experts, so that rounding never changes the routing.
        (_EXPERTS.pattern, EXPERTS),
        (r"n_group|topk_group|num_expert_groups?", 1),
        (r"(moe_|experts?_(ffn_)?)(intermediate_|hidden_)(size|dim)|expert_dim|(?<!_)shared_intermediate_size", 32),
        (r"vocab_size(_per_layer_input)?|vocab_offset", VOCABULARY),
        (r"codebook_(size|dim)|num_embeddings|latent_dim|hidden_dimension|condition_dim|base_channels", 32),
        (r"[qo]_lora_rank", 32),
        (r"lora_rank|laurel_rank|norm_rank|hidden_size_per_layer_input|x4_feat_dim", 16),
        # Linear attention and state spaces: twice the width in heads of one dimension.
        (r"linear_num_key_heads|n_groups", 2),
        (r"mamba_n(um)?_heads|n_mamba_heads", 2 * HEADS),
        (r"d_state|state_size", 16),
        (r"mamba_d_ssm", 2 * HIDDEN),
        (r"time_step_rank|dt_rank", 8),
        # Windows and chunks.
        (r"(?<!_)local_attention|attention_window", 2 * (WINDOW // 2 + 1)),
        (r"sliding_window(_size)?|attention_window_(len|size)", WINDOW),
        (r"(?<!_)attention_chunk_size", CHUNK),
        (r"(mamba_|(?<!_))chunk_(size|length)", 8),
        # Heads.
        (r"rotary_dim", HEAD_DIM // 2),
        (r"qk_head_dim", 2 * HEAD_DIM),
        (r"head_dim|dim_head|d_head|d_kv|kv_channels", HEAD_DIM),
        (r"heads|n_head", HEADS),
        (r"index_topk|num_position_embeddings|max_source_positions", 64),
        (
            r"max_position_embeddings|n_positions|max_seq_len|model_max_length|target_positions|context_length",
            POSITIONS,
        ),
        # Images and sounds.
        (r"mm_tokens_per_image|num_filters", 4),
        (r"num_queries|num_query_tokens|query_num|n(um)?_latents", 8),
        (r"num_mel_bins|input_feat_size|num_conv_pos_embeddings", 16),
        # Widths.
        (
            r"(intermediate|ffn_hidden|feed_forward_hidden|mlp_hidden)_size|d_ff|dff|d_inner|(ffn|mlp|intermediate)_dim|"
            r"dim_feedforward",
            INTERMEDIATE,
        ),
        (
            r"(hidden|embedding|projection|proj|pooler_output)_size|d_model|n_embd|hidden_channels|nemo_conv_channels|"
            r"(embed|emb|embedding|projection|project|proj|hidden|codevector|input|output|query)_dim|(?<!_)dim|"
            r"(ext_pw|separable)_out_channel|upsample_groups",
            HIDDEN,
        ),
    )
)

#: Values for attributes that are None in configs from which no model can be built.
_MISSING: Mapping[str, Any] = {
    "head_dim": HEAD_DIM,
    "num_key_value_heads": HEADS,
    "n_routed_experts": EXPERTS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "moe_intermediate_size": 32,
    "rope_scaling": {"rope_type": "default", "type": "default"},
}
#: Sizes that are reduced at every level.
_AT_EVERY_LEVEL = ("vocab_size", "image_size", "max_position_embeddings", "sliding_window", "num_experts_per_tok")
#: Lists with a number of layers for each stage of a model.
_STAGE_LAYERS = ("depths", "stage_num_blocks", "stage_numb_of_layers", "blocks_per_stage", "layers", "block_repeats")
#: Lists with a width for each stage of a model.
_STAGE_WIDTHS = (
    "hidden_sizes",
    "embed_dims",
    "embed_dim",
    "neck_hidden_sizes",
    "encoder_hidden_sizes",
    "embed_dim_per_stage",
)


@dataclasses.dataclass(frozen=True)
class Level:
    """The extent to which a config is shrunk.

    Attributes:
        widths: whether layers also become narrower: the widths of consecutive convolutions often have to fit each other.
        missing: whether numbers that are None in the config are filled in.
        grouped: whether there are fewer heads of keys than of queries also where the config has as many.
    """

    widths: bool = True
    missing: bool = False
    grouped: bool = True


#: The levels in the order of trying, smallest models first.
LEVELS = (
    Level(),
    Level(grouped=False),
    Level(missing=True),
    Level(missing=True, grouped=False),
    Level(widths=False),
    Level(widths=False, missing=True),
)


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
    return _shrink(config, overrides or {}, _Model(config, level, multimodal_rope))


def _with_sections(rope: Any) -> Any:
    """Parameters of a rope, or of one rope for each kind of layer, with sections of its channels."""
    if not isinstance(rope, dict):
        return rope
    if any(isinstance(value, dict) for value in rope.values()):
        return {kind: _with_sections(value) for kind, value in rope.items()}
    return {"mrope_section": [1, 1, 1], **rope}


def _sections(value: list[int], total: int) -> list[int]:
    """Positive numbers in about the same proportion whose sum is `total`."""
    old = sum(value)
    new = [max(1, v * total // old) for v in value]
    new[-1] += total - sum(new)
    return new


def _get(config: Any, name: str) -> Any:
    """The attribute, or None; if layers have their own values, the value of the config."""
    try:
        return getattr(config, name, None)
    except Exception:  # from 5.20 on some that differ by layer raise
        return vars(config).get(name)


class _Model:
    """The settings that all configs of one model share.

    Attributes:
        level: the extent to which they are shrunk.
        multimodal_rope: whether ropes without sections get some.
    """

    def __init__(self, config: Any, level: Level, multimodal_rope: bool) -> None:
        size = _get(config, "vocab_size")
        self.level = level
        self.multimodal_rope = multimodal_rope
        self._next_token = min(size if _is_int(size) and size > 30 else VOCABULARY, VOCABULARY) - 1
        self._moved: dict[int, int] = {}

    def token(self, token: int) -> int:
        """The new id of a special token, the same in all configs."""
        if token < 5:
            return token
        if token not in self._moved:
            self._moved[token] = max(self._next_token, 5)
            self._next_token -= 1
        return self._moved[token]


def _shrink(config: Any, overrides: Mapping[str, Any], model: _Model) -> Any:
    rules = _Rules(config, model)
    values = rules.values
    changed: dict[str, Any] = {}
    if model.level.missing:
        changed.update({name: value for name, value in _MISSING.items() if name in values and values[name] is None})
    for name, value in values.items():
        if _is_config(value):
            override = overrides.get(name)
            nested, wins = (override, {}) if _is_config(override) else (value, override or {})
            changed[name] = _shrink(nested, wins, model)
            continue
        new = rules.smaller(name, value)
        if new is not value and (type(new) is not type(value) or new != value):
            changed[name] = new
    if str(values.get("architecture")).startswith("vit"):  # a model of timm
        arguments = {**(values.get("model_args") or {}), "img_size": 64}
        changed.update(architecture="test_vit", model_args=arguments)
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


def _set_outputs(config: Any, new: Any) -> None:
    """Make a backbone return as many feature maps as before, from stages that it still has."""
    indices = list(vars(config)["_out_indices"] or [-1])
    number = _layers_of(new)
    if not _has_stages(vars(config)) and number is not None:
        vars(new)["stage_names"] = ["stem"] + [f"stage{i + 1}" for i in range(number)]
        indices = list(range(number + 1))[-len(indices) :]
    stages = vars(new).get("stage_names") or []
    if stages and max(indices) < len(stages):
        vars(new)["_out_indices"] = indices
        vars(new)["_out_features"] = [stages[index] for index in indices]


def _values(config: Any) -> dict[str, Any]:
    """The values of the constructor's parameters, then of all other public attributes."""
    values = {name: vars(config)[name] for name in _parameters(type(config)) if name in vars(config)}
    values |= {name: value for name, value in vars(config).items() if name not in values and not name.startswith("_")}
    if own := config.to_dict().get(_PER_LAYER):
        values[_PER_LAYER] = own
    return values


def _parameters(klass: type) -> list[str]:
    if dataclasses.is_dataclass(klass):
        return [field.name for field in dataclasses.fields(klass) if field.init]
    parameters = inspect.signature(klass.__init__).parameters.values()  # type: ignore[misc]
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]


def _is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(type(value), "model_type")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _layers_of(config: Any) -> int | None:
    counts = (_get(config, name) for name in (*_LAYER_COUNTS, "encoder_layers"))
    return next((int(number) for number in counts if _is_int(number)), None)


def _has_stages(values: Mapping[str, Any]) -> bool:
    """Whether the layers come in stages of different widths."""
    return any(_is_list(values.get(name)) for name in ("depths", "blocks_per_stage", "block_sizes"))


class _Rules:
    """The rules by which the attributes of one config are reduced.

    Attributes:
        values: the attributes.
        experts: the number of experts.
        needs_sections: whether it is a text model whose ropes need sections.
        number: the number of layers.
        picks: the indices of the layers that are kept; None if all layers are alike.
    """

    def __init__(self, config: Any, model: _Model) -> None:
        self.values = _values(config)
        self.model = model
        experts = [v for k, v in self.values.items() if _EXPERTS.fullmatch(k) and _is_int(v) and v > 0]
        self.experts = min([EXPERTS, *experts])
        text = self.values.get("num_attention_heads") is not None and self.values.get("vocab_size") is not None
        self.needs_sections = model.multimodal_rope and text
        self.number = next((v for n in _LAYER_COUNTS if _is_int(v := self.values.get(n))), None)
        self.picks = self._picked_layers(_layers_of(config))

    def _picked_layers(self, number: int | None) -> list[int] | None:
        """The indices of the layers that are kept: one of each kind, at least two. None if all layers are alike."""
        if not number or number < 2 or _has_stages(self.values):
            return None
        kinds: list[list[Any]] = [[] for _ in range(number)]
        wanted: set[int] = set()
        has_kinds = False
        for name, value in self.values.items():
            if not _is_list(value) or not value:
                continue
            if _EACH_INDEX.search(name) and all(map(_is_int, value)):
                if len(value) > 1 and max(value) <= number:
                    wanted |= {min(v, number - 1) for v in value if v >= 0}
                    has_kinds = True
            elif len(value) == number:
                has_kinds = True
                for kind, v in zip(kinds, value, strict=True):
                    kind.append(repr(v))
            elif _is_indices(name, value, number):
                has_kinds = True
                for index, kind in enumerate(kinds):
                    kind.append(index in value)
        if not has_kinds:
            return None
        picks = [i for i, kind in enumerate(kinds) if i in wanted or kind not in kinds[:i]][:MOST_LAYERS]
        others = (i for i in range(number) if i not in picks)
        return sorted([*picks, *others][: max(len(picks), 2)])

    def smaller(self, name: str, value: Any) -> Any:
        """The reduced value of an attribute."""
        if self.needs_sections and name in ("rope_parameters", "rope_scaling"):
            rope = {"rope_type": "default", "type": "default"} if value is None and name == "rope_scaling" else value
            value = _with_sections(rope)
        if isinstance(value, dict):
            return self._single_layers(value) if name == _PER_LAYER else self._mapping(value)
        if _is_list(value) and value:
            new = self._list(name, list(value))
            return type(value)(new) if type(value) in (list, tuple) else new
        if _RANDOM.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
            return type(value)(0)
        if name in ("apply_spec_augment", "use_mamba_kernels"):  # the torch path runs on all devices
            return False
        if not _is_int(value):
            return value
        if _TOKEN.search(name):
            return self.model.token(value)
        if not self.model.level.widths and not _LAYERS.fullmatch(name) and name not in _AT_EVERY_LEVEL:
            return value
        return self._integer(name, value, self.experts, self.picks)

    def _integer(self, name: str, value: int, experts: int = EXPERTS, picks: list[int] | None = None) -> int:
        if value <= 0:
            return value
        if _LAYERS.fullmatch(name):
            if _has_stages(self.values) and name in ("num_layers", "num_hidden_layers"):
                return value
            return len(picks) if picks is not None and name in _LAYER_COUNTS else min(value, 2)
        if _EXPERTS_PER_TOKEN.fullmatch(name) or (name == "top_k" and any(map(_EXPERTS.fullmatch, self.values))):
            return experts
        if _KEY_VALUE_HEADS.search(name):
            names = ("num_attention_heads", "n_head", "n_heads", "num_heads")
            heads = next((v for n in names if _is_int(v := self.values.get(n))), 0)
            if value != heads:
                return min(value, KEY_VALUE_HEADS)
            heads = min(heads, HEADS)
            return max(heads // 2, 1) if self.model.level.grouped else heads
        if name in ("image_size", "img_size", "max_image_size", "crop_size"):
            return min(value, IMAGE)
        if name == "encoder_hidden_size" and "downsampling_ratios" in self.values:
            return min(value, 8)  # it doubles with every ratio
        if name == "patch_size":
            return min(value, PATCH)
        if name == "window_size" and "attention_types" in self.values:  # of local attention
            return min(value, WINDOW)
        if name == "window_size":  # in pixels, in patches, or in tokens
            return 16 if value >= 64 else min(value, 2 if _has_stages(self.values) else 4)
        return next((min(value, size) for pattern, size in _SIZES if pattern.fullmatch(name)), value)

    def _list(self, name: str, value: list[Any]) -> list[Any]:
        each = self.picks is not None and self.number == len(value)
        if not all(map(_is_int, value)):
            if name == "backbone_feature_sizes":  # of an image of 64 pixels whose patches have 4
                return [[16, 16], [8, 8], [4, 4]]
            if name == "image_grid_pinpoints":
                return [[2 * IMAGE, IMAGE], [IMAGE, 2 * IMAGE], [2 * IMAGE, 2 * IMAGE]]
            return [value[p] for p in self.picks or ()] if each else value
        if _TOKEN.search(name):
            return [self.model.token(v) for v in value]
        if name == "mrope_section":
            return _sections(value, HEAD_DIM // 2)
        if self.picks is not None and self.number:
            if each:
                return [self._integer(name.removesuffix("_per_layer"), value[p]) for p in self.picks]
            if _is_indices(name, value, self.number):
                return [self.picks.index(v) for v in value if v in self.picks]
        if name.endswith(("rope_feat_sizes", "rope_q_sizes")):
            return [4, 4]  # the last of the `backbone_feature_sizes`
        if name == "tubelet_size":
            return [value[0], *(min(v, PATCH) for v in value[1:])]
        if name in _STAGE_LAYERS:
            return [min(v, 2) for v in value]
        return self._widths(name, value) if self.model.level.widths else value

    def _widths(self, name: str, value: list[int]) -> list[int]:
        """The widths of consecutive layers or stages."""
        if name in ("conv_dim", "tdnn_dim"):
            return [min(v, 16) for v in value]
        if name == "decoder_in_channels":
            return [min(v, HIDDEN) for v in value]
        if name == "stem_channels" or re.match(r"stage_\w+_channels$", name):
            return [v // 8 or v for v in value]  # as the widths of stages below; the first may be an image's channels
        if name == "image_size":
            return [v // min(value) * min(IMAGE, *value) for v in value]
        if name in _STAGE_WIDTHS:
            names = ("num_attention_heads", "num_heads", "num_attention_heads_per_stage")
            heads = next((heads for n in names if (heads := self.values.get(n))), None)
            if isinstance(heads, (list, tuple)) and len(heads) == len(value):
                return [8 * h for h in heads]
            return [v // 8 for v in value] if all(v % 8 == 0 for v in value) and min(value) >= 64 else value
        return value

    def _single_layers(self, value: dict[Any, Any]) -> dict[int, Any]:
        """The values of single layers that differ from the config's, for the layers that are kept."""
        new = {}
        for index, pick in enumerate(self.picks or ()):
            layer = value.get(pick, value.get(str(pick)))
            if layer is not None:
                new[index] = {k: self._integer(k, v) if _is_int(v) else v for k, v in layer.items()}
        return new

    def _mapping(self, value: dict[Any, Any]) -> dict[Any, Any]:
        """A rope's parameters, or another mapping."""
        new = copy.deepcopy(value)
        for key, inner in value.items():
            if isinstance(inner, dict):
                new[key] = self._mapping(inner)
            elif key == "mrope_section":
                partial = value.get("partial_rotary_factor") or self.values.get("partial_rotary_factor") or 1
                new[key] = _sections(inner, int(HEAD_DIM * partial) // 2)
            elif isinstance(inner, list) and key in ("short_factor", "long_factor"):
                new[key] = inner[: HEAD_DIM // 2]
        return new


def _is_indices(name: str, value: Any, number: int) -> bool:
    """Whether a list has the indices of some of so many layers."""
    return (
        _INDICES.search(name) is not None
        and _TOKEN.search(name) is None
        and all(_is_int(v) and 0 <= v < number for v in value)
        and len(set(value)) == len(value)
    )


def _rebuilt(config: Any, values: Mapping[str, Any], changed: dict[str, Any]) -> Any:
    """A config of the same class with these values: by its constructor if that takes them, else by setting attributes."""
    klass = type(config)
    parameters = _parameters(klass)
    arguments = {name: value for name, value in values.items() if name in parameters}
    arguments |= {name: value for name, value in changed.items() if name in parameters or name == _PER_LAYER}
    for plain in (True, False):  # nested configs as mappings, or as they are
        try:
            new = klass(
                **{k: v.to_dict() if plain and _is_config(v) else v for k, v in copy.deepcopy(arguments).items()}
            )
        except Exception:  # a constructor may raise anything
            continue
        for name, value in changed.items():
            # Values that the constructor derives from the new sizes are kept.
            if name not in arguments and (_is_config(value) or vars(new).get(name) == vars(config).get(name)):
                _set(new, name, value)
        for name, value in vars(config).items():
            if name not in vars(new):
                _set(new, name, changed.get(name, copy.deepcopy(value)))
        return new
    new = copy.deepcopy(config)
    for name, value in changed.items():
        _set(new, name, value)
    return new


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # a property without a setter, or a validator
        vars(config)[name] = value
