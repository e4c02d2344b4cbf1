"""How a model's layers attend and what they need of attention, read from its modules and their configs."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from ..attention.roles import (
    ALIBI,
    CAUSALITY,
    CHUNK,
    LAYER_SINKS,
    LAYER_TYPES,
    LONGEST,
    SOFTCAPPING,
    SUPPORTS_SDPA,
    USES_WINDOW,
    WINDOW,
    implementation_of,
)

__all__ = ["beyond_causal_attention", "has_no_attention", "implementations", "is_encoder", "needs", "slides"]

#: Parameters of modules that mix tokens: a mask, or a cache of earlier tokens.
_MIXES = re.compile(r"(^|_)mask$|cache|^past_key_values?$|^layer_past$|^state$")
_PERCEIVES = re.compile(r"pixel|image|video|grid|input_features|audio|speech")
_MAKES_MASKS = re.compile(r"(create|generate|prepare|make|update|get)_.*mask")
#: Parameters by which a model passes a mask pattern of its own.
_PATTERNS = frozenset({"or_mask_function", "and_mask_function", "block_sequence_ids", "create_causal_mask_mapping"})
_SDPA = frozenset({"ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention"})
#: Weights of state spaces and of linear attention with decay.
_STATES = re.compile(r"^(A_log|dt_bias)$|slope|decay")
_LAYER_TYPES = frozenset({"full_attention", "attention", "sliding_attention", "moe", "mlp", "dense"})


def beyond_causal_attention(model: Any) -> list[str]:
    """Phrases for the parts of a model that are anything but full causal ``scaled_dot_product_attention``.

    A module that takes a mask or a cache is listed unless it calls ``scaled_dot_product_attention`` or contains a module that
    takes one, so that unknown kinds of mixers are listed too. Encoders of images and sound that neither take nor build a
    mask are left out.
    """
    named = [*model.named_modules()]
    encoders = _encoders(model, named)
    named = [(name, module) for name, module in named if id(module) not in encoders]
    found: dict[str, str] = {}
    for name, module in named:
        for reason in _reasons(module, model):
            found.setdefault(reason, f"{name or 'the model'} ({type(module).__name__})")
    return [f"{where} {reason}" for reason, where in found.items()]


def slides(config: Any) -> bool:
    """Whether a config has layers with a sliding window."""
    unused = USES_WINDOW.is_attribute_of(config) and not USES_WINDOW.attribute_of(config)
    if unused or not WINDOW.attribute_of(config):
        return False
    layers = LAYER_TYPES.attribute_of(config)
    return layers is None or any("sliding" in layer for layer in layers)


def is_encoder(part: str) -> bool:
    """Whether a sub-config of a composite model, by its name, is that of an encoder of images or sound."""
    return re.search(r"vision|visual|image|video|audio|speech|sound", part) is not None


def has_no_attention(kind: type) -> bool:
    """Whether a model class is a backbone of transformers whose file computes no attention, as convolutional ones are."""
    if not kind.__module__.startswith("transformers.models.") or all(
        c.__name__ != "BackboneMixin" for c in kind.__mro__
    ):
        return False
    own = [v for v in vars(sys.modules[kind.__module__]).values() if getattr(v, "__module__", None) == kind.__module__]
    names = {name for value in own for name in (_code_names(value) if isinstance(value, type) else _names_of(value))}
    return names.isdisjoint({*_SDPA, "softmax", "Softmax", "timm"})  # timm's models may be anything


def implementations(model: Any) -> list[str]:
    """The attention names that a model's layers run, sorted; for a composite model, the names of its parts."""
    layers = [module for module in _modules(model) if not _is_model(module)]
    names = set(filter(None, map(_implementation, layers)))
    # Older layers keep no config.
    return sorted(names or filter(None, [_implementation(model)]))


