"""torch's choice among the backends of scaled dot product attention, made for one model."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ..kernels.catalog import SDPA_BACKENDS
from ..patching.handle import Handle
from ..patching.wrapping import wrap

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.attention import SDPBackend

    Backends: TypeAlias = tuple[SDPBackend, ...]

__all__ = ["use_sdpa_backends"]


def use_sdpa_backends(
    module: nn.Module, backends: SDPBackend | str | Sequence[SDPBackend | str] | None = None
) -> Handle:
    """Run the forward of a module, and of the modules in it, under ``torch.nn.attention.sdpa_kernel``.

    The modules in it are included because activation checkpointing calls them again in the backward pass, outside of
    the outer forward: the recomputation sees the same backends. Several calls don't nest: for each module the latest
    one that is not undone decides. In a compiled forward the backends are part of the graph.

    torch has one choice for the whole process: while a forward runs, it holds for other threads too.

    Deep copies and pickled ones keep the backends for good. Shallow ones, the replicas of ``nn.DataParallel`` included,
    run the original's forward, as with every forward that is an attribute of the instance.

    Not covered: code that runs after the forward has returned, such as a generator; the recomputation of a checkpointed
    function that calls SDPA itself (give `checkpoint` a `context_fn`) and of modules added later; functions that were
    compiled on their own before the forward calls them, as the rest of a forward is after a graph break.

    Examples:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2)
        >>> with use_sdpa_backends(layer, ["math"]) as handle:
        ...     output = layer(torch.ones(1, 3, 8))
        >>> handle.active
        False

    Args:
        module: its `forward`, and those of the modules in it, become attributes of the instances, with the same
            signatures.
        backends: the ones allowed, the preferred one first: members of ``torch.nn.attention.SDPBackend`` or their
            names in any case. None: cuDNN, flash, efficient, math.

    Returns:
        The handle that undoes this call, in any order with those of other calls. A forward that other code has put over
        ours stays, and ours has no effect in it any more.

    Raises:
        TypeError: `module` is no module, or `backends` has another type.
        ValueError: `backends` is empty, or one is unknown.
        RuntimeError: by a forward, while a forward in another thread runs with other backends.
    """
    from torch import nn

    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {module!r}")
    around = _Backends(_as_backends(backends))
    parts = [part for part in module.modules() if _has_forward(part) and (part is module or _may_attend(part))]
    return wrap(parts, around)


def _has_forward(module: nn.Module) -> bool:
    """False for torch's lists and dicts of modules."""
    from torch import nn

    return "forward" in vars(module) or inspect.getattr_static(module, "forward") is not nn.Module.forward


def _may_attend(module: nn.Module) -> bool:
    """False for torch's own layers without submodules, such as Linear: none is attention."""
    return not type(module).__module__.startswith("torch.nn.modules.") or any(True for _ in module.children())


def _as_backends(value: object) -> Backends:
    from torch.nn.attention import SDPBackend

    members: Mapping[str, SDPBackend] = {
        name: member for name, member in SDPBackend.__members__.items() if name != "ERROR"
    }
    requested = SDPA_BACKENDS if value is None else (value,) if isinstance(value, (str, SDPBackend)) else value
    if not isinstance(requested, Sequence) or isinstance(requested, (bytes, bytearray)):
        raise TypeError(f"backends must be an SDPBackend, a name, a sequence of them or None, not {value!r}")
    if not requested:
        raise ValueError(f"backends must not be empty; there are {', '.join(members)}")
    chosen = []
    for backend in requested:
        if not isinstance(backend, (str, SDPBackend)):
            raise TypeError(f"a backend must be an SDPBackend or its name, not {backend!r}")
        member = members.get((backend if isinstance(backend, str) else backend.name).upper())
        if member is None:
            raise ValueError(f"{backend!r} is no SDPA backend; there are {', '.join(members)}")
        chosen.append(member)
    return tuple(dict.fromkeys(chosen))


class _Backends:
    """Runs a forward with its backends in force. Pickled by their names, since torch's members can't be."""

    def __init__(self, backends: Sequence[SDPBackend | str]) -> None:
        import torch

        torch.compiler.assume_constant_result(_initialize_order)  # while tracing: call it, put nothing in the graph
        self.backends = _as_backends(backends)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Backends, ([backend.name for backend in self.backends],)

    def __call__(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch

        backends = self.backends
        if torch.compiler.is_compiling():
            _initialize_order()
            # A graph can't read which thread runs it. Choosing the same backends again costs nothing when it runs.
            with torch.nn.attention.sdpa_kernel(list(backends), set_priority=True):
                # torch 2.10 to 2.15 go on after a graph break in this `with` without the priority, and may leave it set
                # in the process. They can't go on in a `try`: this function then runs uncompiled, what it calls compiled.
                try:
                    return inner(*args, **kwargs)
                finally:
                    del inner
        if getattr(_here, "backends", None) == backends:
            return inner(*args, **kwargs)
        with _in_force(backends):
            return inner(*args, **kwargs)


#: Its attribute `backends`: the backends of the innermost wrapped forward in this thread.
_here = threading.local()


@contextlib.contextmanager
def _in_force(backends: Backends) -> Iterator[None]:
    import torch

    before = getattr(_here, "backends", None)
    _initialize_order()
    _process.enter(backends)
    order = torch._C._get_sdp_priority_order()
    try:
        _here.backends = backends
        with torch.nn.attention.sdpa_kernel(list(backends), set_priority=True):
            yield
    finally:
        torch._C._set_sdp_priority_order(order)  # sdpa_kernel restores the order of the enabled backends alone
        _here.backends = before
        _process.leave(backends)


def _initialize_order() -> bool:
    """Have torch set its own order for CUDA, once. Returns a constant that a graph can hold.

    torch does so when it first chooses a backend, and overwrites the order that was set before.
    """
    import torch

    if not _process.order_is_initialized and torch.cuda.is_initialized():
        some = torch.empty(1, 1, 1, 8, device="cuda", dtype=torch.float16)
        torch._fused_sdp_choice(some, some, some)
        _process.order_is_initialized = True
    return True


class _Process:
    """torch's one choice, which the threads share. The last forward to end restores what the first one found."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running: list[tuple[int, Backends]] = []
        self._before: tuple[list[SDPBackend], list[int]] = ([], [])
        self.order_is_initialized = False

    def enter(self, backends: Backends) -> None:
        import torch
        from torch.nn import attention

        thread = threading.get_ident()
        with self._lock:
            for other, running in self._running:
                if other != thread and running != backends:
                    raise RuntimeError(
                        "SDPA's backends are the same for a whole process: a forward in another thread runs with "
                        f"{_listed(running)}, so none can run with {_listed(backends)} now. Run them one after the "
                        "other, or with the same backends."
                    )
            if not self._running:
                self._before = attention._cur_sdpa_kernel_backends(), torch._C._get_sdp_priority_order()
                attention._sdpa_kernel(backends, set_priority=True)
            self._running.append((thread, backends))

    def leave(self, backends: Backends) -> None:
        import torch
        from torch.nn import attention

        with self._lock:
            self._running.remove((threading.get_ident(), backends))
            if not self._running:
                enabled, order = self._before
                attention._sdpa_kernel(enabled)
                torch._C._set_sdp_priority_order(order)


_process = _Process()


def _listed(backends: Backends) -> str:
    return ", ".join(backend.name for backend in backends)
