"""torch's choice among the backends of scaled dot product attention, made for one model."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import itertools
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ..patching.handle import Handle

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.attention import SDPBackend

    Backends: TypeAlias = tuple[SDPBackend, ...]

__all__ = ["assert_same_signature", "use_sdpa_backends"]

_DEFAULT = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def use_sdpa_backends(
    module: nn.Module, backends: SDPBackend | str | Sequence[SDPBackend | str] | None = None
) -> Handle:
    """Run the forward of a module, and of the modules in it, under ``torch.nn.attention.sdpa_kernel``.

    The modules in it are included because activation checkpointing calls them again in the backward pass, outside of
    the outer forward: the recomputation sees the same backends. Several calls don't nest: for each module the latest
    one that is not undone decides. In a compiled forward the backends are part of the graph.

    torch has one choice for the whole process. It is ours while a forward runs, for other threads too, and what it
    was before and after.

    Deep copies and pickled ones keep the backends for good. Shallow ones, the replicas of ``nn.DataParallel`` included,
    run the original's forward, as with every forward that is an attribute of the instance.

    Not covered: what a forward leaves to run later, such as a generator; the recomputation of a checkpointed function
    that calls SDPA itself (give `checkpoint` a `context_fn`) and of modules added later; what a forward calls that was
    compiled on its own before, as the rest of a forward is after a graph break.

    Args:
        module: its `forward`, and those of the modules in it, become attributes of the instances, with the same
            signatures.
        backends: the ones allowed, the preferred one first: members of ``torch.nn.attention.SDPBackend`` or their
            names in any case. None: cuDNN, flash, efficient, math.

    Returns:
        The handle that undoes this call, in any order with those of other calls. A forward that somebody else put over
        ours stays, and ours has no effect in it any more.

    Raises:
        TypeError: `module` is no module, or `backends` has another type.
        ValueError: `backends` is empty, or one is unknown.
        RuntimeError: by a forward, while a forward in another thread runs with other backends.
    """
    from torch import nn

    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {module!r}")
    names = [backend.name for backend in _as_backends(backends)]
    with _patching:
        parts = [part for part in module.modules() if _has_forward(part) and (part is module or _may_attend(part))]
        layers = [_layer_over(part) for part in parts]
        number = next(_numbers)
        try:
            for part, layer in zip(parts, layers, strict=True):
                _place(part, layer, number, names)
        except BaseException:
            _take_back(parts, number)
            raise
    return Handle(lambda: _take_back(parts, number))


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


def _as_backends(value: object) -> Backends:
    from torch.nn.attention import SDPBackend

    members: Mapping[str, SDPBackend] = {
        name: member for name, member in SDPBackend.__members__.items() if name != "ERROR"
    }
    given = _DEFAULT if value is None else (value,) if isinstance(value, (str, SDPBackend)) else value
    if not isinstance(given, Sequence) or isinstance(given, (bytes, bytearray)):
        raise TypeError(f"backends must be an SDPBackend, a name, a sequence of them or None, not {value!r}")
    if not given:
        raise ValueError(f"backends must not be empty; there are {', '.join(members)}")
    chosen = []
    for backend in given:
        if not isinstance(backend, (str, SDPBackend)):
            raise TypeError(f"a backend must be an SDPBackend or its name, not {backend!r}")
        member = members.get((backend if isinstance(backend, str) else backend.name).upper())
        if member is None:
            raise ValueError(f"{backend!r} is no SDPA backend; there are {', '.join(members)}")
        chosen.append(member)
    return tuple(dict.fromkeys(chosen))


# Placing and taking back. What a replaced forward has to know is in its module's __dict__, so that it is copied with
# the module and the copy is on its own.

_STATE = "_kernel_compat_sdpa"

_patching = threading.RLock()
_numbers = itertools.count()


@dataclass(frozen=True)
class _Layer:
    """What one of our forwards is over.

    Attributes:
        inner: what it calls. None: the class's forward of the moment, since FSDP swaps the class of a module and
            transformers' checkpointing looks up whether it was called through that class.
        in_instance: whether `inner` was an attribute of the instance, to be put back.
    """

    inner: Callable[..., Any] | None
    in_instance: bool


class _State:
    """Our forwards on one module, and the calls that are live on it."""

    def __init__(self, module: nn.Module) -> None:
        import torch

        torch.compiler.assume_constant_result(_initialize_order)  # while tracing: call it, put nothing in the graph
        self.module = module
        #: The backends' names by the number of the call, the latest last. The members can't be pickled.
        self.calls: dict[int, list[str]] = {}
        #: More than one if somebody else's forward is between two of ours.
        self.layers: list[_Layer] = []
        self.backends: Backends | None = None

    def settle(self) -> None:
        latest = next(reversed(self.calls.values()), None)
        self.backends = None if latest is None else _as_backends(latest)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.module, self.calls, self.layers)


def _unpickle(module: nn.Module, calls: dict[int, list[str]], layers: list[_Layer]) -> _State:
    """The state of a module that is being unpickled or deep-copied, and its forward.

    A method is pickled as the look-up of its name. The state comes before the forward in the module's __dict__, so
    that the look-up finds the forward placed here, not the class's.
    """
    state = _State(module)
    state.calls.update(calls)
    state.layers.extend(layers)
    state.settle()
    vars(module)["forward"] = _method(module, layers[-1], len(layers) - 1)
    return state


def _has_forward(module: nn.Module) -> bool:
    """False for torch's lists and dicts of modules."""
    from torch import nn

    return "forward" in vars(module) or inspect.getattr_static(module, "forward") is not nn.Module.forward


