"""Logits that a model's head hasn't computed: a loss takes the hidden states instead, and whoever wants the numbers gets them.

Within the forward they are a `Deferred`, an object that torch.compile can follow; in the outputs, where they are asked whether
they are a tensor, they are one: `LazyLogits`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary


class Pointwise(NamedTuple):
    """One thing that a model does to each logit: ``times`` or ``over`` a number, ``tanh``, or ``to`` a dtype."""

    kind: Literal["times", "over", "tanh", "to"]
    value: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "times":
            return x * self.value
        if self.kind == "over":
            return x / self.value
        return torch.tanh(x) if self.kind == "tanh" else x.to(self.value)


@dataclass(eq=False)
class Pending:
    """One forward with labels, whose logits wait for the loss.

    Attributes:
        model: whose forward it is.
        head: its head.
        used: whether the loss has taken them.
        computed: those that were computed all the same, with the count of changes that torch keeps.
    """

    model: Any
    head: Any
    used: bool = False
    computed: list[tuple[Tensor, int]] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """Whether the model has changed logits in place, which a loss over hidden states knows nothing of."""
        return any(logits._version != version for logits, version in self.computed)


class Deferred:
    """Stands for the logits (batch, length, vocabulary) of one forward, which it computes when they are used.

    Nearly everything that can be done with a tensor can be done with it. What is pointwise (a factor, tanh, another dtype) is
    noted, for the loss to do the same; anything else computes them, once, as they would have been in the forward.
    """

    def __init__(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        pending: Pending,
        pointwise: tuple[Pointwise, ...] = (),
    ) -> None:
        self.hidden_states = hidden_states
        self.weight = weight
        self.bias = bias
        self.vocab_size = weight.shape[0]
        self.pending = pending
        self.pointwise = pointwise
        self._autocast = _autocast(hidden_states.device.type)
        self._gradients = torch.is_grad_enabled()
        self._version = None if torch.compiler.is_compiling() or weight.is_inference() else _version_of(weight)
        self._computed: Tensor | None = None

    def compute(self) -> Tensor:
        """The logits themselves.

        Raises:
            RuntimeError: the weight of the head has changed since the forward: they can't be had any more.
        """
        if self._computed is None:
            weight, bias = self._parameters()
            inference = torch.inference_mode() if self.hidden_states.is_inference() else nullcontext()
            autocast = torch.autocast(self.device.type, self._autocast) if self._autocast else nullcontext()
            with inference, torch.set_grad_enabled(self._gradients), autocast:
                logits: Tensor = torch.nn.functional.linear(self.hidden_states, weight, bias)
                for one in self.pointwise:
                    logits = one(logits)
            self._computed = logits
            if not torch.compiler.is_compiling() and not logits.is_inference():
                self.pending.computed.append((logits, logits._version))
            return logits
        return self._computed

    def _parameters(self) -> tuple[Tensor, Tensor | None]:
        if self.weight.untyped_storage().size() == 0 or hasattr(self.weight, "full_tensor"):
            # FSDP2 has taken what it had gathered for the forward. All ranks gather it again.
            head = self.pending.head
            return tuple(p if p is None else p.full_tensor() for p in (head.weight, head.bias))  # type: ignore[return-value]
        if self._version is not None and _version_of(self.weight) != self._version:
            raise RuntimeError(
                "these logits were not computed in the forward, and the weight of the head has changed since: use them "
                "before the optimizer's step"
            )
        return self.weight, self.bias

    def _then(self, one: Pointwise) -> Any:
        if self._computed is not None and not self._as_computed():
            return one(self._computed)
        other = Deferred(self.hidden_states, self.weight, self.bias, self.pending, (*self.pointwise, one))
        other._autocast, other._gradients, other._version = self._autocast, self._gradients, self._version
        return other

    def _as_computed(self) -> bool:
        """Whether nobody has changed the logits since they were computed."""
        versions = {id(logits): (logits._version, version) for logits, version in self.pending.computed}
        now, then = versions.get(id(self._computed), (0, 1))
        return bool(now == then)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden_states.shape[:-1], self.vocab_size))

    @property
    def dtype(self) -> torch.dtype:
        """Asked by what casts outputs, accelerate's mixed precision for one: to compute them for it would undo it all."""
        first = self._autocast or self.hidden_states.dtype
        return next((one.value for one in reversed(self.pointwise) if one.kind == "to"), first)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def device(self) -> torch.device:
        return self.hidden_states.device

    def float(self) -> Any:
        return self._then(Pointwise("to", torch.float32))

    def tanh(self) -> Any:
        return self._then(Pointwise("tanh"))

    def contiguous(self) -> Deferred:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        target = args[0] if args else kwargs.get("dtype")
        if len(args) + len(kwargs) == 1 and isinstance(target, torch.dtype):
            return self._then(Pointwise("to", target))
        if len(args) + len(kwargs) == 1 and (args or "device" in kwargs):
            where = args[0] if args else kwargs["device"]
            if torch.device(where) == self.device:
                return self
        return self.compute().to(*args, **kwargs)

    def __mul__(self, other: Any) -> Any:
        return self._then(Pointwise("times", other)) if _is_number(other) else self.compute() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._then(Pointwise("over", other)) if _is_number(other) else self.compute() / other

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.compute(), name)

    def __repr__(self) -> str:
        return f"{tuple(self.shape)}, not computed: the loss took the hidden states. compute() gives them"

    def __reduce__(self) -> tuple[Any, ...]:
        return as_it_is, (self.compute(),)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tanh and len(args) == 1 and isinstance(args[0], Deferred) and not kwargs:
            return args[0].tanh()
        args, kwargs = torch.utils._pytree.tree_map_only(Deferred, Deferred.compute, (args, kwargs or {}))
        return function(*args, **kwargs)


