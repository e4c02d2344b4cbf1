"""transformers' names by role. A release may rename an argument; its role stays."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

__all__ = [
    "ALIBI",
    "ATTENTIONS",
    "ATTENTION_ARGUMENTS",
    "BIAS",
    "CACHE",
    "CACHE_POSITIONS",
    "CAUSALITY",
    "CHUNK",
    "COMPILEABLE",
    "CONVOLUTION",
    "CROSS_ATTENTION",
    "CROSS_MASKS",
    "DECODER_EMBEDDINGS",
    "DECODER_MASK",
    "DECODER_POSITIONS",
    "DECODER_TOKENS",
    "DEFAULT_MASK",
    "EMBEDDINGS",
    "ENCODER_ARGUMENTS",
    "ENCODER_DECODER",
    "ENCODER_STATES",
    "FEATURES_BETWEEN_LAYERS",
    "FEATURES_MASK",
    "FUSED_MIXERS",
    "GROUPS",
    "HEAD_DIM",
    "IMPLEMENTATION",
    "ITEMS",
    "KEY_LENGTH",
    "KEY_OFFSETS",
    "LABELS",
    "LAYER_CACHE",
    "LAYER_INDEX",
    "LAYER_SETTINGS",
    "LAYER_SINKS",
    "LAYER_TYPES",
    "LENGTHS",
    "LOCAL_WINDOW",
    "LONGEST",
    "LOSS_TYPE",
    "MASK",
    "MASK_ARGUMENTS",
    "MASK_EMBEDDINGS",
    "PADDING_TOKEN",
    "PAGES",
    "POSITIONS",
    "POSITIONS_FROM_PADDING",
    "QUERY_DIM",
    "QUERY_LENGTH",
    "QUERY_OFFSETS",
    "READ",
    "ROTARY",
    "ROUTER_LOGITS",
    "ROUTER_LOSS",
    "SCALE",
    "SCANS",
    "SEQUENCES",
    "SHIFT",
    "SINKS",
    "SOFTCAP",
    "SOFTCAPPING",
    "START_TOKEN",
    "SUPPORTS_SDPA",
    "TARGETS",
    "TEMPERATURE",
    "TEMPERATURE_GROWTH",
    "TEMPERATURE_STEP",
    "TOKENS",
    "UNSPLIT",
    "USES_WINDOW",
    "USE_CACHE",
    "VALUE_DIM",
    "WINDOW",
    "Z_LOSS",
    "Role",
    "Scan",
    "cache_of",
    "cache_returned",
    "implementation_of",
    "is_cache",
    "is_layer_cache",
    "layer_cache_of",
]


class Role(NamedTuple):
    """A value that the library reads from arguments, outputs or attributes, under every name that a release gave it.

    Attributes:
        name: of the role, for messages.
        spellings: its names, the newest first.
    """

    name: str
    spellings: tuple[str, ...]

    def of(self, arguments: Mapping[str, Any]) -> Any:
        """The value among arguments by name; None if it isn't there."""
        for spelling in self.spellings:
            if (value := arguments.get(spelling)) is not None:
                return value
        return None

    def attribute_of(self, owner: Any) -> Any:
        """The value of an object's attribute; None if the object lacks it."""
        for spelling in self.spellings:
            if (value := getattr(owner, spelling, None)) is not None:
                return value
        return None

    def is_attribute_of(self, owner: Any) -> bool:
        """Whether an object has the attribute under any spelling, of any value."""
        return any(hasattr(owner, spelling) for spelling in self.spellings)

    def spelled(self, names: Collection[str]) -> str | None:
        """The spelling among names, such as those of a function's parameters; None if it isn't there."""
        for spelling in self.spellings:
            if spelling in names:
                return spelling
        return None

    def named(self, names: Collection[str] = ()) -> str:
        """The spelling among names; the newest if it isn't there."""
        return self.spelled(names) or self.spellings[0]


