"""Hooks of a model's layers, which enter the packed tokens of a padded batch and leave them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from ..forward_context import arguments_by_name, current_context
from ..mixers import is_mixer
from .batch import Unpadding

__all__ = ["remove_hooks", "structure_of"]


class _Structure:
    """What is found once of a model: its layers, which get hooks then, and whether it has mixers.

    Attributes:
        layers: references to them.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self.has_mixers = any(map(is_mixer, modules))
        self.layers: list[Any] = []
        for layers in modules:
            if not isinstance(layers, nn.ModuleList) or not any(map(_attends, layers)):
                continue
            for number, layer in enumerate(layers):
                self.layers.append(weakref.ref(layer))
                if _enter not in layer._forward_pre_hooks.values():
                    layer.register_forward_pre_hook(_enter, with_kwargs=True)
                    layer.register_forward_hook(_leave_last if number == len(layers) - 1 else _leave)

    def is_compiled(self) -> bool:
        """Whether a layer is compiled by itself, with the hooks that it has, which do nothing in a graph."""
        return any(getattr(layer(), "_compiled_call_impl", None) is not None for layer in self.layers)


def structure_of(model: nn.Module) -> _Structure:
    """A model's structure, whose layers have hooks."""
    structure = _structures.get(model)
    if structure is None:
        structure = _structures[model] = _Structure(model)
    return structure


_structures: weakref.WeakKeyDictionary[nn.Module, _Structure] = weakref.WeakKeyDictionary()


def remove_hooks(model: nn.Module) -> None:
    """Remove the hooks of a model's layers."""
    _structures.pop(model, None)
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number in [number for number, hook in hooks.items() if hook in (_enter, _leave, _leave_last)]:
                del hooks[number]


def _attends(layer: nn.Module) -> bool:
    """Whether a module has attention in it: by the class's name, or by the number of a layer that it has for a cache."""
    parts = (part for part in layer.modules() if part is not layer)
    return any("Attention" in type(part).__name__ or hasattr(part, "layer_idx") for part in parts)


def _enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    context = current_context()
    if context is None or context.unpadding is None:
        return None
    found = context.unpadding.enter(layer, context, arguments_by_name(layer, args, kwargs))
    if found is None:
        return None
    values = list(found.values())  # positional ones first: a reentrant checkpoint needs them so
    return tuple(values[: len(args)]), {name: found[name] for name in kwargs}


def _leave(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    unpadding = _left(layer)
    return _scattered(unpadding, output) if unpadding is not None and unpadding.each_layer else None


def _leave_last(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    unpadding = _left(layer)
    return None if unpadding is None else _scattered(unpadding, output)


def _left(layer: nn.Module) -> Unpadding | None:
    """Leave the packed tokens, if it is this layer that entered them; returns the batch that they are of."""
    context = current_context()
    packed = None if context is None else context.packed
    if packed is not None and not torch.compiler.is_compiling():
        packed = packed()
    if packed is None or packed.layer is not layer:
        return None
    unpadding: Unpadding = packed.leave()
    return unpadding


def _scattered(unpadding: Unpadding, output: Any) -> Any:
    if isinstance(output, tuple):
        return (unpadding.scatter(output[0]), *output[1:])
    return unpadding.scatter(output)
