"""RMSNorm with a gate behind it: ``weight * x / sqrt(mean(x^2) + eps) * silu(gate)``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from .norms import epsilons
from .probing import SAME, Unproven, clone, difference, quiet, run
from .recogniser import ModuleRecogniser


@dataclass(frozen=True)
class GatedNorm:
    """The formula of a gated RMSNorm.

    Attributes:
        parameter: the name of the weight.
        names: the names of its forward's parameters: the hidden states and the gate.
    """

    eps: float
    parameter: str
    names: tuple[str, str]
    variant: str = "standard"

    def __str__(self) -> str:
        return f"eps {self.eps:g}"


def reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula, in plain torch."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)) * silu(gate)


def is_candidate(module: nn.Module) -> bool:
    """Whether a module looks like one: a vector for a weight, and a forward with a gate."""
    parameters = [p for p in module._parameters.values() if p is not None]
    if len(parameters) != 1 or parameters[0].dim() != 1 or module._modules:
        return False
    names = _names(module)
    return len(names) == 2 and names[1] in ("gate", "g", "z")


def _names(module: nn.Module) -> Any:
    try:
        return tuple(inspect.signature(type(module).forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()


def prove(module: nn.Module) -> GatedNorm:
    """The formula of a module.

    Raises:
        Unproven: another formula.
    """
    ((parameter, weight),) = ((name, p) for name, p in module._parameters.items() if p is not None)
    size = weight.shape[0]
    nearest = float("inf")
    with quiet() as generator:
        values = torch.randn(size, generator=generator)
        rows, gate = torch.randn(4, size, generator=generator), torch.randn(4, size, generator=generator)
        probe = clone(module, {parameter: nn.Parameter(values, requires_grad=False)}, {})
        for eps in epsilons(module).values():
            x = rows * torch.tensor([1.0, 1.0, eps**0.5, eps]).unsqueeze(-1)
            given = run(probe, x.clone(), gate.clone())
            expected = reference(x, gate, values, eps)
            same_shape = isinstance(given, Tensor) and given.shape == expected.shape
            worst = (
                max(difference(one, other) for one, other in zip(given, expected, strict=True))
                if same_shape
                else nearest
            )
            if worst < SAME:
                return GatedNorm(eps, parameter, _names(module))
            nearest = min(nearest, worst)
    raise Unproven(f"it differs from weight * x / rms * silu(gate) by {nearest:.1e} or more (float32, relative)")


def forward_of(norm: GatedNorm, kernel: Callable[..., Tensor]) -> Callable[..., Any]:
    """A forward that calls a kernel."""
    eps, parameter, names = norm.eps, norm.parameter, norm.names

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        hidden_states, gate = (*args, *(kwargs[name] for name in names[len(args) :]))
        return kernel(hidden_states, gate, getattr(self, parameter), eps)

    return forward


def _note(module: nn.Module) -> str:
    """Transformers builds flash-linear-attention's own module where that is installed."""
    return "is flash-linear-attention's already" if type(module).__module__.startswith("fla.") else ""


RECOGNISER = ModuleRecogniser(is_candidate, prove, forward_of, note=_note)

__all__ = ["RECOGNISER", "GatedNorm", "forward_of", "is_candidate", "prove", "reference"]