def _may_attend(module: nn.Module) -> bool:
    """False for torch's own layers that consist of no others, such as Linear: none of them is an attention."""
    return not type(module).__module__.startswith("torch.nn.modules.") or any(True for _ in module.children())


def _layer_over(module: nn.Module) -> _Layer:
    """What a new forward of ours would be over, having checked that it would take the same arguments."""
    present = vars(module).get("forward")
    if present is not None:
        layer = _Layer(present, in_instance=True)
    elif isinstance(inspect.getattr_static(module, "forward"), types.FunctionType):
        layer = _Layer(None, in_instance=False)
    else:  # a static method or the like
        layer = _Layer(module.forward, in_instance=False)
    assert_same_signature(module.forward, _method(module, layer, 0))
    return layer


def _method(module: nn.Module, layer: _Layer, index: int) -> types.MethodType:
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


def _state_of(module: nn.Module) -> _State | None:
    state = vars(module).get(_STATE)
    return state if state is not None and state.module is module else None  # a shallow copy has the original's


def _index_in_place(module: nn.Module) -> int | None:
    """Which of our forwards is in place; None: none of ours."""
    present = vars(module).get("forward")
    if not isinstance(present, types.MethodType) or present.__self__ is not module:
        return None
    if getattr(present.__func__, "__code__", None) != _CODE:
        return None
    return int(present.__func__.__closure__[0].cell_contents)  # type: ignore[index]


def _place(module: nn.Module, layer: _Layer, number: int, names: list[str]) -> None:
    attributes = vars(module)
    state = _state_of(module) or _State(module)
    if _index_in_place(module) is None:
        method = _method(module, layer, len(state.layers))
        state.layers.append(layer)
        attributes.pop("forward", None)
        attributes[_STATE] = state  # before the forward, as _unpickle needs it
        attributes["forward"] = method
    state.calls[number] = names
    state.settle()


def _take_back(modules: Sequence[nn.Module], number: int) -> None:
    with _patching:
        for module in modules:
            state = _state_of(module)
            if state is None or state.calls.pop(number, None) is None:
                continue
            state.settle()
            while not state.calls and (index := _index_in_place(module)) is not None:
                layer = state.layers[index]
                del state.layers[index:]
                if layer.in_instance:
                    vars(module)["forward"] = layer.inner
                else:
                    del vars(module)["forward"]
            if not state.layers:
                del vars(module)[_STATE]


def put_beneath(module: nn.Module, old: object, new: Callable[..., Any] | None) -> bool:
    """Have the forward of ours that is over `old` be over `new`, None for the class's; False where none is.

    For other patches of this library, which find ours over theirs when they are undone.
    """
    with _patching:
        state = _state_of(module)
        for index, layer in enumerate(state.layers if state is not None else ()):
            if layer.in_instance and layer.inner == old:
                assert state is not None
                state.layers[index] = _Layer(new, in_instance=new is not None)
                if _index_in_place(module) == index:
                    vars(module)["forward"] = _method(module, state.layers[index], index)
                return True
    return False


