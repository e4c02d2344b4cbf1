"""LayerNorm modules: ``(x - mean) / sqrt(variance + eps) * weight + bias``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from .norms import epsilons
from .probing import ALIKE, SAME, Unproven, clone, difference, quiet, run, takes_one
from .recogniser import ModuleRecogniser

__all__ = ["RECOGNISER", "LayerNorm", "forward_of", "is_candidate", "prove"]


@dataclass(frozen=True)
class LayerNorm:
    """The formula of a LayerNorm over the last dimension, with parameters `weight` and `bias`.

    Attributes:
        eps_name: the attribute that holds `eps`; empty where none does.
    """

    eps: float
    eps_name: str
    variant: str = "standard"

    def __str__(self) -> str:
        return f"eps {self.eps:g}"


def is_candidate(module: nn.Module) -> bool:
    """Whether a module looks like a LayerNorm: two vectors of one size, one input, nothing inside."""
    shapes = [tuple(p.shape) for p in module._parameters.values() if p is not None]
    if module._modules or sorted(module._parameters) != ["bias", "weight"] or len(shapes) != 2:
        return False
    return len(shapes[0]) == 1 and shapes[0] == shapes[1] and takes_one(module)


def is_required(path: str, module: nn.Module) -> bool:
    return "layernorm" in type(module).__name__.lower()


def prove(module: nn.Module) -> LayerNorm:
    """The formula of a module.

    Raises:
        Unproven: another formula.
    """
    size = module._parameters["weight"].shape[0]
    nearest = float("inf")
    with quiet() as generator:
        rows = torch.randn(2, 5, size, generator=generator)
        weight, bias = torch.randn(size, generator=generator), torch.randn(size, generator=generator)
        probes = [_probe(module, weight, bias, training) for training in (True, False)]
        for name, eps in epsilons(module).items():
            x = rows * torch.tensor([1.0, 1e4, 1.0, eps**0.5, eps]).unsqueeze(-1)
            expected = layer_norm(x, (size,), weight, bias, eps)
            worst = 0.0
            for probe in probes:
                found = run(probe, x.clone())
                if not isinstance(found, Tensor) or found.shape != x.shape:
                    raise Unproven("its output has another shape than its input")
                pairs = zip(found.reshape(-1, size), expected.reshape(-1, size), strict=True)
                worst = max(worst, *(difference(one, other) for one, other in pairs))
            if worst < SAME:
                _require_rounding(module, weight.bfloat16(), bias.bfloat16(), eps, generator)
                return LayerNorm(eps, name)
            nearest = min(nearest, worst)
    raise Unproven(f"it differs from (x - mean) / deviation * weight + bias by {nearest:.1e} (float32, relative)")


def _probe(module: nn.Module, weight: Tensor, bias: Tensor, training: bool = True) -> nn.Module:
    parameters = {name: nn.Parameter(p, requires_grad=False) for name, p in (("weight", weight), ("bias", bias))}
    return clone(module, parameters, {}, training)


def _require_rounding(module: nn.Module, weight: Tensor, bias: Tensor, eps: float, generator: torch.Generator) -> None:
    x = torch.randn(max(16, 4096 // len(weight)), len(weight), generator=generator).bfloat16()
    found = run(_probe(module, weight, bias), x.clone())
    expected = layer_norm(x, weight.shape, weight, bias, eps)
    if not isinstance(found, Tensor) or found.dtype != x.dtype or float((found == expected).float().mean()) < ALIKE:
        raise Unproven("in bfloat16 it rounds in other places than torch's layer_norm")


def forward_of(norm: LayerNorm, kernel: Callable[..., Tensor]) -> Callable[..., Any]:
    """A forward that calls a kernel: ``kernel(hidden_states, weight, bias, eps)``."""
    fixed, eps_name = norm.eps, norm.eps_name

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        (hidden_states,) = args or kwargs.values()
        return kernel(hidden_states, self.weight, self.bias, getattr(self, eps_name) if eps_name else fixed)

    return forward


RECOGNISER = ModuleRecogniser(is_candidate, prove, forward_of, is_required)
