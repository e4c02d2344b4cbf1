"""Mixtures whose experts are held in two parameters: which formula the experts compute, and how a kernel is bound to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, relu, silu

from .probing import SAME, Unproven, arguments, clone, closest, difference, quiet, run
from .recogniser import ModuleRecogniser

__all__ = ["RECOGNISER", "Experts", "forward_of", "prove", "reference"]

#: The sizes of a probe's parameters, instead of the model's. The number of experts stays the model's.
HIDDEN, INTERMEDIATE = 6, 10

#: The scales of a probe's inputs: a clamp shows at one of them.
SCALES = (1.0, 32.0, 1024.0)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "relu2": lambda x: relu(x).square(),
}


@dataclass(frozen=True)
class Experts:
    """The formula of experts: ``down(act(gate) * up)``, or ``down(act(up))``, weighted and added up for each token.

    Attributes:
        up: the name of the parameter with the first projections: gate and up in one, or up alone.
        down: the name of the parameter with the second projections.
        arguments: the names under which the forward takes the hidden states, the experts of each token, and their weights.
        transposed: the parameters are (experts, in, out), and not (experts, out, in).
        gated: there is a gate.
        interleaved: rows of gate and up alternate; else all of the gate's come first.
        bias: there are biases, under the names of the parameters with ``_bias``.
        activation: one of `ACTIVATIONS`.
        limit: gates are clamped to this from above, ups from both sides.
        alpha: the formula of GPT-OSS: ``(up + 1) * gate * sigmoid(alpha * gate)``.
    """

    up: str
    down: str
    arguments: tuple[str, ...]
    transposed: bool = False
    gated: bool = True
    interleaved: bool = False
    bias: bool = False
    activation: str = "silu"
    limit: float | None = None
    alpha: float | None = None

    @property
    def variant(self) -> str:
        """The variant of the kernel that computes these experts."""
        if not self.gated:
            return "up"
        if self.alpha is not None:
            return "gpt_oss"
        if self.limit is not None:
            return "swiglu_limited"
        if self.activation != "silu":
            return "geglu"
        return "swiglu_transposed" if self.transposed else "swiglu"

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of a kernel for the variant, besides the biases."""
        names = {"gpt_oss": ("limit", "alpha", "interleaved"), "swiglu_limited": ("limit",)}
        names |= {"geglu": ("activation",), "up": ("activation",)}
        return {name: getattr(self, name) for name in names.get(self.variant, ())}

    def __str__(self) -> str:
        limit = self.limit
        gate, up = ("gate", "up") if limit is None else (f"min(gate, {limit:g})", f"clamp(up, {limit:g})")
        inside = f"{self.activation}({gate}) * {up}" if self.gated else f"{self.activation}(up)"
        if self.alpha is not None:
            inside = f"{gate} * sigmoid({self.alpha:g} * {gate}) * ({up} + 1)"
        marks = [name for name in ("transposed", "interleaved") if getattr(self, name)] + ["with biases"] * self.bias
        return ", ".join([f"down({inside})", *marks])


