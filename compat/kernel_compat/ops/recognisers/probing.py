"""Running a module on a few random inputs, on the CPU, to compare it with formulas."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

#: Up to this relative difference, float32 results are those of the same formula, with another order of additions.
SAME = 1e-5

#: How many of the values in bfloat16 must come out to the bit as those of a formula with the same roundings. Wrong ones
#: give 60 to 80 of 100; right ones all but those where an other way to the same float32 ends on another side.
ALIKE = 0.98


class Unproven(Exception):
    """A module doesn't compute a kernel's formula, or can't be shown to. The message says how it differs."""


@contextmanager
def quiet() -> Iterator[torch.Generator]:
    """No gradients, and the CPU and float32 for new tensors, whatever is in force outside; yields a generator of its own."""
    generator = torch.Generator(device="cpu")
    generator.manual_seed(20261115)
    dtype = torch.get_default_dtype()
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        torch.set_default_dtype(torch.float32)
        try:
            yield generator
        finally:
            torch.set_default_dtype(dtype)


def clone(
    module: nn.Module, parameters: Mapping[str, Tensor | None], children: Mapping[str, nn.Module], training: bool = True
) -> nn.Module:
    """A module like another, with other parameters and children; the other stays as it is, and so does everything in it.

    In training mode by default, where dropout shows; buffers that hold values are on the CPU.
    """
    # Not by copy.copy: the class that FSDP2 gives a module makes one of the class it was of.
    other: nn.Module = object.__new__(type(module))
    buffers = {
        name: value if value is None or value.is_meta else value.detach().cpu()
        for name, value in module._buffers.items()
    }
    vars(other).update(vars(module))
    vars(other).update(_parameters=dict(parameters), _modules=dict(children), _buffers=buffers, training=training)
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        vars(other)[hooks] = type(vars(module)[hooks])()
    return other


def takes_one(module: nn.Module) -> bool:
    """Whether the class's forward has one parameter, and no more."""
    try:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return False
    return len(parameters) == 1 and parameters[0].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )


def run(module: nn.Module, *inputs: Any) -> Any:
    """The result of the class's forward, without hooks and without a forward of the instance.

    Raises:
        Unproven: it failed.
    """
    try:
        return type(module).forward(module, *inputs)
    except Exception as error:  # the code of any model
        raise Unproven(f"its forward failed on a probe ({type(error).__name__}: {error})") from error


def difference(found: Any, expected: Tensor) -> float:
    """The largest difference, relative to the largest value that is expected; infinite where the shapes differ."""
    if not isinstance(found, Tensor) or found.shape != expected.shape or found.is_meta:
        return float("inf")
    found, expected = found.double(), expected.double()
    scale = expected.abs().max().clamp_min(1e-300)
    value = float(((found - expected).abs().max() / scale).item())
    return float("inf") if value != value else value


#: The attributes of every module.
_OF_MODULES = frozenset(vars(nn.Module()))


def kind(module: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for modules of the same class, shapes and settings, whose children are alike too.

    A value that isn't plain (a function, a tensor, an object) equals itself alone.
    """
    shapes = tuple((name, None if p is None else tuple(p.shape)) for name, p in module._parameters.items())
    simple = (bool, int, float, str, type(None))
    settings = tuple(
        (k, v if isinstance(v, simple) else id(v)) for k, v in vars(module).items() if k not in _OF_MODULES
    )
    buffers = tuple((name, id(value)) for name, value in module._buffers.items())
    children = tuple((name, child and kind(child)) for name, child in module._modules.items())
    return (type(module), shapes, settings, buffers, children)
