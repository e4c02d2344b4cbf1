"""Whether a forward of liger-kernel computes what a module's own forward does.

Both run on the CPU, with small random weights, and with torch's functions in the place of Liger's Triton kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, relu, silu

from ..ops.recognisers import experts, mlps
from ..ops.recognisers.probing import SAME, Unproven, clone, difference, kind, quiet, run

__all__ = ["key", "require_same", "require_same_activation"]


class _Formula:
    """One of Liger's autograd functions, or a function around it."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        self.apply = compute

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        return self.apply(*args)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *rounding: Any) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + offset)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return layer_norm(x, x.shape[-1:], weight, bias, eps)


def _swiglu(gate: Tensor, up: Tensor, before: float = 1.0, behind: float = 1.0) -> Tensor:
    return silu(gate * before) * up * behind


#: By the names that Liger's forwards call them by.
_FORMULAS = {
    "LigerRMSNormFunction": _Formula(_rms_norm),
    "LigerLayerNormFunction": _Formula(_layer_norm),
    "_functional_layer_norm": _Formula(_layer_norm),
    "LigerSiLUMulFunction": _Formula(_swiglu),
    "_swiglu_dispatch": _Formula(_swiglu),
    "LigerGELUMulFunction": _Formula(lambda gate, up: gelu(gate, approximate="tanh") * up),
    "LigerReLUSquaredFunction": _Formula(lambda x: relu(x).square()),
}

#: The experts that Liger's fused forward computes, by its attributes' names.
_EXPERTS = {"up": "gate_up_proj", "down": "down_proj", "variant": "swiglu", "bias": False}


def require_same(module: nn.Module, forward: FunctionType) -> None:
    """Check a forward of Liger's against that of a module's class.

    Raises:
        Unproven: they differ, or can't be compared.
    """
    if "LigerFusedMoEFunction" in forward.__code__.co_names:
        found = experts.prove(module)
        if any(getattr(found, name) != value for name, value in _EXPERTS.items()):
            raise Unproven(f"it computes {found}")
        return
    with quiet() as generator:
        twin, x = _small(module, generator)
        _compare(lambda x: run(twin, x), lambda x: _in_torch(forward)(twin, x), x)


def require_same_activation(original: Callable[..., Any], replacement: nn.Module) -> None:
    """Check an activation of Liger's against the one that it replaces; raises as `require_same`."""
    if _FORMULAS.keys().isdisjoint(type(replacement).forward.__code__.co_names):
        return
    with quiet() as generator:
        x = torch.randn(5, 16, generator=generator)
        _compare(original, lambda x: _in_torch(type(replacement).forward)(replacement, x), x)


def key(module: nn.Module, forward: FunctionType) -> Hashable:
    """Modules with the same need one proof: they are alike but for methods of the instance, and get the same forward."""
    twin = clone(module, module._parameters, module._modules)
    for name in [name for name, value in vars(twin).items() if isinstance(value, MethodType)]:
        del vars(twin)[name]
    return forward, kind(twin)


def _small(module: nn.Module, generator: torch.Generator) -> tuple[nn.Module, Tensor]:
    """A module like another with small weights, and an input: rows large and small, so that what is added or clamped shows."""
    scales = torch.tensor([1.0, 30.0, 1e-3, 1e4, 1e-6]).unsqueeze(-1)
    if not module._modules:
        own = {name: value for name, value in module._parameters.items() if value is not None}
        weights = {name: torch.randn(value.shape, generator=generator) for name, value in own.items()}
        size = next((value.shape[-1] for value in weights.values()), 16)
        x = torch.randn(2, 5, size, generator=generator) * scales
        return clone(module, {**module._parameters, **weights}, {}), x
    layout = next(iter(mlps.layouts(module)), None)
    if layout is None:
        raise Unproven("it is neither a norm nor an MLP of two or three projections")
    children = mlps.small_children(module, layout, generator, training=True)
    return clone(module, {}, children), torch.randn(2, 5, mlps.HIDDEN, generator=generator) * scales


def _in_torch(forward: FunctionType) -> Callable[..., Any]:
    names = {**forward.__globals__, **_FORMULAS}
    return FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)


def _compare(original: Callable[[Tensor], Any], replacement: Callable[[Tensor], Any], x: Tensor) -> None:
    state = torch.get_rng_state()  # dropout draws from it
    try:
        expected, found = original(x.clone()), replacement(x.clone())
    except Unproven:
        raise
    except Exception as error:  # the code of any model, and of any release of Liger
        raise Unproven(f"a probe failed ({type(error).__name__}: {error})") from error
    finally:
        torch.set_rng_state(state)
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor) or expected.shape != found.shape:
        raise Unproven("their outputs have different shapes")
    size = expected.shape[-1]
    rows = zip(found.reshape(-1, size), expected.reshape(-1, size), strict=True)
    if (worst := max(difference(*pair) for pair in rows)) > SAME:
        raise Unproven(f"they differ by {worst:.1e} (float32, relative)")