def reference(
    experts: Experts,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """The formula. Ids in `top_k_index` that are no expert's add nothing.

    Args:
        hidden_states: (tokens, hidden).
        top_k_index: (tokens, k).
        top_k_weights: (tokens, k).
        up: (experts, 2 * intermediate or intermediate, hidden); `up_bias` without the last dimension.
        down: (experts, hidden, intermediate); `down_bias` without the last dimension.
    """
    total = torch.zeros_like(hidden_states)
    for expert in top_k_index.unique().tolist():
        if not 0 <= expert < len(down):
            continue
        token, place = torch.where(top_k_index == expert)
        inside = linear(hidden_states[token], up[expert], None if up_bias is None else up_bias[expert])
        rows = linear(_activated(experts, inside), down[expert], None if down_bias is None else down_bias[expert])
        total = total.index_add(0, token, (rows * top_k_weights[token, place, None]).to(total.dtype))
    return total


def _activated(experts: Experts, inside: Tensor) -> Tensor:
    activation = ACTIVATIONS[experts.activation]
    if not experts.gated:
        return activation(inside)
    gate, up = (inside[..., ::2], inside[..., 1::2]) if experts.interleaved else inside.chunk(2, dim=-1)
    if experts.limit is not None:
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
    if experts.alpha is not None:
        return (up + 1) * gate * torch.sigmoid(experts.alpha * gate)
    return activation(gate) * up


def _is_candidate(module: nn.Module) -> bool:
    """Whether a module looks like experts in two parameters: these, and a forward of three arguments."""
    return len(_wide(module)) == 2 and len(arguments(module)) == 3


def _is_named_experts(path: str, module: nn.Module) -> bool:
    """Whether a module is, by its name, a mixture's experts: all of them, and not the shared ones."""
    name = type(module).__name__
    named = name.endswith(("Experts", "NaiveMoe")) and not name.endswith("SharedExperts")
    return named or path.rpartition(".")[2] == "experts"


def _unlike_because(path: str, module: nn.Module) -> str:
    """Why a mixture's experts can't have a kernel; empty where they or a part of them are a candidate, and for other modules."""
    if not _is_named_experts(path, module) or any(_is_candidate(inner) for inner in module.modules()):
        return ""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        apart = "its experts are modules of their own, and kernels take them in two parameters, as most of transformers 5 has them"
        return apart if len(module) > 1 else ""
    if not any(_wide(inner) for inner in module.modules()):
        return "its experts are not held in two parameters of three dimensions"
    return f"its forward takes ({', '.join(arguments(module))}), and not hidden states, experts and weights"


def _wide(module: nn.Module) -> list[str]:
    return [name for name, p in module._parameters.items() if p is not None and p.dim() == 3]


def prove(module: nn.Module) -> Experts:
    """The formula of experts, which is that of transformers' eager implementation, whichever one is chosen; raises `Unproven`."""
    layouts = list(_layouts(module))
    _require_plain(module, layouts)
    with quiet() as generator:
        tried = (
            ((formula, probe), partial(probe.off, formula))
            for layout in layouts
            for probe in [_Probe(module, layout, generator)]
            for formula in _formulas(module, layout)
        )
        formula, probe = closest(tried, "every formula")
        if formula.variant != "gpt_oss" and (formula.bias or formula.interleaved):
            unknown = "of that with biases" if formula.bias else "with gate and up taking turns"
            raise Unproven(f"it is {formula}, and there is no variant {unknown}")
        probe.require_other_ids_ignored(formula)
        return formula


def _layouts(module: nn.Module) -> Iterator[Experts]:
    """The formulas that the shapes of the two parameters allow."""
    first, second = _wide(module)
    names = arguments(module)
    biases = {name for name, p in module._parameters.items() if p is not None and p.dim() != 3}
    for up, down in ((first, second), (second, first)):
        wide, narrow = (tuple(module._parameters[name].shape) for name in (up, down))
        if wide[0] != narrow[0] or (biases and biases != {f"{up}_bias", f"{down}_bias"}):
            continue
        for transposed in (False, True):
            (outside, hidden), (back, inside) = (
                (shape[:0:-1] if transposed else shape[1:]) for shape in (wide, narrow)
            )
            if hidden == back and outside in (inside, 2 * inside):
                yield Experts(up, down, names, transposed, gated=outside != inside, bias=bool(biases))


def _require_plain(module: nn.Module, layouts: list[Experts]) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and not (parameter.is_floating_point() and parameter.element_size() > 1):
            raise Unproven(f"its {name} is quantized ({parameter.dtype})")
        if type(parameter) not in (Tensor, nn.Parameter, type(None)) and type(parameter).__name__ != "DTensor":
            raise Unproven(f"its {name} is a {type(parameter).__name__}")
    for name, child in module.named_children():
        if next(child.parameters(), None) is not None:
            raise Unproven(f"it has a {name} with parameters of its own")
    if not layouts:
        shapes = ", ".join(f"{name} {tuple(p.shape)}" for name, p in module._parameters.items() if p is not None)
        raise Unproven(f"its parameters are not those of two projections for each expert: {shapes}")


def _formulas(module: nn.Module, layout: Experts) -> Iterator[Experts]:
    if not layout.gated:
        yield from (replace(layout, activation=name) for name in ACTIVATIONS)
        return
    limits, alphas = _settings(module, "limit"), _settings(module, "alpha")
    for formula in (layout, replace(layout, interleaved=True)):
        yield from (replace(formula, activation=name) for name in ACTIVATIONS if name != "relu2")
        yield from (replace(formula, limit=limit, alpha=alpha) for limit in limits for alpha in (None, *alphas))


def _settings(module: nn.Module, name: str) -> list[float]:
    """The numbers among a module's attributes whose names contain `name`."""
    numbers = (float(v) for k, v in vars(module).items() if name in k and type(v) in (int, float))
    return list(dict.fromkeys(v for v in numbers if 0 < v < float("inf")))


class _EagerConfig:
    """A config for which transformers' wrapper around a forward calls the wrapped forward."""

    _experts_implementation = "eager"

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _Probe:
    """A module with small parameters of a layout, and inputs for it."""

    def __init__(self, module: nn.Module, layout: Experts, generator: torch.Generator) -> None:
        self.experts = len(module._parameters[layout.up])
        names = (layout.up, layout.down)
        sizes = ((INTERMEDIATE * (2 if layout.gated else 1), HIDDEN), (HIDDEN, INTERMEDIATE))
        weights = [torch.randn(self.experts, *size, generator=generator) for size in sizes]
        biases = [torch.randn(self.experts, size[0], generator=generator) for size in sizes if layout.bias]
        self.parameters = (*weights, *biases)
        self.hidden_states = torch.randn(9, HIDDEN, generator=generator)
        self.top_k_weights = torch.randn(9, 3, generator=generator)
        self.top_k_index = torch.randint(self.experts, (9, 3), generator=generator)
        self.top_k_index[0, 0], self.top_k_index[1, 1] = 0, self.experts - 1
        stored = [weight.mT.contiguous() if layout.transposed else weight for weight in weights]
        small = dict(zip((*names, *(f"{name}_bias" for name in names)), (*stored, *biases), strict=False))
        self.module = clone(module, {**module._parameters, **small}, module._modules)
        if hasattr(module, "config"):
            vars(self.module)["config"] = _EagerConfig(module.config)

    def off(self, formula: Experts) -> float:
        """The difference of the module from a formula."""
        return max(
            difference(run(self.module, *inputs), reference(formula, *inputs, *self.parameters))
            for inputs in ((self.hidden_states * scale, self.top_k_index, self.top_k_weights) for scale in SCALES)
        )

    def require_other_ids_ignored(self, formula: Experts) -> None:
        """Raise `Unproven` if the id that stands for experts of other ranks adds to the result."""
        self.top_k_index[::2, 2] = self.experts
        off = 0.0
        with suppress(Unproven):  # it isn't accepted
            off = self.off(formula)
        if off >= SAME:
            raise Unproven(f"of {self.experts} experts it takes the id {self.experts} for one that counts")


def forward_of(experts: Experts, kernel: Callable[..., Tensor]) -> Callable[..., Any]:
    """A forward that calls a kernel.

    The kernel is called with hidden states (tokens, hidden), the ids of each token's experts (tokens, k), their weights
    (tokens, k), and the parameters (experts, 2 * intermediate or intermediate, hidden) and (experts, hidden, intermediate):
    views, where they are held the other way. Its keywords are the biases ``up_bias`` and ``down_bias``, where there are any,
    and `Experts.options`. It skips ids that are no expert's. There is at least one token; hidden states and parameters have
    one dtype, and the weights may have another.
    """
    names, transposed, options = experts.arguments, experts.transposed, experts.options
    parameters = {"up": experts.up, "down": experts.down}
    if experts.bias:
        parameters |= {f"{key}_bias": f"{name}_bias" for key, name in parameters.items()}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        hidden_states, top_k_index, top_k_weights = (*args, *(kwargs[name] for name in names[len(args) :]))
        if top_k_weights.shape != top_k_index.shape:
            raise ValueError(f"there are {tuple(top_k_weights.shape)} weights for {tuple(top_k_index.shape)} experts")
        if hidden_states.shape[0] == 0:
            return torch.zeros_like(hidden_states)
        tensors = {"x": hidden_states, **{key: getattr(self, name) for key, name in parameters.items()}}
        tensors = _as_autocast(tensors)
        x, wide, narrow = tensors.pop("x"), tensors.pop("up"), tensors.pop("down")
        if transposed:
            wide, narrow = wide.mT, narrow.mT
        return kernel(x, top_k_index, top_k_weights, wide, narrow, **tensors, **options).to(hidden_states.dtype)

    return forward


def _as_autocast(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in autocast's dtype where autocast is on; else unchanged, and refused if their dtypes differ."""
    kind = tensors["x"].device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return {name: value.to(dtype) for name, value in tensors.items()}
    if len({value.dtype for value in tensors.values()}) > 1:
        dtypes = ", ".join(f"{name} {value.dtype}" for name, value in tensors.items())
        raise TypeError(f"hidden states and parameters must be of one dtype, not {dtypes}")
    return tensors


RECOGNISER = ModuleRecogniser(_is_candidate, prove, forward_of, _is_named_experts, _unlike_because)
