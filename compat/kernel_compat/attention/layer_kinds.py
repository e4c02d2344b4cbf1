"""What kind of layer a module is: attention, a mixer with a state, a model, an encoder. The one place that says so.

Read from a module's class, its parts and the names in its code. Imports neither torch nor transformers.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache
from types import FunctionType
from typing import Any

from ..patching.rewriting import codes_in
from .roles import LAYER_INDEX, SCANS, SUPPORTS_SDPA

__all__ = [
    "calls_attention_function",
    "code_names",
    "contains_attention",
    "depthwise_convolutions",
    "has_no_attention",
    "is_attention",
    "is_encoder",
    "is_indexer",
    "is_mask_free_encoder",
    "is_mixer",
    "is_model",
    "key_projections",
    "parameters_of",
    "state_names",
    "takes_mask_or_cache",
]

#: Parameters, buffers and submodules of layers that carry a state along the tokens.
_STATES = frozenset(
    {
        "A_log",
        "dt_bias",
        "fgate_preact",
        "recurrent_param",
        "rg_lru",
        "slope_rate",
        "time_decay",
        "time_shift",
    }
)
#: Parameters that may be part of a state, in code that the list above doesn't know. The slopes of ALiBi are no state.
_STATE_LIKE = re.compile("slope|decay")
#: Submodules that project to keys: ``k_proj``, ``kv_b_proj``, ``to_key``, ``query_key_value``, ``Wqkv``.
_KEY_PROJECTION = re.compile(r"(^|_)(k|kv|qkv|key)($|_)|^Wq?kv?$|^c_attn$")
#: Transformers' table of attention functions, and torch's function.
_ATTENTION_FUNCTIONS = frozenset({"ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention"})
#: Parameters of modules that mix tokens: a mask, or a cache of earlier tokens.
_MASK_OR_CACHE = re.compile(r"(^|_)mask$|cache|^past_key_values?$|^layer_past$|^state$")
_MAKES_MASKS = re.compile(r"(create|generate|prepare|make|update|get)_.*mask")
#: Images and sound, in the names of sub-configs and of a forward's parameters.
_IMAGES_AND_SOUND = re.compile(r"vision|visual|image|pixel|grid|video|audio|speech|sound|input_features")


def is_model(module: Any) -> bool:
    """Whether a module is a model of transformers, or a part of one that is a model by itself."""
    return SUPPORTS_SDPA.is_attribute_of(module)


def is_mixer(module: Any) -> bool:
    """Whether a module itself carries a state along the tokens, or has a depthwise convolution over them."""
    if not _STATES.isdisjoint((*module._parameters, *module._buffers, *module._modules)):
        return True
    return bool(depthwise_convolutions(module))


def depthwise_convolutions(module: Any) -> list[Any]:
    """The convolutions of a module, its own children, that see several tokens of one channel each."""
    from torch import nn

    return [
        child for child in module.children() if isinstance(child, nn.Conv1d) and 1 < child.groups == child.in_channels
    ]


def state_names(module: Any) -> list[str]:
    """The names of a module's parameters, buffers and submodules that are a state along the tokens, or may be one; sorted."""
    known = _STATES.intersection((*module._parameters, *module._buffers, *module._modules))
    return sorted(known.union(filter(_STATE_LIKE.search, module._parameters)))


def is_attention(module: Any) -> bool:
    """Whether a module projects to keys and is attention, by the name of its class or by the functions that it calls."""
    if is_model(module) or is_mixer(module) or not key_projections(module):
        return False
    return "Attention" in type(module).__name__ or calls_attention_function(module)


def key_projections(module: Any) -> list[Any]:
    """The submodules of a module that project its tokens to keys, by their names."""
    return [part for name, part in module._modules.items() if part is not None and _KEY_PROJECTION.search(name)]


def calls_attention_function(module: Any) -> bool:
    """Whether a layer calls a function of transformers' table, or torch's ``scaled_dot_product_attention``.

    Layers that don't project to keys may, too: Inkling-2's attend to the outputs of the layers before.
    """
    return not is_model(module) and not code_names(module.__class__).isdisjoint(_ATTENTION_FUNCTIONS)


def is_indexer(module: Any) -> bool:
    """Whether a module chooses the keys of each query, as DeepSeek-V3.2's does."""
    return type(module).__name__.endswith("Indexer")


def contains_attention(layer: Any) -> bool:
    """Whether a layer of a model has attention in it: by the class's name, or by the number of a layer that it has for a cache.

    Reads no code, since torch.compile may trace it.
    """
    parts = (part for part in layer.modules() if part is not layer)
    return any("Attention" in type(part).__name__ or LAYER_INDEX.is_attribute_of(part) for part in parts)


def takes_mask_or_cache(module: Any) -> bool:
    """Whether a module's forward takes a mask or a cache, as those of modules that mix tokens do."""
    from torch import nn

    # An embedding may count positions from a mask.
    return not isinstance(module, nn.Embedding) and any(map(_MASK_OR_CACHE.search, parameters_of(type(module).forward)))


def is_encoder(part: str) -> bool:
    """Whether a sub-config of a composite model, by its name, is that of an encoder of images or sound."""
    return _IMAGES_AND_SOUND.search(part) is not None


def is_mask_free_encoder(module: Any) -> bool:
    """Whether a module is a model of images or sound in which no module takes or builds a mask."""
    if not is_model(module) or takes_mask_or_cache(module):
        return False
    if not any(map(_IMAGES_AND_SOUND.search, parameters_of(type(module).forward))):
        return False
    return not any(_MAKES_MASKS.search(name) for part in module.modules() for name in code_names(part.__class__))


def has_no_attention(kind: type) -> bool:
    """Whether a model class is one of transformers whose file computes no attention: a convolutional backbone, or an SSM."""
    if not kind.__module__.startswith("transformers.models."):
        return False
    file = vars(sys.modules[kind.__module__])
    if SCANS.keys().isdisjoint(file) and all(c.__name__ != "BackboneMixin" for c in kind.__mro__):
        return False
    own = [value for value in file.values() if getattr(value, "__module__", None) == kind.__module__]
    names = {name for value in own for name in (code_names(value) if isinstance(value, type) else _names_of(value))}
    return names.isdisjoint({*_ATTENTION_FUNCTIONS, "softmax", "Softmax", "timm"})  # timm's models may be anything


@cache
def parameters_of(function: Any) -> tuple[str, ...]:
    """The names of a function's parameters; none for what has no signature."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


@cache
def code_names(kind: type) -> frozenset[str]:
    """The names, keys and keywords used in a class's functions, up to the first base class from torch or `PreTrainedModel`."""
    names: set[str] = set()
    for ancestor in kind.__mro__:
        if ancestor.__module__.startswith("torch.") or ancestor.__name__ == "PreTrainedModel":
            break
        for value in vars(ancestor).values():
            names |= _names_of(value)
    return frozenset(names)


def _names_of(value: Any) -> set[str]:
    function = inspect.unwrap(value) if callable(value) else value
    names: set[str] = set()
    for code in codes_in(function.__code__) if isinstance(function, FunctionType) else ():
        names.update(code.co_names)
        for constant in code.co_consts:  # a key, or a call's keywords
            entries = constant if isinstance(constant, tuple) else (constant,)
            names.update(entry for entry in entries if isinstance(entry, str))
    return names
