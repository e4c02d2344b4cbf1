"""How a model's layers attend and what they need of attention, read from its modules and their configs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..attention.layer_kinds import (
    calls_attention_function,
    code_names,
    is_mask_free_encoder,
    is_model,
    parameters_of,
    state_names,
    takes_mask_or_cache,
)
from ..attention.roles import (
    ALIBI,
    CAUSALITY,
    CHUNK,
    LAYER_INDEX,
    LAYER_SINKS,
    LAYER_TYPES,
    LONGEST,
    SOFTCAPPING,
    USES_WINDOW,
    WINDOW,
    implementation_of,
)

__all__ = ["beyond_causal_attention", "implementations", "kind_of", "needs", "slides", "window_of"]

#: Parameters by which a model passes a mask pattern of its own.
_PATTERNS = frozenset({"or_mask_function", "and_mask_function", "block_sequence_ids", "create_causal_mask_mapping"})
#: Types of layers that are full causal attention or no attention; windows are found by their size.
_LAYER_TYPES = frozenset({"full_attention", "attention", "sliding_attention", "moe", "mlp", "dense"})


def beyond_causal_attention(model: Any) -> list[str]:
    """Phrases for the parts of a model that are anything but full causal ``scaled_dot_product_attention``.

    A module that takes a mask or a cache is listed unless it calls ``scaled_dot_product_attention`` or contains a module that
    takes one, so that unknown kinds of mixers are listed too. Encoders of images and sound that neither take nor build a
    mask are left out.
    """
    encoders = [part for part in model.modules() if part is not model and is_mask_free_encoder(part)]
    in_encoders = {id(module) for encoder in encoders for module in encoder.modules()}
    first: dict[str, str] = {}  # by reason, the first module that has it
    for name, module in model.named_modules():
        if id(module) not in in_encoders:
            for reason in _reasons(module, model):
                first.setdefault(reason, f"{name or 'the model'} ({type(module).__name__})")
    return [f"{where} {reason}" for reason, where in first.items()]


def slides(config: Any) -> bool:
    """Whether a config has layers with a sliding window."""
    unused = USES_WINDOW.is_attribute_of(config) and not USES_WINDOW.attribute_of(config)
    if unused or not WINDOW.attribute_of(config):
        return False
    layers = LAYER_TYPES.attribute_of(config)
    return layers is None or any("sliding" in layer for layer in layers)


def kind_of(layer: Any) -> str:
    """The type of a layer in its config's list; empty for one that isn't there, such as a model."""
    types, index = LAYER_TYPES.attribute_of(getattr(layer, "config", None)) or (), LAYER_INDEX.attribute_of(layer)
    return types[index] if isinstance(index, int) and 0 <= index < len(types) else ""


def window_of(module: Any) -> Any:
    """The sliding window of a layer or a model; None without one.

    A layer without the attribute, such as Mistral's, passes its config's window to its attention.
    """
    if WINDOW.is_attribute_of(module):
        return WINDOW.attribute_of(module)
    config, kind = getattr(module, "config", None), kind_of(module)
    return WINDOW.attribute_of(config) if slides(config) and (not kind or "sliding" in kind) else None


def implementations(model: Any) -> list[str]:
    """The attention names that a model's layers run, sorted; for a composite model, the names of its parts."""
    layers = [module for module in _modules(model) if not is_model(module)]
    names = set(filter(None, map(_implementation, layers)))
    # Older layers keep no config.
    return sorted(names or filter(None, [_implementation(model)]))


def needs(model: Any) -> list[tuple[str, str]]:
    """Pairs of an attention name and a feature that a layer under it needs, as far as attributes and configs say."""
    pairs = set()
    for module in _modules(model):
        name = _implementation(module) or _implementation(model) or ""
        config = getattr(module, "config", None)
        if SOFTCAPPING.attribute_of(module) or SOFTCAPPING.attribute_of(config):
            pairs.add((name, "softcap"))
        if LAYER_SINKS.attribute_of(module) is not None:
            pairs.add((name, "sinks"))
        if window_of(module):
            pairs.add((name, "window"))
    return sorted(pairs)


def _modules(model: Any) -> Iterable[Any]:
    return model.modules() if hasattr(model, "modules") else ()


def _parts(module: Any) -> Iterator[Any]:
    return (part for part in module.modules() if part is not module)


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
    if cuts(window := window_of(module)):
        yield f"has a sliding window of {window}"
    if not types and cuts(chunk := CHUNK.attribute_of(config)):
        yield f"has chunks of {chunk}"
    if odd := sorted(set(types) - _LAYER_TYPES):
        yield f"has layers of type {', '.join(odd)}"
    if ALIBI.attribute_of(config):
        yield "has ALiBi in its mask"
    if is_model(module):
        update = getattr(type(module), "_update_causal_mask", None)
        if code_names(module.__class__) & _PATTERNS or "token_type_ids" in parameters_of(update):
            yield "has a mask pattern of its own"
    elif calls_attention_function(module):
        if CAUSALITY.attribute_of(module) is not True:
            yield "is attention that isn't known to be causal"
    elif takes_mask_or_cache(module) and not any(map(takes_mask_or_cache, _parts(module))):
        yield "mixes tokens by other means than scaled_dot_product_attention"
    elif isinstance(module, nn.RNNBase) or (isinstance(module, nn.Conv1d) and module.kernel_size != (1,)):
        yield "mixes tokens"
    if states := state_names(module):
        yield f"has a state ({', '.join(states)})"
