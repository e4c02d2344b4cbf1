"""All releases: what the library reads of transformers without replacing it. A release that renames some of it is refused by name."""

from __future__ import annotations

from functools import partial

from kernel_compat.attention.roles import (
    ALIBI,
    ATTENTION_ARGUMENTS,
    ATTENTIONS,
    CACHE,
    CACHE_POSITIONS,
    CAUSALITY,
    CHUNK,
    COMPILEABLE,
    EMBEDDINGS,
    ENCODER_DECODER,
    GROUPS,
    HEAD_DIM,
    IMPLEMENTATION,
    LABELS,
    LAYER_INDEX,
    LAYER_SINKS,
    LAYER_TYPES,
    LONGEST,
    MASK,
    MASK_ARGUMENTS,
    MASK_EMBEDDINGS,
    POSITIONS,
    QUERY_DIM,
    ROTARY,
    SCALE,
    SOFTCAP,
    SOFTCAPPING,
    SUPPORTS_SDPA,
    TEMPERATURE,
    TEMPERATURE_GROWTH,
    TEMPERATURE_STEP,
    TOKENS,
    USE_CACHE,
    USES_WINDOW,
    VALUE_DIM,
    WINDOW,
    Role,
)
from kernel_compat.patching.seam import Read
from kernel_compat.patching.shim import Shim

from ._dispatch import MODEL

_MASKS = "transformers.masking_utils"
_LLAMA = "models.llama.modeling_llama:LlamaAttention"
_OUTPUTS = "transformers.modeling_outputs:CausalLMOutputWithPast"
#: Shims that replace nothing.
_reading = partial(Shim, distribution="transformers", versions=">=4.54,<6", replace=lambda originals: {})


def _read(
    target: str, *roles: Role | str, known: tuple[str, ...] | frozenset[str] | None = (), versions: str = ""
) -> Read:
    """A function by the roles of its parameters, or an attribute that has none; `known` are the parameters that may be there besides."""
    spellings = tuple((role,) if isinstance(role, str) else role.spellings for role in roles)
    return Read(target, versions=versions, roles=spellings, known=None if known is None else frozenset(known))


def _masks(versions: str, function: str) -> Read:
    """The arguments that a mask function gets."""
    needed = (
        "batch_size",
        Role("queries", ("q_length", *CACHE_POSITIONS.spellings)),
        "kv_length",
        "kv_offset",
        "mask_function",
        MASK,
    )
    return _read(f"{_MASKS}:{function}", *needed, known=MASK_ARGUMENTS | {"kwargs"}, versions=versions)


_OF_MASKS = ("config", MASK_EMBEDDINGS, MASK, CACHE, POSITIONS)
_MORE_OF_MASKS = (
    *(*CACHE_POSITIONS.spellings, *LAYER_INDEX.spellings),
    *("or_mask_function", "and_mask_function", "block_sequence_ids", "allow_is_causal_skip"),
)
_OF_LAYERS = ("module", "query", "key", "value", MASK, SCALE, "dropout")

