"""What is to be seen to before a library's kernel writes into tensors that it was given, or that it has saved."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

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
        if counts and _learning.get() and not sys.gettrace():  # which has references of its own
            self._known.add(counts)
        return counts in self._known


def is_learning() -> bool:
    return _learning.get()


@contextmanager
def learning() -> Iterator[None]:
    """Within it, in this thread, tensors that are asked about are alone. They aren't of inference mode."""
    token = _learning.set(True)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        _learning.reset(token)


def _references(x: Tensor) -> tuple[int, ...]:
    try:
        base = x._base
        of_base = () if base is None else (sys.getrefcount(base), base._use_count())
        storage = x.untyped_storage()  # one object for all that ask
        memory = (torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage))
        return (sys.getrefcount(x), x._use_count(), *memory, *of_base)
    except (AttributeError, RuntimeError):  # another torch, or a tensor without memory
        return ()


def own_gradients(function: Any, copy: Callable[[Tensor], Tensor] = torch.clone) -> type[Function]:
    """The function, whose backward writes into its gradients: into those that nobody else has, and copies of the others."""
    alone = Alone()
    with learning():
        out = _with_own_gradients(_Views, alone, copy).apply(_fresh())
        guard_backward(out, "")
        out.sin().sum().backward()
    return _with_own_gradients(function, alone, copy)


def _with_own_gradients(function: Any, alone: Alone, copy: Callable[[Tensor], Tensor]) -> type[Function]:
    class Own(function):  # type: ignore[misc]
        # Asked here, and not in a hook before: hooks that come later may keep what they get.
        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            own = tuple(x if x is None or alone(x) else copy(x) for x in gradients)
            return function.backward(ctx, *own)

    return Own


def own_saved(function: Any, copy: Callable[[Tensor], Tensor] = torch.clone) -> type[Function]:
    """The function, whose backward writes into views that its forward has saved: into those that nobody else has, and copies of
    the others.
    """
    alone = {None: Alone(), _CHECKPOINT: Alone()}
    with learning():
        views = _with_own_saved(_Views, alone, copy)
        views.apply(_fresh()).sum().backward()
        checkpoint(
            lambda x: views.apply(x.neg()), _fresh(), use_reentrant=False, preserve_rng_state=False
        ).sum().backward()
    return _with_own_saved(function, alone, copy)


def _with_own_saved(function: Any, alone: Mapping[Any, Alone], copy: Callable[[Tensor], Tensor]) -> type[Function]:
    class Own(function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            ctx.alone = alone.get(saving_by())
            return function.forward(ctx, *args)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if torch.compiler.is_compiling():  # by compiled autograd, which follows no context but its own
                ctx.saved_tensors = tuple(copy(x) for x in ctx.saved_tensors)
                return function.backward(ctx, *gradients)
            saved = tuple(x if ctx.alone is not None and ctx.alone(x) else copy(x) for x in ctx.saved_tensors)
            return function.backward(_Context(ctx, saved), *gradients)

    return Own


def _fresh() -> Tensor:
    """A tensor that nobody else has. On the CPU, whose backward is in the thread that learns."""
    return torch.ones(1, 1, 2, device="cpu", requires_grad=True).neg()


class _Context:
    """A context that has other tensors saved."""

    def __init__(self, ctx: Any, saved: tuple[Tensor, ...]) -> None:
        self._ctx, self.saved_tensors = ctx, saved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Views(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.view(-1, x.shape[-1]))
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


_CHECKPOINT = ("torch.utils.checkpoint", "_checkpoint_hook.__init__.<locals>.pack_hook")


def saving_by() -> tuple[str, str] | None:
    """Who is asked now for what a function saves; None is autograd itself."""
    try:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return None if hooks is None else (hooks[0].__module__, hooks[0].__qualname__)
    except AttributeError:  # another torch, or a hook that is no function
        return ("", "")


class _OwnGradient(Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clone()


def with_own_gradient(x: Tensor) -> Tensor:
    """The tensor, whose gradient is a copy. For torch.compile, which takes away what nobody sees."""
    own: Tensor = _OwnGradient.apply(x)
    return own


def guard_backward(out: Any, what: str, *, once: bool = False) -> None:
    """Make the backward of a library's function refuse what it would get wrong silently.

    Args:
        out: what the function gave.
        what: the field and its value, for the error.
        once: it changes what it has saved, so that a second backward is wrong.
    """
    if torch.compiler.is_compiling():
        return
    node = out.grad_fn
    if node is None:
        return
    done = False

    def before(gradients: tuple[Any, ...]) -> None:
        nonlocal done
        if torch.is_grad_enabled():
            raise RuntimeError(f"{what} has no second derivative (create_graph=True)")
        if done:
            raise RuntimeError(f"{what} changes what it has saved in its backward, which can't run a second time")
        done = once

    node.register_prehook(before)


def untraced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that torch.compile calls and doesn't look into; with ``fullgraph=True`` it says that it can't.

    Traced by torch 2.11, liger-kernel 0.8's fused cross-entropy gives right gradients and another loss each time. So is
    all of a library kept out that no test has shown to be right inside.
    """
    wrapped: Callable[..., Any] = torch.compiler.disable(kernel)
    return wrapped


__all__ = [
    "Alone",
    "guard_backward",
    "is_learning",
    "learning",
    "own_gradients",
    "own_saved",
    "saving_by",
    "untraced",
    "with_own_gradient",
]