def covered(module: nn.Module) -> _Layer | None:
    """What the forward of ours that is in place is over; None where none is. For other patches of this library."""
    state, index = _state_of(module), _index_in_place(module)
    return state.layers[index] if state is not None and index is not None else None


def slip_beneath(module: nn.Module, new: Callable[..., Any]) -> None:
    """Have the forward of ours that is in place be over `new`. The way back is `put_beneath`."""
    with _patching:
        state, index = _state_of(module), _index_in_place(module)
        assert state is not None
        assert index is not None
        state.layers[index] = _Layer(new, in_instance=True)
        vars(module)["forward"] = _method(module, state.layers[index], index)


# Running.


def _run(module: nn.Module, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch

    state = module.__dict__.get(_STATE)
    if state is None or index >= len(state.layers):  # somebody kept the method from before it was taken back
        return module.forward(*args, **kwargs)
    inner, backends = state.layers[index].inner, state.backends
    if inner is None:
        inner, args = type(module).forward, (module, *args)
    if backends is None:
        return inner(*args, **kwargs)
    if torch.compiler.is_compiling():
        _initialize_order()
        # A graph knows no threads; and to enter in it what is in force already costs nothing when it runs.
        with torch.nn.attention.sdpa_kernel(list(backends), set_priority=True):
            # torch 2.10 to 2.15 go on after a graph break in this `with` without the priority, and may leave it set in
            # the process. They can't go on in a `try`: this function then runs uncompiled, what it calls compiled.
            try:
                return inner(*args, **kwargs)
            finally:
                del inner
    if _here.backends == backends:
        return inner(*args, **kwargs)
    with _in_force(backends):
        return inner(*args, **kwargs)


class _Here(threading.local):
    """What the innermost forward of ours in this thread has put in force."""

    backends: Backends | None = None


_here = _Here()


@contextlib.contextmanager
def _in_force(backends: Backends) -> Iterator[None]:
    before = _here.backends
    _initialize_order()
    _process.enter(backends)
    try:
        _here.backends = backends
        with _sdpa_kernel(backends):
            yield
    finally:
        _here.backends = before
        _process.leave(backends)


@contextlib.contextmanager
def _sdpa_kernel(backends: Backends) -> Iterator[None]:
    """torch's, which puts the order back of those backends alone that were enabled."""
    import torch

    order = torch._C._get_sdp_priority_order()
    try:
        with torch.nn.attention.sdpa_kernel(list(backends), set_priority=True):
            yield
    finally:
        torch._C._set_sdp_priority_order(order)


def _initialize_order() -> bool:
    """Have torch set its own order for CUDA, once.

    It does so when it chooses a backend for the first time, in place of an order set before; and what was the order
    before that is then restored as if it were the process's. Answers something that a graph can hold as a constant.
    """
    import torch

    if not _process.order_is_initialized and torch.cuda.is_initialized():
        some = torch.empty(1, 1, 1, 8, device="cuda", dtype=torch.float16)
        torch._fused_sdp_choice(some, some, some)
        _process.order_is_initialized = True
    return True


class _Process:
    """What the threads share: torch's choice.

    Their forwards overlap in any order, so that the first to begin may not put back what it found when it ends: the
    last to end does that.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running: list[tuple[int, Backends]] = []
        self._restore: Callable[[], object] | None = None
        self.order_is_initialized = False

    def enter(self, backends: Backends) -> None:
        thread = threading.get_ident()
        with self._lock:
            for other, theirs in self._running:
                if other != thread and theirs != backends:
                    raise RuntimeError(
                        "SDPA's backends are the same for a whole process: a forward in another thread runs with "
                        f"{_listed(theirs)}, so none can run with {_listed(backends)} now. Run them one after the "
                        "other, or with the same backends."
                    )
            if self._restore is None:
                # torch's function sets a context variable too, which can be reset in the same context alone.
                context, kernel = contextvars.copy_context(), _sdpa_kernel(backends)
                context.run(kernel.__enter__)
                self._restore = functools.partial(context.run, kernel.__exit__, None, None, None)
            self._running.append((thread, backends))

    def leave(self, backends: Backends) -> None:
        with self._lock:
            self._running.remove((threading.get_ident(), backends))
            if not self._running and self._restore is not None:
                restore, self._restore = self._restore, None
                restore()


_process = _Process()


def _listed(backends: Backends) -> str:
    return ", ".join(backend.name for backend in backends)