TOKENS = Role("tokens", ("input_ids",))
EMBEDDINGS = Role("embeddings", ("inputs_embeds",))
#: Of the functions that make masks; renamed in 5.2.
MASK_EMBEDDINGS = Role("embeddings of a mask", (*EMBEDDINGS.spellings, "input_embeds"))
MASK = Role("mask", ("attention_mask",))
POSITIONS = Role("positions", ("position_ids",))
#: The function, of a module or of its embeddings, that numbers tokens from behind the index of padding.
POSITIONS_FROM_PADDING = "create_position_ids_from_input_ids"
#: Of a model's forward, a mask's function and a model's outputs: `cache` since 5.24.
CACHE = Role("cache", ("cache", "past_key_values"))
#: Of a layer's forward, with the states of recurrences.
LAYER_CACHE = Role(
    "cache of a layer", ("cache", "past_key_values", "past_key_value", "cache_params", "layer_past", "state")
)
USE_CACHE = Role("use of a cache", ("use_cache",))
SINKS = Role("sinks", ("s_aux",))
QUERY_OFFSETS = Role("offsets of queries", ("cu_seq_lens_q",))
KEY_OFFSETS = Role("offsets of keys", ("cu_seq_lens_k",))
QUERY_LENGTH = Role("longest queries", ("max_length_q",))
KEY_LENGTH = Role("longest keys", ("max_length_k",))
#: Of packed sequences, in the order of `PackedLengths`.
LENGTHS = (QUERY_OFFSETS, KEY_OFFSETS, QUERY_LENGTH, KEY_LENGTH)
CAUSALITY = Role("causality", ("is_causal",))
SCALE = Role("scale of the scores", ("scaling",))
SOFTCAP = Role("softcap", ("softcap",))
WINDOW = Role("window", ("sliding_window",))
#: Of the library's own shim for GPT-Neo: a causal window in addition to the mask.
LOCAL_WINDOW = Role("window in addition to the mask", ("local_window",))
BIAS = Role("bias of the scores", ("position_bias",))
PAGES = Role("pages of a cache", ("block_table",))
SEQUENCES = Role("numbers of sequences", ("seq_idx",))
CACHE_POSITIONS = Role("positions in a cache", ("cache_position",))
ATTENTIONS = Role("return of attention weights", ("output_attentions",))
LABELS = Role("labels", ("labels",))
ROUTER_LOGITS = Role("return of routers' logits", ("output_router_logits",))
#: Of losses: the labels, each moved to the token that predicts it.
TARGETS = Role("targets", ("shift_labels",))
#: Of text models: what they add to the tokens of images between their layers, (tokens, ...) each, and which tokens these are.
FEATURES_BETWEEN_LAYERS = Role("features of images between layers", ("deepstack_visual_embeds",))
FEATURES_MASK = Role("tokens of images", ("visual_pos_masks",))
#: Of losses: the number of targets that a sum over them is divided by.
ITEMS = Role("number of targets", ("num_items_in_batch",))
DECODER_TOKENS = Role("tokens of a decoder", ("decoder_input_ids",))
DECODER_EMBEDDINGS = Role("embeddings of a decoder", ("decoder_inputs_embeds",))
DECODER_MASK = Role("mask of a decoder", ("decoder_attention_mask",))
DECODER_POSITIONS = Role("positions of a decoder", ("decoder_position_ids",))
#: How the arguments of a decoder begin that are of an encoder's states.
ENCODER_ARGUMENTS = ("encoder_", "cross_")
#: Of decoders, their layers and their attention.
ENCODER_STATES = Role("states of an encoder", ("encoder_hidden_states", "key_value_states", "cross_attention_states"))
#: Of Mllama's text model: (batch, 1, tokens, ...), which states each token sees, and whether it sees any.
CROSS_MASKS = Role("masks of an encoder's states", ("cross_attention_mask", "full_text_row_masked_out_mask"))
#: The function by which T5Gemma's decoder masks the index of padding, where it gets no mask.
DEFAULT_MASK = "make_default_2d_attention_mask"
#: The method of a model, and the function of its file, that move labels to the tokens of a decoder.
SHIFT = ("prepare_decoder_input_ids_from_labels", "shift_tokens_right")
#: Attributes of configs: the index of padding, and that of a decoder's first token.
PADDING_TOKEN, START_TOKEN = "pad_token_id", "decoder_start_token_id"
#: The library's own argument of a model's call: the slice that its text model gets of the whole batch, see `BatchSlice`.
UNSPLIT = "kernel_compat_slice"
#: Arguments whose values say where padding and sequences are.
READ = (MASK, POSITIONS, *LENGTHS)

