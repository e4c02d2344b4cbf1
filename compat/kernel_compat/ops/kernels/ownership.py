"""What is to be seen to before a library's kernel writes into tensors that it was given, or that it has saved."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_learning: ContextVar[bool] = ContextVar("_learning", default=False)


class Alone:
    """Tells whether a tensor's memory is seen by nobody but the call that it was passed to.

    It counts Python's, autograd's and the memory's references, and compares with what it has counted in the same place of
    the same call for tensors that nobody else had: how many those are differs between releases of Python and torch. What it
    doesn't know it takes for shared.
    """

    def __init__(self) -> None:
        self._known: set[tuple[int, ...]] = set()

    def __call__(self, x: Tensor) -> bool:
        if type(x) is not Tensor or torch.compiler.is_compiling():
            return False
        counts = _references(x)
        if _learning.get():
            self._known.add(counts)
        return counts in self._known


def is_learning() -> bool:
    return _learning.get()


@contextmanager
def learning() -> Iterator[None]:
    """Within it, in this thread, tensors that are asked about are alone."""
    token = _learning.set(True)
    try:
        yield
    finally:
        _learning.reset(token)


def _references(x: Tensor) -> tuple[int, ...]:
    try:
        base = x._base
        of_base = () if base is None else (sys.getrefcount(base), base._use_count())
        memory = torch._C._storage_Use_Count(x.untyped_storage()._cdata)
        return (sys.getrefcount(x), x._use_count(), memory, *of_base)
    except (AttributeError, RuntimeError):  # another torch, or a tensor without memory
        return (-id(x),)


class OwnGradients:
    """What a backward gets that writes into its gradients: those that nobody else has, and copies of the others."""

    def __init__(self, copy: Callable[[Tensor], Tensor] = torch.clone) -> None:
        self._copy = copy
        self._alone = Alone()
        with learning(), torch.enable_grad():
            out = torch.ones(1, 1, 1, 2, requires_grad=True).neg()
            guard_backward(out, "", prepare=self)
            out.sin().sum().backward()

    def __call__(self, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x if x is None or self._alone(x) else self._copy(x) for x in gradients)


def guard_backward(
    out: Any, what: str, *, once: bool = False, prepare: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None
) -> None:
    """Make the backward of a library's function refuse what it would get wrong silently.

    Args:
        out: what the function gave.
        what: the field and its value, for the error.
        once: it changes what it has saved, so that a second backward is wrong.
        prepare: what becomes of the gradients that come in.
    """
    node = out.grad_fn
    if node is None or torch.compiler.is_compiling():
        return
    done = False

    def before(gradients: tuple[Any, ...]) -> tuple[Any, ...] | None:
        nonlocal done
        if torch.is_grad_enabled():
            raise RuntimeError(f"{what} has no second derivative (create_graph=True)")
        if done:
            raise RuntimeError(f"{what} changes what it has saved in its backward, which can't run a second time")
        done = once
        return None if prepare is None else prepare(gradients)

    node.register_prehook(before)


def untraced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that torch.compile calls and doesn't look into; with ``fullgraph=True`` it says that it can't.

    Traced by torch 2.11, liger-kernel 0.8's fused cross-entropy gives right gradients and another loss each time. So is
    all of a library kept out that no test has shown to be right inside.
    """
    wrapped: Callable[..., Any] = torch.compiler.disable(kernel)
    return wrapped


__all__ = ["Alone", "OwnGradients", "guard_backward", "is_learning", "learning", "untraced"]
