"""transformers' names by role. A release may rename an argument; its role stays."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

__all__ = [
    "ATTENTION_ARGUMENTS",
    "CACHE",
    "EMBEDDINGS",
    "KEY_LENGTH",
    "KEY_OFFSETS",
    "LAYER_CACHE",
    "LAYER_SETTINGS",
    "LENGTHS",
    "MASK",
    "MASK_ARGUMENTS",
    "MASK_EMBEDDINGS",
    "POSITIONS",
    "QUERY_LENGTH",
    "QUERY_OFFSETS",
    "READ",
    "SINKS",
    "TOKENS",
    "USE_CACHE",
    "Role",
    "cache_of",
    "is_cache",
    "is_layer_cache",
    "is_paged",
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
            if arguments.get(spelling) is not None:
                return arguments[spelling]
        return None

    def attribute_of(self, owner: Any) -> Any:
        """The value of an object's attribute; None if it has none of them."""
        for spelling in self.spellings:
            if (value := getattr(owner, spelling, None)) is not None:
                return value
        return None

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
#: Arguments that the layers of any release pass to an attention function, and those that models pass on through their layers
#: although they change nothing there. Another one that isn't of the model's own call is refused.
ATTENTION_ARGUMENTS = frozenset(
    {
        *(
            "cache_position",
            "num_items_in_batch",
            "seq_idx",
            "output_hidden_states",
            "output_router_logits",
            "return_dict",
            "shift_labels",
            "ignore_index",
        ),
        *USE_CACHE.spellings,
        *("module", "query", "key", "value", *MASK.spellings, *POSITIONS.spellings, "scaling", "dropout", "softcap"),
        *("is_causal", "sliding_window", "local_window", *SINKS.spellings, "position_bias", "deterministic", "cache"),
        *(spelling for role in LENGTHS for spelling in role.spellings),
        *("block_table", "k_cache", "v_cache"),  # added by the paged cache in a layer, from 5.24 on
    }
)


#: A layer's attribute by the argument in which the layer passes it to its attention: of Gemma-2 and those after it, of GPT-OSS.
LAYER_SETTINGS = {"softcap": "attn_logit_softcapping", SINKS.named(): "sinks", "scaling": "scaling"}


def _is_compiling() -> bool:
    import torch  # here: shims declare roles without torch

    return bool(torch.compiler.is_compiling())


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


def is_paged(value: Any) -> bool:
    """Whether a value is the cache of continuous batching, which keeps its packed sequences apart."""
    return any(kind.__name__ == "PagedAttentionCache" for kind in type(value).__mro__)


def cache_of(values: Mapping[str, Any]) -> Any:
    """The cache among a model's arguments by name: by its role, or else by its type."""
    found = CACHE.of(values)
    if found is not None or _is_compiling():
        return found
    return next(filter(is_cache, values.values()), None)


def cache_returned(outputs: Any) -> Any:
    """The cache among a model's outputs, a mapping or a tuple."""
    if isinstance(outputs, tuple):
        outputs = dict(enumerate(outputs))
    # 5.24's outputs warn of every old name: a plain dict doesn't.
    return cache_of(dict(outputs)) if isinstance(outputs, Mapping) else None
