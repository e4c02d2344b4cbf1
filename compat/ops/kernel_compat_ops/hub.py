"""Layers of the hub: modules whose forwards transformers' `kernelize` replaces, where the package ``kernels`` is installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from kernel_compat.errors import UnsupportedFeatureError

from .instances import Change, ops_of, qualified_name, replaced


class Layers:
    """The layers of the hub in a model, and whether transformers replaces their forwards."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = {path: m for path, m in model.named_modules() if hasattr(type(m), "kernel_layer_name")}
        self._models: list[Any] = [m for m in model.modules() if hasattr(type(m), "use_kernels")]

    def around(self, path: str) -> str:
        """A layer around a module whose forward has been replaced, and so may not call the module's; empty for none."""
        for outer, layer in self._over(path):
            if outer != path and (forward := replaced(layer)) is not None and not ops_of(layer):
                return f"{outer} ({type(layer).__name__}), whose forward has been replaced by {qualified_name(forward)}"
        return ""

    def refuse(self, path: str) -> str:
        """The reason why a forward that is bound to a module isn't called, or won't be; empty where it is."""
        if around := self.around(path):
            return f"it is in {around}"
        if any(True for _ in self._over(path)) and any(model.use_kernels for model in self._models):
            return "use_kernels is on, and with it train() and eval() replace its forward, or that of a layer around it"
        return ""

    def guards(self, changed: Iterable[Any]) -> list[Change]:
        """Changes that make transformers refuse to replace the forwards of these modules, and of bound ones."""
        ids = {id(module) for module in changed}
        if not any(id(m) in ids or ops_of(m) for layer in self._layers.values() for m in layer.modules()):
            return []
        pairs = ((model, f) for model in self._models for f in _GUARDS if hasattr(type(model), f.__name__))
        return [Change(model, f.__name__, MethodType(f, model)) for model, f in pairs]

    def _over(self, path: str) -> Iterator[tuple[str, nn.Module]]:
        while path:
            if path in self._layers:
                yield path, self._layers[path]
            path = path.rpartition(".")[0]


def unkernelized(function: Any) -> Any:
    """A function as it was written: ``kernels`` makes a module of each function that it can replace by a kernel of the hub."""
    return partial(type(function).forward, function) if isinstance(function, nn.Module) else function


def kernelize(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse `kernelize`, which would replace the kernels of this library."""
    raise UnsupportedFeatureError(
        f"kernels of the hub in the same {type(self).__name__}: they would replace its own",
        "apply_ops",
        "Undo its report, kernel_compat.ops.applied(model), first; or leave the ops eager that the hub has kernels for.",
    )


def set_use_kernels(self: Any, use_kernels: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse `set_use_kernels(True)`, as `kernelize`; False is passed on."""
    if use_kernels:
        kernelize(self)
    return type(self).set_use_kernels(self, use_kernels, *args, **kwargs)


#: Until transformers 5.12 `use_kernels`, `train` and `eval` call the first, since then the second.
_GUARDS = (kernelize, set_use_kernels)