#: Arguments of a mask function, on any release. Another one is refused: nothing says what it hides.
MASK_ARGUMENTS = frozenset(
    {
        *("batch_size", "cache_position", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function"),
        *("local_size", "use_vmap", "config", "dtype", "device", *MASK.spellings),
        *("allow_is_causal_skip", "allow_is_bidirectional_skip", "allow_torch_fix"),
    }
)
_OF_ATTENTION = (
    *(MASK, POSITIONS, *LENGTHS, CAUSALITY, SCALE, SOFTCAP, WINDOW, LOCAL_WINDOW, SINKS, BIAS, PAGES),
    *(CACHE_POSITIONS, SEQUENCES, TARGETS, ITEMS, USE_CACHE),
)
#: Arguments that the layers of any release pass to an attention function, and those that models pass on through their layers
#: although they change nothing there. Another one that isn't of the model's own call is refused.
ATTENTION_ARGUMENTS = frozenset(
    {
        *(spelling for role in _OF_ATTENTION for spelling in role.spellings),
        *("module", "query", "key", "value", "dropout", "deterministic", "cache"),
        *("output_hidden_states", "output_router_logits", "return_dict", "ignore_index"),
        *("k_cache", "v_cache"),  # added by the paged cache in a layer, as the pages are, from 5.24 on
    }
)


# Attributes of layers, and some of configs too.
LAYER_INDEX = Role("index of a layer", ("layer_idx",))
GROUPS = Role("queries for each key head", ("num_key_value_groups",))
SOFTCAPPING = Role("softcap of a layer", ("attn_logit_softcapping",))
LAYER_SINKS = Role("sinks of a layer", ("sinks",))
HEAD_DIM = Role("dimension of a head", ("head_dim", "key_value_proj_dim"))
#: Of Llama 4's: whether queries of layers without rotary embeddings grow with their columns, by how much, and after how many columns.
TEMPERATURE = Role("growth of queries with their columns", ("attn_temperature_tuning",))
TEMPERATURE_GROWTH = Role("rate of this growth", ("attn_scale",))
TEMPERATURE_STEP = Role("columns of a step of this growth", ("floor_scale",))
ROTARY = Role("use of rotary embeddings", ("use_rope",))
#: Of multi-head latent attention.
QUERY_DIM = Role("dimension of a query", ("qk_head_dim",))
VALUE_DIM = Role("dimension of a value", ("v_head_dim",))

#: Whether a layer attends to the states of an encoder.
CROSS_ATTENTION = Role("cross-attention", ("is_cross_attention",))

# Attributes of configs.
IMPLEMENTATION = Role("attention name", ("_attn_implementation",))
LAYER_TYPES = Role("types of layers", ("layer_types",))
CHUNK = Role("size of chunks", ("attention_chunk_size",))
USES_WINDOW = Role("use of a window", ("use_sliding_window",))
ALIBI = Role("use of ALiBi", ("alibi",))
LONGEST = Role("longest sequence", ("max_position_embeddings",))
ENCODER_DECODER = Role("whether there is an encoder beside the decoder", ("is_encoder_decoder",))

ROUTER_LOSS = Role("weight of the routers' loss", ("router_aux_loss_coef",))
Z_LOSS = Role("weight of a loss of the logits", ("z_loss_coefficient",))

# Attributes of models, of their classes and of caches.
#: Of the function in transformers' table of losses.
LOSS_TYPE = Role("kind of loss", ("loss_type",))
SUPPORTS_SDPA = Role("support of sdpa", ("_supports_sdpa",))
COMPILEABLE = Role("whether a cache can be compiled", ("is_compileable",))


class Scan(NamedTuple):
    """A function of mixers with a state along the tokens, by the names of its parameters.

    Attributes:
        tokens: of tensors (batch, length, heads, ...), some with a divisor of the number of heads; where there are `shared` ones
            (batch, channels, length), with channels for heads.
        heads: of tensors (heads, ...), which are parameters of the layer.
        state: of the state before the first token.
        returns_state: of the flag to return the state behind the last.
        shared: of tensors (batch, size, length) that all channels have in common.
    """

    tokens: tuple[str, ...]
    heads: tuple[str, ...]
    state: str
    returns_state: str
    shared: tuple[str, ...] = ()


# Functions of the files of models with mixers, since 5.19; before, a mixer's forward has these formulas in it.
#: (batch, channels, length), the weight (channels, kernel size) and more.
CONVOLUTION = Role("causal convolution along the tokens", ("causal_conv1d_fn",))
_DELTA_RULE = Scan(("query", "key", "value", "g", "beta"), (), "initial_state", "output_final_state")
#: The first value that each returns is of the tokens.
SCANS = {
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": Scan(
        ("hidden_states", "dt", "B", "C"), ("A", "D", "dt_bias"), "initial_states", "return_final_states"
    ),
    "mamba_selective_scan": Scan(
        ("hidden_states", "dt", "z"), ("A", "D", "delta_bias"), "initial_state", "return_last_state", ("B", "C")
    ),
}
#: Of all of a mixer in one; they return None where no package has a kernel for it.
FUSED_MIXERS = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")