#: How many steps optimizers have made of heads' weights: torch's version of a tensor doesn't count those of fused ones.
_steps: Any = WeakTensorKeyDictionary()


def _version_of(weight: Tensor) -> tuple[int, int]:
    """Another one after every change that can be told of."""
    _watch_optimizers()
    return weight._version, _steps.setdefault(weight, 0)


@cache
def _watch_optimizers() -> None:
    """For good: torch iterates over the hooks as it calls them, and none may go meanwhile."""
    register_optimizer_step_post_hook(_count)


def _count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    weights = {id(weight) for weight in _steps.keys()}  # noqa: SIM118  # it has no other iterator
    if not weights:
        return
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if id(weight) in weights:
                _steps[weight] += 1


def _autocast(kind: str) -> torch.dtype | None:
    """The dtype of autocast, where that is on for a type of device that has it."""
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_it_is(value: Any) -> Any:
    return value


def _computing(name: str) -> Callable[..., Any]:
    def method(self: Deferred, *args: Any) -> Any:
        others = (one.compute() if isinstance(one, Deferred) else one for one in args)
        return getattr(self.compute(), name)(*others)

    return method


for _name in (
    *("add", "radd", "sub", "rsub", "rtruediv", "pow", "rpow", "neg", "matmul", "rmatmul", "mod", "floordiv", "abs"),
    *(
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "getitem",
        "setitem",
        "len",
        "iter",
        "bool",
        "float",
        "int",
        "array",
        "invert",
    ),
):
    setattr(Deferred, f"__{_name}__", _computing(f"__{_name}__"))
Deferred.__hash__ = object.__hash__  # type: ignore[method-assign]


class LazyLogits(torch.Tensor):  # type: ignore[misc]
    """The logits (batch, length, vocabulary) of a forward whose loss had no need of them: a tensor that is computed when it is used.

    Its shape, dtype and device are known without that, and another dtype is noted. In the outputs of a compiled model there is a
    `Deferred` in its place, which is no tensor and otherwise the same.
    """

    _deferred: Deferred

    @staticmethod
    def __new__(cls, deferred: Deferred) -> LazyLogits:
        made: LazyLogits = torch.Tensor._make_wrapper_subclass(
            cls, deferred.shape, dtype=deferred.dtype, device=deferred.device
        )
        made._deferred = deferred
        return made

    def compute(self) -> Tensor:
        """The logits themselves."""
        return self._deferred.compute()

    def __repr__(self) -> str:
        return f"LazyLogits: {self._deferred!r}"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _METADATA:
            return super().__torch_function__(function, types, args, kwargs)
        if function in (torch.Tensor.float, torch.Tensor.to) and isinstance(args[0], LazyLogits):
            name = function.__name__
            found = getattr(args[0]._deferred, name)(*args[1:], **kwargs)
            return LazyLogits(found) if isinstance(found, Deferred) else found
        return _computing_all(function, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computing_all(function, args, kwargs or {})  # what is called from C++


def _computing_all(function: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = torch.utils._pytree.tree_map_only(LazyLogits, LazyLogits.compute, (args, kwargs))
    return function(*args, **kwargs)


#: What is known of a tensor without its numbers.
_METADATA = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda")),
        *(
            torch.Tensor.size,
            torch.Tensor.dim,
            torch.Tensor.numel,
            torch.Tensor.is_floating_point,
            torch.Tensor.__len__,
        ),
    }
)
