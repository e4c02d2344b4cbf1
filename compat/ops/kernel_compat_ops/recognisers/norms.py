"""Norms over the last dimension: RMSNorm, RMSNorm with a gate behind it, LayerNorm. Which formula a module computes, and with which eps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, silu

from .probing import arguments, clone, closest, difference, quiet, rounded_as, run, takes_one
from .recogniser import ModuleRecogniser

__all__ = ["GATED", "LAYER", "RMS", "Casting", "Norm", "gated_reference", "layer_reference", "reference"]

Casting = Literal["llama", "gemma", "none"]


@dataclass(frozen=True)
class Norm:
    """The formula of a norm.

    Attributes:
        variant: of its op.
        inputs: the names of its forward's parameters: the hidden states, and the gate of one that has a gate.
        parameters: the names of the weight, and of the bias of one that has a bias.
        eps_name: the attribute that holds `eps`; empty where none does.
        casting: of an RMSNorm, the values that are rounded in half precision. ``llama``: statistics in float32, the normalized
            value before it is multiplied by the weight. ``gemma``: the product alone. ``none``: everything.
    """

    variant: str
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    eps_name: str
    eps: float
    casting: Casting | None = None

    def __str__(self) -> str:
        return f"eps {self.eps:g}" + (f", {self.casting} casting" if self.casting else "")


def reference(x: Tensor, weight: Tensor, eps: float, offset: bool, casting: Casting) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)``, or with ``1 + weight``, in plain torch."""
    dtype = x.dtype
    scale = (1.0 + weight.to(torch.float32 if casting == "gemma" else weight.dtype)) if offset else weight
    if casting != "none":
        x = x.float()
    normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if casting == "gemma":
        return (normal * scale.float()).to(dtype)
    return scale * normal.to(dtype)


def gated_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps) * silu(gate)``, in plain torch."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)) * silu(gate)


def layer_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dimension, as torch computes it."""
    normed: Tensor = layer_norm(x, weight.shape, weight, bias, eps)
    return normed


def _vectors(module: nn.Module) -> list[str]:
    """The names of the parameters of a module that holds vectors of one size and nothing else; empty for other modules."""
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    holds_more = module._modules or any(b is not None for b in module._buffers.values())
    plain = len({p.shape for p in parameters.values()}) == 1 and all(p.dim() == 1 for p in parameters.values())
    return [*parameters] if plain and not holds_more else []


def _is_named_rms(module: nn.Module) -> bool:
    """Whether the name of a module's class is that of an RMSNorm."""
    return "rmsnorm" in type(module).__name__.lower()


def _rms_note(module: nn.Module) -> str:
    weightless = not any(p is not None for p in module._parameters.values())
    return "without a weight stays eager" if _is_named_rms(module) and weightless else ""


#: The formulas of an RMSNorm by variant and casting. Castings are equal in float32.
_RMS_FORMULAS: dict[tuple[str, Casting | None], Callable[..., Tensor]] = {
    (variant, casting): partial(reference, offset=offset, casting=casting)
    for variant, offset in (("standard", False), ("offset", True))
    for casting in get_args(Casting)
}


def _prove(
    module: nn.Module,
    formulas: Mapping[tuple[str, Casting | None], Callable[..., Tensor]],
    description: str,
    rounds: bool = True,
) -> Norm:
    """The formula of a module: of `formulas`, which take inputs, weight, bias where there is one, and eps.

    Where `rounds`, it must round in the same places in bfloat16.
    """
    inputs, parameters = arguments(module), sorted(_vectors(module), reverse=True)  # the weight first
    size = module._parameters[parameters[0]].shape[0]
    with quiet() as generator:
        values = {name: torch.randn(size, generator=generator) for name in parameters}
        rows, *gates = (torch.randn(2, 5, size, generator=generator) for _ in inputs)
        probes = [clone(module, values, training=training) for training in (True, False)]

        def off(formula: Callable[..., Tensor], eps: float) -> float:
            # Some rows so small that eps shows, some so large that a clamp does.
            x = rows * torch.tensor([1.0, 1e4, 1.0, eps**0.5, eps]).unsqueeze(-1)
            return max(
                difference(run(probe, *inputs), formula(*inputs, *values.values(), eps), by_row=True)
                for probe in probes
                for inputs in ((x, *gates), (x[0], *(gate[0] for gate in gates)))
            )

        each = {variant: formula for (variant, _), formula in formulas.items()}
        tried = (
            ((variant, name, eps), partial(off, formula, eps))
            for name, eps in _epsilons(module).items()
            for variant, formula in each.items()
        )
        variant, name, eps = closest(tried, description)
        casting = None
        if rounds:
            half = {name: value.bfloat16() for name, value in values.items()}
            x = torch.randn(max(16, 4096 // size), size, generator=generator).bfloat16()
            result = run(clone(module, half), x)
            castings = {key[1]: formula for key, formula in formulas.items() if key[0] == variant}
            casting = rounded_as(result, {key: formula(x, *half.values(), eps) for key, formula in castings.items()})
    return Norm(variant, inputs, tuple(parameters), name, eps, casting)


def _epsilons(module: nn.Module) -> dict[str, float]:
    """The numbers among a module's attributes that may be eps, by name; 1e-6 without a name where there are none."""
    return {k: v for k, v in vars(module).items() if isinstance(v, float) and 0 < v <= 1e-2} or {"": 1e-6}


def forward_of(norm: Norm, kernel: Callable[..., Tensor]) -> Callable[..., Any]:
    """A forward that calls a kernel with its inputs, the parameters, eps, and ``casting`` where it has one."""
    inputs, parameters, eps_name, fixed = norm.inputs, norm.parameters, norm.eps_name, norm.eps
    options = {"casting": norm.casting} if norm.casting else {}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [*args, *[kwargs[name] for name in inputs[len(args) :]]]
        eps = getattr(self, eps_name) if eps_name else fixed
        return kernel(*tensors, *[getattr(self, name) for name in parameters], eps, **options)

    return forward


RMS = ModuleRecogniser(
    lambda module: len(_vectors(module)) == 1 and takes_one(module),
    partial(_prove, formulas=_RMS_FORMULAS, description="every formula"),
    forward_of,
    is_required=lambda path, module: _is_named_rms(module),
    unlike=lambda path, module: (
        "its weight is parametrized" if _is_named_rms(module) and "parametrizations" in module._modules else ""
    ),
    note=_rms_note,
)

GATED = ModuleRecogniser(
    lambda module: len(_vectors(module)) == 1 and arguments(module)[1:] in (("gate",), ("g",), ("z",)),
    partial(
        _prove,
        formulas={("standard", None): gated_reference},
        description="weight * x / rms * silu(gate)",
        rounds=False,
    ),
    forward_of,
    # transformers builds flash-linear-attention's own module where that is installed.
    note=lambda module: "is flash-linear-attention's already" if type(module).__module__.startswith("fla.") else "",
)

LAYER = ModuleRecogniser(
    lambda module: sorted(_vectors(module)) == ["bias", "weight"] and takes_one(module),
    partial(
        _prove,
        formulas={("standard", None): layer_reference},
        description="(x - mean) / deviation * weight + bias",
    ),
    forward_of,
    is_required=lambda path, module: "layernorm" in type(module).__name__.lower(),
)
