"""What a model's layers do with a sequence, read off its modules and their configurations."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

__all__ = ["beyond_causal_attention", "has_no_attention", "slides"]

#: Parameters that a module mixing tokens takes: a mask, or a cache of the tokens before.
_MIXES = re.compile(r"(^|_)mask$|cache|^past_key_values?$|^layer_past$|^state$")
_PERCEIVES = re.compile(r"pixel|image|video|grid|input_features|audio|speech")
_MAKES_MASKS = re.compile(r"(create|generate|prepare|make|update|get)_.*mask")
#: What mask patterns of a model's own are passed as.
_PATTERNS = frozenset({"or_mask_function", "and_mask_function", "block_sequence_ids", "create_causal_mask_mapping"})
_SDPA = frozenset({"ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention"})
#: Parameters of state spaces and decaying linear attention.
_STATES = re.compile(r"^(A_log|dt_bias)$|slope|decay")
_LAYER_TYPES = frozenset({"full_attention", "attention", "sliding_attention", "moe", "mlp", "dense"})


def beyond_causal_attention(model: Any) -> list[str]:
    """Parts of a model that need more than full causal attention by ``scaled_dot_product_attention``, as phrases.

    Modules are proven, not recognised: one that takes a mask or a cache has to be such an attention or to contain a module
    that takes one, so that an unknown kind of mixer is listed too. Encoders of images and sound that take no mask and make
    none may be anything.
    """
    named = [*_named_modules(model)]
    encoders = _encoders(model, named)
    named = [(name, module) for name, module in named if id(module) not in encoders]
    found: dict[str, str] = {}
    for name, module in named:
        for reason in _reasons(module, model):
            found.setdefault(reason, f"{name or 'the model'} ({type(module).__name__})")
    return [f"{where} {reason}" for reason, where in found.items()]


def slides(config: Any) -> bool:
    """Whether a configuration has layers with a sliding window."""
    if not getattr(config, "sliding_window", None) or not getattr(config, "use_sliding_window", True):
        return False
    layers = getattr(config, "layer_types", None)
    return layers is None or any("sliding" in layer for layer in layers)


def has_no_attention(kind: type) -> bool:
    """Whether a model class is a backbone of transformers whose file computes no attention, as convolutional ones are."""
    if not kind.__module__.startswith("transformers.models.") or all(
        c.__name__ != "BackboneMixin" for c in kind.__mro__
    ):
        return False
    own = [v for v in vars(sys.modules[kind.__module__]).values() if getattr(v, "__module__", None) == kind.__module__]
    names = {name for value in own for name in (_code_names(value) if isinstance(value, type) else _names_of(value))}
    return names.isdisjoint({*_SDPA, "softmax", "Softmax", "timm"})  # timm's models may be anything


def _named_modules(model: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(model, "named_modules"):
        yield from model.named_modules()
    else:
        yield from ((type(module).__name__, module) for module in model.modules())


def _reasons(module: Any, model: Any) -> Iterator[str]:
    from torch import nn

    config = getattr(module, "config", None)
    longest = getattr(config or getattr(model, "config", None), "max_position_embeddings", None)

    def cuts(size: Any) -> bool:
        return isinstance(size, int) and size > 0 and not (isinstance(longest, int) and size >= longest)

    types = getattr(config, "layer_types", None) or ()
    if cuts(window := getattr(module, "sliding_window", None)) or (
        slides(config) and cuts(window := getattr(config, "sliding_window", None))
    ):
        yield f"has a sliding window of {window}"
    if not types and cuts(chunk := getattr(config, "attention_chunk_size", None)):
        yield f"has chunks of {chunk}"
    if odd := sorted(set(types) - _LAYER_TYPES):
        yield f"has layers of type {', '.join(odd)}"
    if getattr(config, "alibi", False):
        yield "has ALiBi in its mask"
    if not isinstance(module, nn.Module):
        return
    if _is_model(module):
        code = _code_names(module.__class__)
        if code & _PATTERNS or "token_type_ids" in _parameters(getattr(type(module), "_update_causal_mask", None)):
            yield "has a mask pattern of its own"
    elif _attends(module):
        if getattr(module, "is_causal", None) is not True:
            yield "is attention that isn't known to be causal"
    elif _mixes(module) and not any(_mixes(part) for part in module.modules() if part is not module):
        yield "mixes tokens by something else than scaled_dot_product_attention"
    elif isinstance(module, nn.RNNBase) or (isinstance(module, nn.Conv1d) and module.kernel_size != (1,)):
        yield "mixes tokens"
    if states := sorted(name for name, _ in module.named_parameters(recurse=False) if _STATES.search(name)):
        yield f"has a state ({', '.join(states)})"


def _encoders(model: Any, named: list[tuple[str, Any]]) -> set[int]:
    """The modules of encoders of images and sound in which no mask is taken or made."""
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
    return hasattr(module, "_supports_sdpa")


def _mixes(module: Any) -> bool:
    from torch import nn

    # Positions may be counted off a mask.
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
    """The names and keywords that the functions of a class use, those of torch and of `PreTrainedModel` left out."""
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
        else:  # a key, or the keywords of a call
            names.update(
                entry for entry in (constant if isinstance(constant, tuple) else (constant,)) if isinstance(entry, str)
            )
    return names
