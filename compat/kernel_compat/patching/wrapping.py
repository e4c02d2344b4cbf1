"""A function of ours around the forward of built modules, and the way back.

The wrapped forward is an attribute of the instance. Other projects may put theirs over it, or under it before; both stay.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from .handle import Handle
from .swap import ABSENT, swap

if TYPE_CHECKING:
    from torch import nn

__all__ = ["assert_same_signature", "covered", "put_beneath", "wrap"]

#: Called as ``around(inner, args, kwargs)``; returns the result of the forward. Must be picklable.
Around: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

#: A forward beneath ours that was an attribute of the instance. None: the class's forward of the moment, since FSDP swaps the
#: class of a module and transformers' checkpointing looks up whether it was called through that class.
Inner: TypeAlias = Callable[..., Any] | None

#: The attribute of a module that holds its `_Wrapped`.
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
            assert_same_signature(module.forward, _method(module, vars(module).get("forward"), 0))
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
    taken, found = _signature(original), _signature(replacement)
    one, other = (
        [(p.name, p.kind, type(p.default), p.default) for p in each.parameters.values()] for each in (taken, found)
    )
    try:
        same = one == other
    except Exception:  # a default may be anything: == of two tensors is no truth value
        same = False
    if not same:
        raise TypeError(f"the original takes {taken}, its replacement {found}")


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{function!r} has no signature: {error}") from error


class _Wrapped:
    """Our forwards on one module, and the calls of `wrap` that are not undone on it.

    In the module's __dict__, so that it is copied with the module and the copy is independent.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        #: The functions of `wrap`, the latest last.
        self.arounds: list[Around] = []
        #: More than one if other code's forward is between two of ours.
        self.inners: list[Inner] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.module, self.arounds, self.inners)


def _unpickle(module: nn.Module, arounds: list[Around], inners: list[Inner]) -> _Wrapped:
    """The state of a module that is being unpickled or deep-copied, and its forward.

    A method is pickled as the look-up of its name. The state comes before the forward in the module's __dict__, so
    that the look-up finds the forward placed here, not the class's.
    """
    state = _Wrapped(module)
    state.arounds.extend(arounds)
    state.inners.extend(inners)
    vars(module)["forward"] = _method(module, inners[-1], len(inners) - 1)
    return state


def _method(module: nn.Module, inner: Inner, index: int) -> types.MethodType:
    """Our forward, bound: a deep copy of a method belongs to the copied module, one of a closure to the original."""
    forward = _function(index)
    # Without its attributes: torch.compile leaves some on functions, which say what to call in their place.
    functools.update_wrapper(forward, inner or type(module).forward, updated=())
    forward.__name__ = "forward"  # by which it is pickled
    if inner is not None:
        # It is bound already, which __wrapped__ would hide; and copies share this function, which must not hold it.
        del forward.__wrapped__  # type: ignore[attr-defined]
        signature, this = _signature(inner), inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [this, *signature.parameters.values()]
        forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return types.MethodType(forward, module)


def _function(index: int) -> Callable[..., Any]:
    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return _run(self, index, args, kwargs)

    return forward


_CODE = _function(0).__code__


def _run(module: nn.Module, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    state = module.__dict__.get(STATE)
    if state is None or index >= len(state.inners):  # other code kept the method from before it was taken back
        return module.forward(*args, **kwargs)
    inner = state.inners[index]
    if inner is None:
        inner, args = type(module).forward, (module, *args)
    if not state.arounds:
        return inner(*args, **kwargs)
    return state.arounds[-1](inner, args, kwargs)


def _state_of(module: nn.Module) -> _Wrapped | None:
    state = vars(module).get(STATE)
    return state if state is not None and state.module is module else None  # a shallow copy has the original's


def _index_in_place(module: nn.Module) -> int | None:
    """Which of our forwards is in place; None: none of ours."""
    present = vars(module).get("forward")
    if not isinstance(present, types.MethodType) or present.__self__ is not module:
        return None
    if getattr(present.__func__, "__code__", None) != _CODE:
        return None
    return int(present.__func__.__closure__[0].cell_contents)  # type: ignore[index]


def _place(module: nn.Module, around: Around) -> None:
    attributes = vars(module)
    state = _state_of(module) or _Wrapped(module)
    if _index_in_place(module) is None:
        inner = attributes.get("forward")
        method = _method(module, inner, len(state.inners))
        state.inners.append(inner)
        # The state comes before the forward, as _unpickle needs it.
        swap([(attributes, "forward", ABSENT), (attributes, STATE, state), (attributes, "forward", method)])
    state.arounds.append(around)


def _take_back(modules: Sequence[nn.Module], around: Around) -> bool:
    """Undo a call of `wrap`. Returns whether other code's forward is over one of ours."""
    left = False
    with _lock:
        for module in modules:
            state = _state_of(module)
            if state is None:
                continue
            state.arounds = [other for other in state.arounds if other is not around]
            while not state.arounds and (index := _index_in_place(module)) is not None:
                inner = state.inners[index]
                del state.inners[index:]
                swap([(vars(module), "forward", ABSENT if inner is None else inner)])
            if not state.inners:
                swap([(vars(module), STATE, ABSENT)])
            left |= bool(state.inners and not state.arounds)
    return left


def covered(module: nn.Module) -> Any:
    """The forward beneath ours: one of the instance, None for the class's, `ABSENT` where ours isn't in place."""
    state, index = _state_of(module), _index_in_place(module)
    return ABSENT if state is None or index is None else state.inners[index]


def put_beneath(module: nn.Module, old: Inner, new: Inner) -> bool:
    """Replace the forward `old` beneath one of ours by `new`; False where none of ours is over it. None: the class's."""
    with _lock:
        state = _state_of(module)
        inners = state.inners if state is not None else []
        if old not in inners:
            return False
        inners[inners.index(old)] = new
        return True