SHIMS = (
    _reading(
        name="reads_masks",
        reason="padding, causality, windows and packed sequences are read from the arguments of mask functions",
        protects="masks: padding, causality, windows and packed sequences",
        upstream="transformers 5.24.0, masking_utils",
        delete_when="the library makes no masks",
        seams=(
            _masks("<5", "sdpa_mask_recent_torch"),
            _masks(">=5", "sdpa_mask"),
            _read(f"{_MASKS}:create_causal_mask", *_OF_MASKS, known=_MORE_OF_MASKS),
            _read(f"{_MASKS}:create_sliding_window_causal_mask", *_OF_MASKS, known=_MORE_OF_MASKS),
            _read(f"{_MASKS}:sliding_window_overlay", WINDOW),
            _read(f"{_MASKS}:packed_sequence_mask_function", "packed_sequence_mask"),
            _read(f"{_MASKS}:causal_mask_function", "batch_idx", "head_idx", "q_idx", "kv_idx"),
        ),
    ),
    _reading(
        name="reads_attention",
        reason="scale, window, softcap, sinks and causality are read from the arguments of attention functions",
        protects="attention: its scale, window, softcap, sinks and causality",
        upstream="transformers 5.24.0, integrations.flash_attention and integrations.sdpa_attention",
        delete_when="the library computes no attention",
        seams=(
            _read(
                "transformers.integrations.flash_attention:flash_attention_forward",
                *(*_OF_LAYERS, WINDOW, SOFTCAP),
                known=ATTENTION_ARGUMENTS | {"kwargs"},
            ),
            _read(
                "transformers.integrations.sdpa_attention:sdpa_attention_forward",
                *_OF_LAYERS,
                known=ATTENTION_ARGUMENTS | {"kwargs"},
            ),
        ),
    ),
    _reading(
        name="reads_models",
        reason="tokens, masks, positions and caches are read from the arguments and the outputs of a model's forward",
        protects="packed sequences, padding and caches, which are read from a model's arguments and outputs",
        upstream="transformers 5.24.0, models.llama, modeling_outputs and cache_utils",
        delete_when="the library reads no argument of a model's forward",
        seams=(
            _read(
                "transformers.models.llama.modeling_llama:LlamaModel.forward",
                *("self", TOKENS, MASK, POSITIONS, CACHE, EMBEDDINGS, USE_CACHE),
                known=(*CACHE_POSITIONS.spellings, "kwargs"),
            ),
            _read(
                "transformers.models.llama.modeling_llama:LlamaForCausalLM.forward",
                *("self", TOKENS, MASK, POSITIONS, CACHE, EMBEDDINGS, LABELS),
                known=None,
            ),
            *(
                _read(f"{_OUTPUTS}.{name}", versions=when)
                for when, name in zip(("<5.24", ">=5.24"), reversed(CACHE.spellings), strict=True)
            ),
            *(_read(f"{_OUTPUTS}.{name}") for name in ("loss", "logits")),
            _read(
                "transformers.cache_utils:Cache.update",
                *("self", "key_states", "value_states", LAYER_INDEX),
                known=("cache_kwargs", "args", "kwargs"),
            ),
            _read(
                "transformers.cache_utils:Cache.get_seq_length",
                "self",
                known=(*LAYER_INDEX.spellings, *CACHE_POSITIONS.spellings),
            ),
            _read(f"transformers.cache_utils:Cache.{COMPILEABLE.named()}"),
            *(
                _read(f"{MODEL}.{flag}")
                for flag in ("_supports_flash_attn", *SUPPORTS_SDPA.spellings, "main_input_name")
            ),
            _read("transformers.configuration_utils:PretrainedConfig.get_text_config", "self", known=None),
        ),
    ),
    _reading(
        name="reads_layers",
        reason="what a layer doesn't pass to its attention is read from its attributes and from configs",
        protects="attention: causality, windows, chunks, softcaps and sinks of layers, and the name it is computed under",
        upstream="transformers 5.24.0, the attention classes and configs that are named",
        delete_when="layers pass all settings to their attention functions",
        seams=tuple(
            _read(f"transformers.{owner}.{role.named()}", versions=versions)
            for owner, versions, roles in (
                (_LLAMA, "", (CAUSALITY, LAYER_INDEX, SCALE, GROUPS, HEAD_DIM)),
                ("models.gemma2.modeling_gemma2:Gemma2Attention", "", (SOFTCAPPING, WINDOW)),
                ("models.gpt_oss.modeling_gpt_oss:GptOssAttention", ">=4.55", (LAYER_SINKS, WINDOW)),
                ("models.deepseek_v3.modeling_deepseek_v3:DeepseekV3Attention", "", (QUERY_DIM, VALUE_DIM)),
                ("models.gemma2.configuration_gemma2:Gemma2Config", "", (LAYER_TYPES, WINDOW, LONGEST)),
                ("models.llama4.configuration_llama4:Llama4TextConfig", "", (CHUNK,)),
                (
                    "models.llama4.modeling_llama4:Llama4TextAttention",
                    "",
                    (TEMPERATURE, TEMPERATURE_GROWTH, TEMPERATURE_STEP, ROTARY),
                ),
                ("models.qwen2.configuration_qwen2:Qwen2Config", "", (USES_WINDOW,)),
                ("models.falcon.configuration_falcon:FalconConfig", "", (ALIBI,)),
                ("configuration_utils:PretrainedConfig", "", (IMPLEMENTATION, ENCODER_DECODER, ATTENTIONS)),
            )
            for role in roles
        ),
    ),
)
