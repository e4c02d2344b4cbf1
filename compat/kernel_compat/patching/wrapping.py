"""A function of ours around the forward of built modules, and the way back.

The wrapped forward is an attribute of the instance. Other projects may wrap it again, or may have wrapped the forward before; both wrappers stay.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeAlias

from .handle import Handle
from .swap import ABSENT, swap

if TYPE_CHECKING:
    from torch import nn

__all__ = ["assert_same_signature", "forwards_of", "functions_beneath", "wrap"]

#: Called as ``around(inner, args, kwargs)``; returns the result of the forward. Must be picklable.
Around: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

#: The attribute of a module that lists its `_Forward`s. More than one if other code's forward is between two of ours.
STATE = "_kernel_compat_wrapped"

_lock = threading.RLock()


def wrap(modules: Sequence[nn.Module], around: Around) -> Handle:
    """Call `around` in place of the forward of each module, with the forward that it replaces.

    Several calls don't nest: for each module the latest one that is not undone decides. All or nothing.

    Returns:
        The handle that undoes this call, in any order with those of other calls. A forward that other code has put over
        ours stays, and `around` has no effect in it any more.

    Raises:
        TypeError: the forward of a module has no signature, or is a static method.
    """
    with _lock:
        for module in modules:
            assert_same_signature(module.forward, _Forward(module, vars(module).get("forward"), []))
        try:
            for module in modules:
                _place(module, around)
        except BaseException:
            _take_back(modules, around)
            raise
    return Handle(lambda: _take_back(modules, around))


def assert_same_signature(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Check that one callable can stand in for another: the same parameters by name, kind, order and default.

    Annotations may differ: nothing is called differently for them.

    Raises:
        TypeError: they differ, which the message shows, or one has no signature.
    """
    expected, provided = _signature(original), _signature(replacement)
    ours, other = (
        [(p.name, p.kind, type(p.default), p.default) for p in signature.parameters.values()]
        for signature in (expected, provided)
    )
    try:
        same = ours == other
    except Exception:  # a default may be anything: == of two tensors is no truth value
        same = False
    if not same:
        raise TypeError(f"the original takes {expected}, its replacement {provided}")


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{function!r} has no signature: {error}") from error


def functions_beneath(forward: Any) -> Iterator[Any]:
    """The function of a method, the function that it wraps, and so on; nothing for None."""
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        yield function
        forward = getattr(function, "__wrapped__", None)


class _Forward:
    """Our forward on one module. It is an attribute of the instance, so that it is copied and pickled with it.

    Attributes:
        module: the module.
        inner: the forward of the instance that it replaced; None for the forward of the class at the time of the call, since FSDP
            swaps the class of a module and transformers' checkpointing looks up whether it was called through that class.
        arounds: the functions of the calls of `wrap` that are not undone, the latest last. All forwards of a module share it.
    """

    __name__ = "forward"  # copied by code that wraps this one
    inner: Callable[..., Any] | None = None

    def __init__(self, module: nn.Module, inner: Callable[..., Any] | None, arounds: list[Around]) -> None:
        self.module = module
        self.arounds = arounds
        if inner is not None:
            self.inner = inner

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward beneath; this one is called with its signature."""
        return MethodType(type(self.module).forward, self.module) if self.inner is None else self.inner

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        inner = self.inner
        if inner is None:  # not `__wrapped__`: torch.compile knows no MethodType
            inner, args = type(self.module).forward, (self.module, *args)
        return self.arounds[-1](inner, args, kwargs) if self.arounds else inner(*args, **kwargs)


def forwards_of(module: nn.Module) -> list[_Forward]:
    """The forwards that `wrap` has put on a module. A shallow copy has the original's, which are not its own."""
    return [forward for forward in vars(module).get(STATE, ()) if forward.module is module]


def _place(module: nn.Module, around: Around) -> None:
    forwards, present = forwards_of(module), vars(module).get("forward")
    arounds = forwards[0].arounds if forwards else []
    if present not in forwards:
        forwards.append(_Forward(module, present, arounds))
        swap([(vars(module), "forward", forwards[-1]), (vars(module), STATE, forwards)])
    arounds.append(around)


def _take_back(modules: Sequence[nn.Module], around: Around) -> bool:
    """Undo a call of `wrap`. Returns whether other code's forward is over one of ours."""
    left = False
    with _lock:
        for module in modules:
            forwards = forwards_of(module)
            arounds = forwards[0].arounds if forwards else []
            arounds[:] = [other for other in arounds if other is not around]
            while not arounds and (present := vars(module).get("forward")) in forwards:
                swap([(vars(module), "forward", ABSENT if present.inner is None else present.inner)])
                del forwards[forwards.index(present) :]
            if not arounds:
                swap([(vars(module), STATE, forwards or ABSENT)])
                left |= bool(forwards)
    return left
