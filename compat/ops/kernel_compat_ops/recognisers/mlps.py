"""Gated MLPs: ``down(act(gate(x)) * up(x))``, with gate and up apart or in one projection."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, silu

from .probing import Unproven, clone, closest, difference, quiet, run, takes_one
from .recogniser import ModuleRecogniser

__all__ = ["RECOGNISER", "GatedMlp"]

#: The sizes of a probe's projections, instead of the model's.
HIDDEN, INTERMEDIATE = 6, 10

#: The activations by the variant.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "standard": silu,
    "geglu": lambda x: gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class GatedMlp:
    """The formula of a gated MLP, by the names of its projections.

    Attributes:
        gate: the child whose output goes through the activation; or both, where they are one projection.
        up: the child whose output it is multiplied with; empty where gate and up are one projection.
        down: the last projection.
        gate_first: whether the gate is the first half of the one projection.
        variant: one of `ACTIVATIONS`.
    """

    gate: str
    up: str
    down: str
    gate_first: bool = True
    variant: str = "standard"

    def __str__(self) -> str:
        activation = "silu" if self.variant == "standard" else "gelu_tanh"
        if self.up:
            return f"{self.down}({activation}({self.gate}) * {self.up})"
        return f"{self.down}({activation}(one half of {self.gate}) * the other)"


def forward_of(mlp: GatedMlp, kernel: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """A forward that calls a kernel between the projections."""
    first, second, down, gate_first = mlp.gate, mlp.up, mlp.down, mlp.gate_first

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        (x,) = args or kwargs.values()
        gate = getattr(self, first)(x)
        if second:
            up = getattr(self, second)(x)
        else:
            gate, up = gate.chunk(2, dim=-1)
        return getattr(self, down)(kernel(gate, up) if gate_first else kernel(up, gate))

    return forward


def _projections(module: nn.Module) -> dict[str, tuple[int, int]]:
    """The sizes of the linear children by name, PEFT's and quantized ones included."""
    projections = {}
    for name, child in module._modules.items():
        sizes = (getattr(child, "in_features", None), getattr(child, "out_features", None))
        if isinstance(sizes[0], int) and isinstance(sizes[1], int):
            projections[name] = (sizes[0], sizes[1])
    return projections


def _others(module: nn.Module) -> list[nn.Module]:
    """The children that aren't linear, such as activations."""
    inside = _projections(module)
    return [child for name, child in module._modules.items() if child is not None and name not in inside]


def _is_candidate(module: nn.Module) -> bool:
    """Whether a module looks like one: two projections up, or one of twice the size, one down, and no other parameters."""
    sizes = [*_projections(module).values()]
    if len(sizes) == 3:
        fits = any(gate == up == down[::-1] for gate, up, down in itertools.permutations(sizes))
    else:
        fits = len(sizes) == 2 and any(both == (down[1], 2 * down[0]) for both, down in itertools.permutations(sizes))
    others = [module, *_others(module)]
    return fits and takes_one(module) and not any(list(part.parameters(recurse=part is not module)) for part in others)


def _is_required(path: str, module: nn.Module) -> bool:
    """Whether a candidate is a gated MLP by more than the sizes of its layers, which others may have by chance."""
    sizes = _projections(module)
    return any("gate" in name for name in sizes) or (len(sizes) == 3 and len(set(sizes.values())) > 1)


def prove(module: nn.Module) -> GatedMlp:
    """The formula of a module; raises `Unproven`."""
    if any(buffer is not None for part in (module, *_others(module)) for buffer in part._buffers.values()):
        raise Unproven("it has buffers, whose values may become others")
    with quiet() as generator:
        formulas = _formulas([*_projections(module)])
        tried = [(mlp, partial(_difference, module, mlp, generator)) for mlp in formulas]
        return closest(tried, "down(silu(gate(x)) * up(x)), and with gelu_tanh,")


def _formulas(names: list[str]) -> list[GatedMlp]:
    """The formulas of projections with these names, whichever they are."""
    orders: list[Any] = [*itertools.permutations(names)]
    if len(names) == 3:
        return [GatedMlp(gate, up, down, True, variant) for variant in ACTIVATIONS for gate, up, down in orders]
    pairs = [(both, down, first) for both, down in orders for first in (True, False)]
    return [GatedMlp(both, "", down, first, variant) for variant in ACTIVATIONS for both, down, first in pairs]


def _difference(module: nn.Module, mlp: GatedMlp, generator: torch.Generator) -> float:
    projections = {
        name: _Linear(getattr(getattr(module, name), "bias", None) is not None, mlp, name, generator)
        for name in (mlp.gate, mlp.up, mlp.down)
        if name
    }
    probes = []
    for training in (True, False):
        children = {
            name: projections.get(name) or (child and clone(child, {}, child._modules, training))
            for name, child in module._modules.items()
        }
        probes.append(clone(module, {}, children, training))
    rows = torch.randn(2, 5, HIDDEN, generator=generator)
    inputs = (rows, rows * 30, rows * 1000)  # so large that a clamp shows
    return max(difference(run(probe, x), _reference(projections, mlp, x)) for probe in probes for x in inputs)


class _Linear(nn.Module):  # type: ignore[misc]
    """A linear layer whose weights are plain tensors: a context that builds models without weights puts parameters on meta."""

    def __init__(self, bias: bool, mlp: GatedMlp, name: str, generator: torch.Generator) -> None:
        super().__init__()
        inside = INTERMEDIATE * (1 if mlp.up else 2)
        sizes = (HIDDEN, INTERMEDIATE) if name == mlp.down else (inside, HIDDEN)
        self.weight = torch.randn(*sizes, generator=generator)
        self.bias = torch.randn(sizes[0], generator=generator) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def _reference(projections: Mapping[str, nn.Module], mlp: GatedMlp, x: Tensor) -> Tensor:
    if mlp.up:
        gate, up = projections[mlp.gate](x), projections[mlp.up](x)
    else:
        gate, up = projections[mlp.gate](x).chunk(2, dim=-1)
    if not mlp.gate_first:
        gate, up = up, gate
    down: Tensor = projections[mlp.down](ACTIVATIONS[mlp.variant](gate) * up)
    return down


RECOGNISER = ModuleRecogniser(_is_candidate, prove, forward_of, _is_required)
