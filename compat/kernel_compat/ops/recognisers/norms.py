"""RMSNorm modules: which formula one computes, and how a kernel is bound to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .probing import ALIKE, SAME, Unproven, clone, difference, quiet, run, takes_one
from .recogniser import ModuleRecogniser

Casting = Literal["llama", "gemma", "none"]


@dataclass(frozen=True)
class RmsNorm:
    """The formula of an RMSNorm: ``weight * x / sqrt(mean(x^2) + eps)``, or with ``1 + weight``.

    Attributes:
        variant: ``standard`` or ``offset``.
        eps_name: the attribute that holds `eps`; empty where none does.
        casting: the values that are rounded in half precision. ``llama``: statistics in float32, the normalized value before it is
            multiplied by the weight. ``gemma``: the product alone. ``none``: everything.
        parameter: the name of the weight.
    """

    variant: str
    eps: float
    eps_name: str
    casting: Casting
    parameter: str

    def __str__(self) -> str:
        return f"eps {self.eps:g}, {self.casting} casting"


def reference(x: Tensor, weight: Tensor, eps: float, offset: bool, casting: Casting) -> Tensor:
    """The formula, in plain torch."""
    dtype = x.dtype
    scale = (1.0 + weight.to(torch.float32 if casting == "gemma" else weight.dtype)) if offset else weight
    if casting != "none":
        x = x.float()
    normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if casting == "gemma":
        return (normal * scale.float()).to(dtype)
    return scale * normal.to(dtype)


def is_candidate(module: nn.Module) -> bool:
    """Whether a module looks like an RMSNorm: one vector for a weight, one input, nothing inside."""
    parameters = [p for p in module._parameters.values() if p is not None]
    if module._modules or any(b is not None for b in module._buffers.values()) or len(parameters) != 1:
        return False
    return parameters[0].dim() == 1 and takes_one(module)


def calls_itself_one(module: nn.Module) -> bool:
    """Whether a module's class is named an RMSNorm."""
    return "rmsnorm" in type(module).__name__.lower()


def _is_required(path: str, module: nn.Module) -> bool:
    return calls_itself_one(module)


def _unlike(path: str, module: nn.Module) -> str:
    return "its weight is parametrized" if calls_itself_one(module) and "parametrizations" in module._modules else ""


def _note(module: nn.Module) -> str:
    weightless = not any(p is not None for p in module._parameters.values())
    return "without a weight stays eager" if calls_itself_one(module) and weightless else ""


def prove(module: nn.Module) -> RmsNorm:
    """The formula of a module.

    Raises:
        Unproven: none of the formulas.
    """
    found = [(name, p) for name, p in module._parameters.items() if p is not None]
    if len(found) != 1 or module._modules:
        raise Unproven("it has no weight of its own" if not found else "it has more than a weight")
    ((parameter, weight),) = found
    size = weight.shape[0]
    with quiet() as generator:
        values = torch.randn(size, generator=generator)
        rows = torch.randn(2, 5, size, generator=generator)
        nearest = float("inf")
        probes = [
            clone(module, {parameter: nn.Parameter(values, requires_grad=False)}, {}, training)
            for training in (True, False)
        ]
        for name, eps in epsilons(module).items():
            # Some rows so small that eps shows, some so large that a clamp does.
            x = rows * torch.tensor([1.0, 1e4, 1.0, eps**0.5, eps]).unsqueeze(-1)
            for variant in ("standard", "offset"):
                expected = reference(x, values, eps, variant == "offset", "gemma")
                worst = max(
                    _row_difference(run(probe, given.clone()), wanted)
                    for probe in probes
                    for given, wanted in ((x, expected), (x[0], expected[0]))
                )
                if worst < SAME:
                    casting = _casting(module, parameter, values, eps, variant == "offset", generator)
                    return RmsNorm(variant, eps, name, casting, parameter)
                nearest = min(nearest, worst)
    raise Unproven(f"it differs from every formula by {nearest:.1e} or more (float32, relative)")


def _row_difference(found: Any, expected: Tensor) -> float:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return float("inf")
    size = expected.shape[-1]
    return max(
        difference(one, other) for one, other in zip(found.reshape(-1, size), expected.reshape(-1, size), strict=True)
    )


def epsilons(module: nn.Module) -> dict[str, float]:
    """The numbers among a module's attributes that may be the one under the root, by name; one by no name where there are none."""
    return {k: v for k, v in vars(module).items() if isinstance(v, float) and 0 < v <= 1e-2} or {"": 1e-6}


def _casting(
    module: nn.Module, parameter: str, values: Tensor, eps: float, offset: bool, generator: torch.Generator
) -> Casting:
    size = values.shape[0]
    x = torch.randn(max(16, 4096 // size), size, generator=generator).bfloat16()
    weight = values.bfloat16()
    half = run(clone(module, {parameter: nn.Parameter(weight, requires_grad=False)}, {}), x.clone())
    best = 0.0
    for casting in ("llama", "gemma", "none"):
        expected = reference(x, weight, eps, offset, casting)
        if not isinstance(half, Tensor) or half.dtype != expected.dtype:
            continue
        alike = float((half == expected).float().mean())
        if alike >= ALIKE:
            return casting
        best = max(best, alike)
    raise Unproven(f"in bfloat16 it rounds as no formula does: at best {best:.0%} of the values come out the same")


def forward_of(norm: RmsNorm, kernel: Callable[..., Tensor]) -> Callable[..., Any]:
    """A forward that calls a kernel."""
    fixed, eps_name, casting, parameter = norm.eps, norm.eps_name, norm.casting, norm.parameter

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        (hidden_states,) = args or kwargs.values()
        eps = getattr(self, eps_name) if eps_name else fixed
        return kernel(hidden_states, getattr(self, parameter), eps, casting=casting)

    return forward


RECOGNISER = ModuleRecogniser(is_candidate, prove, forward_of, _is_required, _unlike, _note)

__all__ = ["RECOGNISER", "RmsNorm", "calls_itself_one", "epsilons", "forward_of", "is_candidate", "prove", "reference"]
