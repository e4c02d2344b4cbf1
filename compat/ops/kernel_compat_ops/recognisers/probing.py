"""Running modules and functions on a few random inputs, on the CPU, to compare them with formulas."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

#: Up to this relative difference, float32 results are those of the same formula, with another order of additions.
SAME = 1e-5

#: The share of values in bfloat16 that must equal those of a formula with the same roundings to the bit. Other roundings
#: give 60% to 80%; the same ones all but the few values that another order of additions rounds to the other side.
ALIKE = 0.98

F = TypeVar("F")


class Unproven(Exception):
    """A module doesn't compute a kernel's formula, or can't be shown to. The message says how it differs."""


class _NoCollectives(TorchDispatchMode):  # type: ignore[misc]
    """Raises `Unproven` where code is about to wait for other ranks, before it does."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if re.search("c10d|^_dtensor$|^symm_mem$", getattr(function, "namespace", "")):
            raise Unproven(f"it waits for other ranks ({function})")
        return function(*args, **(kwargs or {}))


def ranks() -> int:
    """The number of ranks of this job, so far as torch.distributed knows them."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


@contextmanager
def quiet() -> Iterator[torch.Generator]:
    """A context without gradients or autocast, with the CPU and float32 for new tensors; yields a generator of its own.

    The global random state, which dropout draws from, is restored. On one of several ranks a collective raises `Unproven`.
    """
    generator = torch.Generator(device="cpu")
    generator.manual_seed(20261115)
    dtype = torch.get_default_dtype()
    with (
        torch.no_grad(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=()),
        _NoCollectives() if ranks() > 1 else nullcontext(),
    ):
        torch.set_default_dtype(torch.float32)
        try:
            yield generator
        finally:
            torch.set_default_dtype(dtype)


def clone(
    module: nn.Module,
    parameters: Mapping[str, Tensor | None],
    children: Mapping[str, Any] | None = None,
    training: bool = True,
) -> nn.Module:
    """A copy of a module with other parameters and children; the module and everything in it stay as they are.

    In training mode by default, where dropout shows. Buffers with values are copied to the CPU; hooks are left out.
    """
    # Not by copy.copy: the class that FSDP2 gives a module makes one of the class it was of.
    other: nn.Module = object.__new__(type(module))
    buffers = {
        name: value if value is None or value.is_meta else value.detach().cpu()
        for name, value in module._buffers.items()
    }
    own = {name: p if p is None else nn.Parameter(p, requires_grad=False) for name, p in parameters.items()}
    vars(other).update(vars(module))
    vars(other).update(_parameters=own, _modules=dict(children or {}), _buffers=buffers, training=training)
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        vars(other)[hooks] = type(vars(module)[hooks])()
    return other


def parameters_of(function: Any) -> tuple[str, ...]:
    """The names of a function's parameters, with a ``*`` before those not taken by position; empty without a signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name if p.kind in positional else f"*{p.name}" for p in parameters)


def arguments(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of a class's forward, as `parameters_of`."""
    return parameters_of(type(module).forward)[1:]


def takes_one(module: nn.Module) -> bool:
    """Whether a class's forward has one parameter, which is taken by position."""
    names = arguments(module)
    return len(names) == 1 and not names[0].startswith("*")


def call(function: Callable[..., Any], *inputs: Any) -> Any:
    """The result for copies of the inputs; raises `Unproven` if the function fails."""
    try:
        return function(*(value.clone() if isinstance(value, Tensor) else value for value in inputs))
    except Unproven:
        raise
    except Exception as error:  # the code of any model
        raise Unproven(f"it failed on a probe ({type(error).__name__}: {error})") from error


def run(module: nn.Module, *inputs: Any) -> Any:
    """The result of the class's forward, without hooks and without a forward of the instance; raises as `call`."""
    return call(type(module).forward, module, *inputs)


def difference(result: Any, expected: Tensor, by_row: bool = False) -> float:
    """The largest difference, relative to the largest value that is expected, or of its row; infinite where shapes differ."""
    if not isinstance(result, Tensor) or result.shape != expected.shape or result.is_meta:
        return float("inf")
    result, expected = result.double(), expected.double()
    scale = expected.abs().amax(-1, keepdim=True) if by_row else expected.abs().max()
    value = float(((result - expected).abs() / scale.clamp_min(1e-300)).max())
    return float("inf") if value != value else value


def closest(formulas: Iterable[tuple[F, Callable[[], float]]], description: str) -> F:
    """The first formula whose difference is within rounding.

    Args:
        formulas: each with a function that computes the difference from it.

    Raises:
        Unproven: no formula is close enough. If every function raises `Unproven`, the error of the first.
    """
    least, failure = float("inf"), None
    for formula, measure in formulas:
        try:
            off = measure()
        except Unproven as error:
            failure = failure or error
            continue
        if off < SAME:
            return formula
        least = min(least, off)
    if failure is not None and least == float("inf"):
        raise failure
    raise Unproven(f"it differs from {description} by {least:.1e} or more (float32, relative)")


def rounded_as(result: Any, expected: Mapping[F, Tensor]) -> F:
    """The key of the expected values that a result in bfloat16 equals to the bit, but for a few; raises `Unproven` for none."""
    best = 0.0
    for key, values in expected.items():
        if isinstance(result, Tensor) and (result.dtype, result.shape) == (values.dtype, values.shape):
            alike = float((result == values).float().mean())
            if alike >= ALIKE:
                return key
            best = max(best, alike)
    raise Unproven(f"in bfloat16 it rounds as no formula does: at best {best:.0%} of the values come out the same")


#: The attributes of every module.
_OF_MODULES = frozenset(vars(nn.Module()))


def kind(module: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for modules of the same class, shapes and settings, whose children are alike too.

    A value that isn't plain (a function, a tensor, an object) equals itself alone.
    """
    simple = (bool, int, float, str, type(None))
    own = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
    settings = tuple((name, value if isinstance(value, simple) else id(value)) for name, value in own.items())
    shapes = tuple((name, None if p is None else tuple(p.shape)) for name, p in module._parameters.items())
    buffers = tuple((name, id(value)) for name, value in module._buffers.items())
    children = tuple((name, child and kind(child)) for name, child in module._modules.items())
    return (type(module), shapes, settings, buffers, children)
