"""A function of ours around the forward of built modules, and the way back.

The wrapped forward is an attribute of the instance. Other projects may put theirs over it, or under it before; both stay.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from .handle import Handle
from .swap import ABSENT, swap

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Beneath", "assert_same_signature", "wrap"]

#: Called as ``around(inner, args, kwargs)``; returns the result of the forward. Must be picklable.
Around: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

#: The attribute of a module that holds its `_Wrapped`.
STATE = "_kernel_compat_wrapped"

_lock = threading.RLock()
_numbers = itertools.count()


def wrap(modules: Sequence[nn.Module], around: Around) -> Handle:
    """Call `around` in place of the forward of each module, with the forward that it replaces.

    Several calls don't nest: for each module the latest one that is not undone decides. All or nothing.

    Returns:
        The handle that undoes this call, in any order with those of other calls. A forward that other code has put over
        ours stays, and `around` has no effect in it any more.

    Raises:
        TypeError: the forward of a module has no signature.
    """
    with _lock:
        layers = [_layer_over(module) for module in modules]
        number = next(_numbers)
        try:
            for module, layer in zip(modules, layers, strict=True):
                _place(module, layer, number, around)
        except BaseException:
            _take_back(modules, number)
            raise
    return Handle(lambda: _take_back(modules, number))


def assert_same_signature(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Check that one callable can stand in for another: the same parameters by name, kind, order and default.

    Annotations may differ: nothing is called differently for them.

    Raises:
        TypeError: they differ, which the message shows, or one has no signature.
    """
    taken, found = _signature(original), _signature(replacement)
    pairs = itertools.zip_longest(taken.parameters.values(), found.parameters.values())
    if not all(one and other and _same_parameter(one, other) for one, other in pairs):
        raise TypeError(f"the original takes {taken}, its replacement {found}")


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{function!r} has no signature: {error}") from error


def _same_parameter(one: inspect.Parameter, other: inspect.Parameter) -> bool:
    if (one.name, one.kind) != (other.name, other.kind):
        return False
    if one.default is other.default:
        return True
    try:
        return type(one.default) is type(other.default) and bool(one.default == other.default)
    except Exception:  # a default may be anything: == of two tensors is no truth value
        return False


@dataclass(frozen=True)
class Layer:
    """The forward beneath one of ours.

    Attributes:
        inner: the function that ours calls. None: the class's forward of the moment, since FSDP swaps the class of a
            module and transformers' checkpointing looks up whether it was called through that class.
        in_instance: whether `inner` was an attribute of the instance, to be put back.
    """

    inner: Callable[..., Any] | None
    in_instance: bool


class _Wrapped:
    """Our forwards on one module, and the calls of `wrap` that are not undone on it.

    In the module's __dict__, so that it is copied with the module and the copy is independent.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        #: By the number of the call of `wrap`, the latest last.
        self.calls: dict[int, Around] = {}
        #: More than one if other code's forward is between two of ours.
        self.layers: list[Layer] = []
        self.around: Around | None = None

    def settle(self) -> None:
        self.around = next(reversed(self.calls.values()), None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.module, self.calls, self.layers)


def _unpickle(module: nn.Module, calls: dict[int, Around], layers: list[Layer]) -> _Wrapped:
    """The state of a module that is being unpickled or deep-copied, and its forward.

    A method is pickled as the look-up of its name. The state comes before the forward in the module's __dict__, so
    that the look-up finds the forward placed here, not the class's.
    """
    state = _Wrapped(module)
    state.calls.update(calls)
    state.layers.extend(layers)
    state.settle()
    vars(module)["forward"] = _method(module, layers[-1], len(layers) - 1)
    return state


def _layer_over(module: nn.Module) -> Layer:
    """The layer of a new forward of ours, having checked that it would take the same arguments."""
    present = vars(module).get("forward")
    if present is not None:
        layer = Layer(present, in_instance=True)
    elif isinstance(inspect.getattr_static(module, "forward"), types.FunctionType):
        layer = Layer(None, in_instance=False)
    else:  # a static method or the like
        layer = Layer(module.forward, in_instance=False)
    assert_same_signature(module.forward, _method(module, layer, 0))
    return layer


def _method(module: nn.Module, layer: Layer, index: int) -> types.MethodType:
    """Our forward, bound: a deep copy of a method belongs to the copied module, one of a closure to the original."""
    forward = _function(index)
    original = layer.inner or type(module).forward
    # Without its attributes: torch.compile leaves some on functions, which say what to call in their place.
    functools.update_wrapper(forward, original, updated=())
    forward.__name__ = "forward"  # by which it is pickled
    if layer.inner is not None:
        # It is bound already, which __wrapped__ would hide; and copies share this function, which must not hold it.
        del forward.__wrapped__  # type: ignore[attr-defined]
        signature, this = _signature(original), inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
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
    if state is None or index >= len(state.layers):  # other code kept the method from before it was taken back
        return module.forward(*args, **kwargs)
    inner, around = state.layers[index].inner, state.around
    if inner is None:
        inner, args = type(module).forward, (module, *args)
    if around is None:
        return inner(*args, **kwargs)
    return around(inner, args, kwargs)


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


def _place(module: nn.Module, layer: Layer, number: int, around: Around) -> None:
    attributes = vars(module)
    state = _state_of(module) or _Wrapped(module)
    if _index_in_place(module) is None:
        method = _method(module, layer, len(state.layers))
        state.layers.append(layer)
        # The state comes before the forward, as _unpickle needs it.
        swap([(attributes, "forward", ABSENT), (attributes, STATE, state), (attributes, "forward", method)])
    state.calls[number] = around
    state.settle()


def _take_back(modules: Sequence[nn.Module], number: int) -> None:
    with _lock:
        for module in modules:
            state = _state_of(module)
            if state is None or state.calls.pop(number, None) is None:
                continue
            state.settle()
            while not state.calls and (index := _index_in_place(module)) is not None:
                layer = state.layers[index]
                del state.layers[index:]
                swap([(vars(module), "forward", layer.inner if layer.in_instance else ABSENT)])
            if not state.layers:
                swap([(vars(module), STATE, ABSENT)])


class Beneath(dict[str, Any]):
    """The forwards beneath ours on one module, by number, for `swap`: entries of the instance; the class's are absent."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @property
    def names(self) -> list[str]:
        """The number of each forward of ours."""
        state = _state_of(self.module)
        return [] if state is None else [str(index) for index in range(len(state.layers))]

    @property
    def top(self) -> str | None:
        """The number of the forward of ours that is in place; None where none is."""
        return str(_index_in_place(self.module)) if self.names and _index_in_place(self.module) is not None else None

    def get(self, name: str, default: Any = None) -> Any:
        """The forward of the instance beneath one of ours."""
        layer = vars(self.module)[STATE].layers[int(name)] if name in self.names else None
        return layer.inner if layer is not None and layer.in_instance else default

    def __setitem__(self, name: str, forward: Any) -> None:
        self._lay(int(name), Layer(forward, in_instance=True))

    def pop(self, name: str, default: Any = None) -> None:
        """Have one of ours be over the class's forward."""
        self._lay(int(name), Layer(None, in_instance=False))

    def _lay(self, index: int, layer: Layer) -> None:
        with _lock:
            vars(self.module)[STATE].layers[index] = layer
            if _index_in_place(self.module) == index:
                swap([(vars(self.module), "forward", _method(self.module, layer, index))])