def needs(model: Any) -> list[tuple[str, str]]:
    """Pairs of an attention name and a feature that a layer under it needs, as far as attributes and configs say."""
    found = set()
    for module in _modules(model):
        name = _implementation(module) or _implementation(model) or ""
        config = getattr(module, "config", None)
        if SOFTCAPPING.attribute_of(module) or SOFTCAPPING.attribute_of(config):
            found.add((name, "softcap"))
        if LAYER_SINKS.attribute_of(module) is not None:
            found.add((name, "sinks"))
        if WINDOW.attribute_of(module) or slides(config):
            found.add((name, "window"))
    return sorted(found)


def _modules(model: Any) -> Iterable[Any]:
    return model.modules() if hasattr(model, "modules") else ()


def _implementation(module: object) -> str | None:
    name = implementation_of(module)
    return name if isinstance(name, str) else None


def _reasons(module: Any, model: Any) -> Iterator[str]:
    from torch import nn

    config = getattr(module, "config", None)
    longest = LONGEST.attribute_of(config or getattr(model, "config", None))

    def cuts(size: Any) -> bool:
        return isinstance(size, int) and size > 0 and not (isinstance(longest, int) and size >= longest)

    types = LAYER_TYPES.attribute_of(config) or ()
    if cuts(window := WINDOW.attribute_of(module)) or (slides(config) and cuts(window := WINDOW.attribute_of(config))):
        yield f"has a sliding window of {window}"
    if not types and cuts(chunk := CHUNK.attribute_of(config)):
        yield f"has chunks of {chunk}"
    if odd := sorted(set(types) - _LAYER_TYPES):
        yield f"has layers of type {', '.join(odd)}"
    if ALIBI.attribute_of(config):
        yield "has ALiBi in its mask"
    if _is_model(module):
        code = _code_names(module.__class__)
        if code & _PATTERNS or "token_type_ids" in _parameters(getattr(type(module), "_update_causal_mask", None)):
            yield "has a mask pattern of its own"
    elif _attends(module):
        if CAUSALITY.attribute_of(module) is not True:
            yield "is attention that isn't known to be causal"
    elif _mixes(module) and not any(_mixes(part) for part in module.modules() if part is not module):
        yield "mixes tokens by other means than scaled_dot_product_attention"
    elif isinstance(module, nn.RNNBase) or (isinstance(module, nn.Conv1d) and module.kernel_size != (1,)):
        yield "mixes tokens"
    if states := sorted(name for name, _ in module.named_parameters(recurse=False) if _STATES.search(name)):
        yield f"has a state ({', '.join(states)})"


def _encoders(model: Any, named: list[tuple[str, Any]]) -> set[int]:
    """The ids of the modules of encoders of images and sound in which no module takes or builds a mask."""
    found: set[int] = set()
    for _, part in named:
        if part is model or not _is_model(part) or _mixes(part):
            continue
        perceives = any(map(_PERCEIVES.search, _parameters(type(part).forward)))
        masks = (_MAKES_MASKS.search(name) for module in part.modules() for name in _code_names(module.__class__))
        if perceives and not any(masks):
            found.update(map(id, part.modules()))
    return found


def _is_model(module: Any) -> bool:
    """Whether a module is a model of transformers, or a part of one that is a model by itself."""
    return SUPPORTS_SDPA.is_attribute_of(module)


def _mixes(module: Any) -> bool:
    from torch import nn

    # An embedding may count positions from a mask.
    return not isinstance(module, nn.Embedding) and any(map(_MIXES.search, _parameters(type(module).forward)))


def _attends(module: Any) -> bool:
    return not _is_model(module) and not _code_names(module.__class__).isdisjoint(_SDPA)


@cache
def _parameters(function: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


@cache
def _code_names(kind: type) -> frozenset[str]:
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
    return _names_in(function.__code__) if isinstance(function, FunctionType) else set()


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
        else:  # a key, or a call's keywords
            names.update(
                entry for entry in (constant if isinstance(constant, tuple) else (constant,)) if isinstance(entry, str)
            )
    return names
