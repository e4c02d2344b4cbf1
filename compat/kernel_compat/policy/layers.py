"""Which kernel computes each attention layer of a model, from the layers' attributes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ..api import registered_attention
from ..attention.layer_kinds import is_attention
from ..attention.names import AttentionName
from ..attention.roles import (
    GROUPS,
    HEAD_DIM,
    LAYER_SINKS,
    QUERY_DIM,
    SOFTCAPPING,
    VALUE_DIM,
)
from ..environment import Environment
from ..errors import UnsupportedFeatureError
from ..kernels import Features, Kernel, LayeredKernel, Needs, unmet
from .capabilities import device_type, kernel_of, require_features, require_known
from .support import kind_of, window_of
from .support import needs as features_needed

__all__ = ["LayerKernels", "layer_kernels", "require_declared", "require_layers"]


@dataclass(frozen=True)
class LayerKernels:
    """The kernels of the layers of a model that need the same.

    Attributes:
        layers: the names of the modules.
        needs: what they need, as far as their attributes say; the needs of a gradient excluded.
        forward: the kernel without gradients; None if there is none.
        training: the kernel with gradients; None if there is none.
        reasons: why kernels before these can't compute them, ``NAME: REASON`` each.
    """

    layers: tuple[str, ...]
    needs: Needs
    forward: str | None
    training: str | None
    reasons: tuple[str, ...]


def layer_kernels(model: Any, name: str, environment: Environment | None = None) -> list[LayerKernels]:
    """The kernels of a model's attention layers under an attention name, in the order of the layers.

    Args:
        model: a model; its parameters may be on the meta device.
        name: a registered name or a kernel's; ``auto`` for all kernels. ``paged|NAME`` means NAME.
        environment: default: this one.

    Raises:
        UnknownNameError: there is no such name.
    """
    from ..kernels import as_kernel

    declared = None
    if name == "auto":
        kernel: Kernel | None = as_kernel(name)
    else:
        require_known(name)
        bare = name.removeprefix("paged|")
        kernel, entry = kernel_of(bare), registered_attention().get(bare)
        declared = None if entry is None else entry.features
    return [] if kernel is None else _assigned(model, kernel, environment or Environment.detect(), declared)


def require_layers(model: Any, name: str, kernel: Kernel, environment: Environment | None = None) -> None:
    """Check that a kernel of several has a member for every layer of a model.

    Args:
        environment: default: this one.

    Raises:
        UnsupportedFeatureError: it has none; the message names the layer.
    """
    if not isinstance(kernel, LayeredKernel):
        return
    environment = environment or Environment.detect()
    if not kernel.usable(environment):  # loaded for another machine
        return
    for group in _assigned(model, kernel, environment):
        if group.forward is None:
            where = f"{group.layers[0]} of {type(model).__name__}"
            raise UnsupportedFeatureError(f"the layer {where}", name, f"{'; '.join(group.reasons)}.")


def require_declared(model: Any, entry: AttentionName) -> None:
    """Check that the features which a forward was registered with are all that a model needs, in its layers as far as they exist.

    Parts of a composite model are left out: each is checked by itself, under its own name.

    Raises:
        UnsupportedFeatureError: a feature is missing.
    """
    if entry.features is not None:
        config = model.config
        modules = [module for module in model.modules() if getattr(module, "config", config) is config]
        needed = {feature for _, feature in features_needed(SimpleNamespace(config=config, modules=lambda: modules))}
        require_features(entry.name, needed, type(model).__name__, Environment.detect())


def _assigned(
    model: Any, kernel: Kernel, environment: Environment, declared: Features | None = None
) -> list[LayerKernels]:
    device = device_type(environment)
    alike: dict[Needs, list[str]] = {}
    for layer, needs in _layers(model, device):
        alike.setdefault(needs, []).append(layer)
    groups = []
    for needs, layers in alike.items():
        with_gradients = needs._replace(features=needs.features | {"backward"})
        (forward, reasons), (training, more) = (
            _first(kernel, n, environment, declared) for n in (needs, with_gradients)
        )
        groups.append(LayerKernels(tuple(layers), needs, forward, training, tuple(dict.fromkeys((*reasons, *more)))))
    return groups


def _first(
    kernel: Kernel, needs: Needs, environment: Environment, declared: Features | None
) -> tuple[str | None, list[str]]:
    if declared is None and isinstance(kernel, LayeredKernel):
        member, reasons = kernel.member_for(needs, environment)
        return (None if member is None else member.name), reasons
    features = declared or kernel.features_in(environment)
    reason = "; ".join(kernel.unavailable_because(environment)) or unmet(features, needs)
    return (None, [f"{kernel.name}: {reason}"]) if reason else (kernel.name, [])


def _layers(model: Any, device: str) -> Iterator[tuple[str, Needs]]:
    """The attention layers of a model by the names of their modules."""
    for name, module in model.named_modules():
        if not is_attention(module):
            continue
        dims = [getattr(module, attribute, None) for attribute in (*QUERY_DIM.spellings, *HEAD_DIM.spellings)]
        head_dim = next((dim for dim in dims if isinstance(dim, int)), None)
        if head_dim is not None:
            value_dim = VALUE_DIM.attribute_of(module)
            yield name, Needs(head_dim, value_dim or head_dim, _dtype(module), device, frozenset(_features(module)))


def _dtype(module: Any) -> str:
    """The dtype of a layer's weights; empty for float32, which autocast may cast."""
    parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
    dtype = "" if parameter is None else str(parameter.dtype).removeprefix("torch.")
    return "" if dtype == "float32" else dtype


def _features(module: Any) -> Iterator[str]:
    if window_of(module):
        yield "window"
    if SOFTCAPPING.attribute_of(module):
        yield "softcap"
    if LAYER_SINKS.attribute_of(module) is not None:
        yield "sinks"
    if (GROUPS.attribute_of(module) or 1) > 1:
        yield "gqa"
    if kind_of(module) == "chunked_attention" or hasattr(module, "has_relative_attention_bias"):
        yield "masks"