#: A layer's attribute by the argument in which the layer passes it to its attention: of Gemma-2 and those after it, of GPT-OSS.
LAYER_SETTINGS = {SOFTCAP: SOFTCAPPING, SINKS: LAYER_SINKS, SCALE: SCALE}


def _is_compiling() -> bool:
    import torch  # here: shims declare roles without torch

    return bool(torch.compiler.is_compiling())


def implementation_of(owner: Any) -> Any:
    """The attention name in the config of a model or layer; None if it has none."""
    return IMPLEMENTATION.attribute_of(getattr(owner, "config", None))


def is_cache(value: Any) -> bool:
    """Whether a value is a cache by its type, whatever the name that it has."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


def is_layer_cache(name: str, value: Any) -> bool:
    """Whether an argument of a layer is its cache: by its name, or else by its type. Those of recurrences have no common base up to 5.2."""
    if name in LAYER_CACHE.spellings:
        return True
    if _is_compiling():  # Dynamo can't walk the classes of a value
        return False
    return is_cache(value) or any(kind.__name__.endswith("Cache") for kind in type(value).__mro__)


def layer_cache_of(values: Mapping[str, Any]) -> Any:
    """The cache among a layer's arguments by name."""
    return next((v for name, v in values.items() if v is not None and is_layer_cache(name, v)), None)


def cache_of(values: Mapping[str, Any]) -> Any:
    """The cache among a model's arguments by name: by its role, or else by its type."""
    cache = CACHE.of(values)
    if cache is not None or _is_compiling():
        return cache
    return next(filter(is_cache, values.values()), None)


def cache_returned(outputs: Any) -> Any:
    """The cache among a model's outputs, a mapping or a tuple."""
    if isinstance(outputs, tuple):
        outputs = dict(enumerate(outputs))
    # 5.24's outputs warn of every old name: a plain dict doesn't.
    return cache_of(dict(outputs)) if isinstance(outputs, Mapping) else None
