"""Gated MLPs: ``down(act(gate(x)) * up(x))``, with gate and up apart or in one projection."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, silu

from .probing import SAME, Unproven, clone, difference, quiet, run, takes_one
from .recogniser import ModuleRecogniser

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


def _projections(module: nn.Module) -> dict[str, tuple[int, int]]:
    """The sizes of the children that are linear, by name. PEFT's and quantized ones tell theirs as torch's do."""
    found = {}
    for name, child in module._modules.items():
        sizes = (getattr(child, "in_features", None), getattr(child, "out_features", None))
        if isinstance(sizes[0], int) and isinstance(sizes[1], int):
            found[name] = (sizes[0], sizes[1])
    return found


def layouts(module: nn.Module) -> list[GatedMlp]:
    """The formulas that a module may compute, by the sizes of its projections; with silu."""
    sizes = _projections(module)
    if len(sizes) == 3:
        for down in sizes:
            one, other = (name for name in sizes if name != down)
            if sizes[one] == sizes[other] == sizes[down][::-1] and sizes[down][0] != sizes[down][1]:
                return [GatedMlp(one, other, down), GatedMlp(other, one, down)]
        if len(set(sizes.values())) == 1:  # all square: any of them may be any
            return [GatedMlp(gate, up, down) for gate, up, down in itertools.permutations(sizes)]
    if len(sizes) == 2:
        for both, down in itertools.permutations(sizes):
            if sizes[both] == (sizes[down][1], 2 * sizes[down][0]):
                return [GatedMlp(both, "", down), GatedMlp(both, "", down, gate_first=False)]
    return []


def is_candidate(module: nn.Module) -> bool:
    """Whether a module looks like a gated MLP: two projections up, or one of twice the size, and one down."""
    return bool(layouts(module)) and _others_are_small(module) and takes_one(module)


def calls_itself_one(module: nn.Module) -> bool:
    """Whether a candidate is a gated MLP by more than the sizes of its layers, which others may have by chance."""
    sizes = _projections(module)
    return any("gate" in name for name in sizes) or (len(sizes) == 3 and len(set(sizes.values())) > 1)


def _is_required(path: str, module: nn.Module) -> bool:
    return calls_itself_one(module)


def _others_are_small(module: nn.Module) -> bool:
    linear = _projections(module)
    own = any(p is not None for p in module._parameters.values())
    return not own and all(name in linear or not list(child.parameters()) for name, child in module._modules.items())


def prove(module: nn.Module) -> GatedMlp:
    """The formula of a module.

    Raises:
        Unproven: none of the formulas.
    """
    linear_layers = _projections(module)
    others = [module, *(child for name, child in module._modules.items() if child and name not in linear_layers)]
    if any(buffer is not None for one in others for buffer in one._buffers.values()):
        raise Unproven("it has buffers, whose values may become others")
    nearest = float("inf")
    with quiet() as generator:
        for layout in (replace(one, variant=variant) for variant in ACTIVATIONS for one in layouts(module)):
            worst = _difference(module, layout, generator, training=True)
            if worst < SAME:
                return layout
            if _difference(module, layout, generator, training=False) < SAME:
                raise Unproven("it is one in evaluation alone: in training it drops values out")
            nearest = min(nearest, worst)
    raise Unproven(
        f"it differs from down(silu(gate(x)) * up(x)), and with gelu_tanh, by {nearest:.1e} (float32, relative)"
    )


def _difference(module: nn.Module, layout: GatedMlp, generator: torch.Generator, training: bool) -> float:
    children = small_children(module, layout, generator, training)
    small = {name: children[name] for name in (layout.gate, layout.up, layout.down) if name}
    rows = torch.randn(2, 5, HIDDEN, generator=generator)
    state = torch.get_rng_state()  # dropout draws from it
    try:
        return max(
            difference(run(clone(module, {}, children, training), x.clone()), reference(small, layout, x))
            for x in (rows, rows * 30, rows * 1000)  # so large that a clamp shows
        )
    finally:
        torch.set_rng_state(state)


def small_children(module: nn.Module, layout: GatedMlp, generator: torch.Generator, training: bool) -> dict[str, Any]:
    """Children like a module's, for an input of `HIDDEN` values: small random projections instead of its own."""
    projections = (layout.gate, layout.up, layout.down)
    return {
        name: _small(child, layout, name, generator)
        if name in projections
        else child and clone(child, {}, child._modules, training)
        for name, child in module._modules.items()
    }


class _Linear(nn.Module):  # type: ignore[misc]
    """A linear layer without parameters: contexts that build models without weights put those on the meta device."""

    def __init__(self, sizes: tuple[int, int], bias: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = torch.randn(*sizes, generator=generator)
        self.bias = torch.randn(sizes[0], generator=generator) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def _small(like: Any, layout: GatedMlp, name: str, generator: torch.Generator) -> _Linear:
    inside = INTERMEDIATE * (1 if layout.up else 2)
    sizes = (HIDDEN, INTERMEDIATE) if name == layout.down else (inside, HIDDEN)
    return _Linear(sizes, getattr(like, "bias", None) is not None, generator)


def reference(children: dict[str, _Linear], layout: GatedMlp, x: Tensor) -> Tensor:
    """The formula, in plain torch."""
    if layout.up:
        gate, up = children[layout.gate](x), children[layout.up](x)
    else:
        gate, up = children[layout.gate](x).chunk(2, dim=-1)
        if not layout.gate_first:
            gate, up = up, gate
    down: Tensor = children[layout.down](ACTIVATIONS[layout.variant](gate) * up)
    return down


def forward_of(layout: GatedMlp, kernel: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """A forward that calls a kernel between the projections."""
    first, second, down, gate_first = layout.gate, layout.up, layout.down, layout.gate_first
    if second:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            (x,) = args or kwargs.values()
            return getattr(self, down)(kernel(getattr(self, first)(x), getattr(self, second)(x)))

    else:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            (x,) = args or kwargs.values()
            one, other = getattr(self, first)(x).chunk(2, dim=-1)
            return getattr(self, down)(kernel(one, other) if gate_first else kernel(other, one))

    return forward


RECOGNISER = ModuleRecogniser(is_candidate, prove, forward_of, _is_required)

__all__ = [
    "RECOGNISER",
    "GatedMlp",
    "calls_itself_one",
    "forward_of",
    "is_candidate",
    "layouts",
    "prove",
    "reference",
    "small_children",
]
