"""Hooks of a model's layers, which enter the packed tokens of a padded batch and leave them."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import nn

from ..forward_context import current_context
from ..layer_kinds import contains_attention, is_mixer
from ..tensors import constant
from .batch import PackedContext, Unpadding

__all__ = ["remove_hooks", "structure_of"]


class _Structure:
    """What is found of a model at its first call: its layers, which get hooks, and whether it has mixers.

    Attributes:
        lists: references to the lists of its layers.
        layers: references to the layers that were in them, each with the hook for its end.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self.has_mixers = any(map(is_mixer, modules))
        lists = [part for part in modules if isinstance(part, nn.ModuleList) and any(map(contains_attention, part))]
        self.lists = [weakref.ref(layers) for layers in lists]
        self.layers: list[Any] = []
        for layers in lists:
            for number, layer in enumerate(layers):
                self.layers.append(weakref.ref(layer))
                _remove(layer)
                layer.register_forward_pre_hook(_enter, with_kwargs=True)
                layer.register_forward_hook(_leave_last if number == len(layers) - 1 else _leave)

    def is_current(self) -> bool:
        """Whether the lists have the same layers, with their hooks."""
        now = [layer for layers in self.lists for layer in layers() or ()]
        return len(now) == len(self.layers) and all(
            layer is known() and _enter in layer._forward_pre_hooks.values()
            for layer, known in zip(now, self.layers, strict=True)
        )

    def is_compiled(self) -> bool:
        """Whether a layer is compiled by itself, with the hooks that it has, which do nothing in a graph."""
        return any(
            getattr(layer(), "_compiled_call_impl", None) is not None or hasattr(layer(), "_orig_mod")
            for layer in self.layers
        )


_structures: weakref.WeakKeyDictionary[nn.Module, _Structure] = weakref.WeakKeyDictionary()


def structure_of(model: nn.Module) -> _Structure:
    """A model's structure, whose layers have hooks."""
    structure = _structures.get(model)
    if structure is None or not (torch.compiler.is_compiling() or structure.is_current()):
        structure = _structures[model] = _Structure(model)
    return structure


def remove_hooks(model: nn.Module) -> None:
    """Remove the hooks of a model's layers."""
    _structures.pop(model, None)
    for module in model.modules():
        _remove(module)


def _remove(module: nn.Module) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [number for number, hook in hooks.items() if hook in (_enter, _leave, _leave_last)]:
            del hooks[number]


def _enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    context = current_context()
    unpadding = None if context is None else context.unpadding
    if context is None or not isinstance(unpadding, Unpadding):
        return None
    names = _positional_names(type(layer)) or ("hidden_states",)  # of a wrapper that passes on any arguments
    if len(args) > len(names):
        unpadding.keep_padded(layer)
        return None
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    packed = unpadding.enter(layer, context, names[0], arguments)
    if packed is None:
        return None
    values = list(packed.values())  # positional ones first: a reentrant checkpoint needs them so
    return tuple(values[: len(args)]), {name: packed[name] for name in kwargs}


@constant
def _positional_names(kind: type) -> tuple[str, ...]:
    """The names of the parameters of a layer's forward that may be positional, without `self`."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]  # type: ignore[attr-defined]
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def _leave(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    unpadding = _left(layer)
    return _scattered(unpadding, output) if unpadding is not None and unpadding.each_layer else None


def _leave_last(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    unpadding = _left(layer)
    if unpadding is None:
        return None
    unpadding.scattered = True
    return _scattered(unpadding, output)


def _left(layer: nn.Module) -> Unpadding | None:
    """Leave the packed tokens, if it is this layer that entered them; returns the batch that they are of."""
    context = current_context()
    if not isinstance(context, PackedContext) or context.layer is not layer:
        return None
    return context.leave()


def _scattered(unpadding: Unpadding, output: Any) -> Any:
    if isinstance(output, tuple):
        return (unpadding.scatter(output[0]), *output[1:])
    return unpadding.scatter(output)
