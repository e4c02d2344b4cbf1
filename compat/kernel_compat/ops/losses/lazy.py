"""Logits that a model's head hasn't computed: a loss takes the hidden states instead, and whoever wants the numbers gets them.

Within the forward they are a `Deferred`, an object that torch.compile can follow; in the outputs, where they are asked whether
they are a tensor, they are one: `LazyLogits`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only
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
        self._state = None if torch.compiler.is_compiling() else tuple(map(_state_of, (hidden_states, weight, bias)))
        self._computed: Tensor | None = None
        self._values: Tensor | None = None

    def compute(self) -> Tensor:
        """The logits themselves.

        Raises:
            RuntimeError: the hidden states or the head have changed since the forward: they can't be had any more.
        """
        if self._computed is None:
            self._computed = self._project(self._gradients)
            if not torch.compiler.is_compiling() and not self._computed.is_inference():
                self.pending.computed.append((self._computed, self._computed._version))
        return self._computed

    def values(self) -> Tensor:
        """The logits without what they come from."""
        if self._values is None:
            self._values = self._project(False) if self._computed is None else self._computed.detach()
        return self._values

    @property
    def is_computed(self) -> bool:
        return self._computed is not None or self._values is not None

    def _project(self, gradients: bool) -> Tensor:
        if changed := self._changed():
            raise RuntimeError(
                f"these logits were not computed in the forward, and the {changed} has changed since: use them before that"
            )
        with torch.set_grad_enabled(gradients):
            return _linear(
                self.hidden_states, self.weight, self.bias, self.pending.head, self.pointwise, self._autocast
            )

    def _changed(self) -> str:
        """What has, since the forward. It can't be told of a compiled one, nor of a head that is sharded."""
        if self._state is None:
            return ""
        hidden_states, *parameters = map(_state_of, (self.hidden_states, self.weight, self.bias))
        if hidden_states != self._state[0]:
            return "last hidden state"
        sharded = _is_gone(self.weight) or hasattr(self.weight, "full_tensor")
        return "" if sharded or (*parameters,) == self._state[1:] else "head"

    def _then(self, one: Pointwise) -> Any:
        if self._computed is not None and not self._as_computed():
            return one(self._computed)
        other = Deferred(self.hidden_states, self.weight, self.bias, self.pending, (*self.pointwise, one))
        other._autocast, other._gradients, other._state = self._autocast, self._gradients, self._state
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
        target = _target(args, kwargs)
        if isinstance(target, torch.dtype):
            return self._then(Pointwise("to", target))
        return self if target == self.device else self.compute().to(*args, **kwargs)

    def retain_grad(self) -> NoReturn:
        raise RuntimeError(_NO_GRADIENT)

    def register_hook(self, hook: Any) -> NoReturn:
        raise RuntimeError(_NO_GRADIENT)

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
        args, kwargs = tree_map_only(Deferred, Deferred.compute, (args, kwargs or {}))
        return function(*args, **kwargs)


_NO_GRADIENT = (
    "the loss takes the hidden states, and no gradient of it comes through these logits: set "
    "cross_entropy_loss_implementation='eager' to see it; for another loss of them use logits.compute()"
)

#: How many steps optimizers have made of heads' parameters: torch's version of a tensor doesn't count those of fused ones.
_steps: Any = WeakTensorKeyDictionary()


def _state_of(tensor: Tensor | None) -> tuple[int, int] | None:
    """Another one after every change that can be told of."""
    if tensor is None or tensor.is_inference():
        return None
    _watch_optimizers()
    return tensor._version, _steps.setdefault(tensor, 0) if isinstance(tensor, torch.nn.Parameter) else 0


@cache
def _watch_optimizers() -> None:
    """For good: torch iterates over the hooks as it calls them, and none may go meanwhile."""
    register_optimizer_step_post_hook(_count)


def _count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    known = {id(parameter) for parameter in _steps.keys()}  # noqa: SIM118  # it has no other iterator
    if not known:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in known and parameter.grad is not None:
                _steps[parameter] += 1


def _linear(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, head: Any, pointwise: Any, dtype: torch.dtype | None
) -> Tensor:
    inference = torch.inference_mode() if hidden_states.is_inference() else nullcontext()
    autocast = torch.autocast(hidden_states.device.type, dtype) if dtype else nullcontext()
    weight, bias = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in _present(weight, bias, head))
    with inference, autocast:
        logits: Tensor = torch.nn.functional.linear(hidden_states, weight, bias)
        for one in pointwise:
            logits = one(logits)
    return logits


def _present(weight: Tensor, bias: Tensor | None, head: Any) -> tuple[Any, Any]:
    """The parameters of a head, gathered again by all ranks where FSDP2 has let go of them since the forward."""
    if not _is_gone(weight):
        return weight, bias
    return head.weight.full_tensor(), head.bias if head.bias is None else head.bias.full_tensor()


def _is_gone(weight: Tensor) -> bool:
    return bool(weight.untyped_storage().size() == 0)


def _target(args: Any, kwargs: dict[str, Any]) -> torch.dtype | torch.device | None:
    """What `to` is asked for, where it is a dtype or a device and no more."""
    named = {name: value for name, value in kwargs.items() if name != "non_blocking"}
    if len(args) + len(named) != 1 or not named.keys() <= {"dtype", "device"}:
        return None
    target: Any = [*args, *named.values()][0]
    if isinstance(target, str | int):
        return torch.device(target)
    return target if isinstance(target, (torch.dtype, torch.device)) else None


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

    Its shape, dtype, device and place in the graph are known without that, and another dtype is noted. In the outputs of a
    compiled model there is a `Deferred` in its place, which is no tensor and otherwise the same.
    """

    _deferred: Deferred
    _computed: tuple[Any, Tensor] | None

    @staticmethod
    def __new__(cls, deferred: Deferred) -> LazyLogits:
        with torch.set_grad_enabled(deferred._gradients):
            made: LazyLogits = _Head.apply(deferred, deferred.hidden_states, deferred.weight, deferred.bias)
        return made

    @classmethod
    def _without_history(cls, deferred: Deferred) -> LazyLogits:
        made: LazyLogits = torch.Tensor._make_wrapper_subclass(
            cls, deferred.shape, dtype=deferred.dtype, device=deferred.device
        )
        made._deferred, made._computed = deferred, None
        return made

    def compute(self) -> Tensor:
        """The logits themselves."""
        history = self.requires_grad, self.grad_fn
        if self._computed is None or self._computed[0] != history:  # which a reentrant checkpoint sets anew
            with torch.enable_grad():
                values: Tensor = _Values.apply(self) if self.requires_grad else self._deferred.values().detach()
            self._computed = history, values
        return self._computed[1]

    def __repr__(self) -> str:
        return f"LazyLogits: {self._deferred!r}"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _METADATA or (function is torch.Tensor.view_as and args[0] is args[-1]):
            return super().__torch_function__(function, types, args, kwargs)
        if function is torch.Tensor.retain_grad:
            raise RuntimeError(_NO_GRADIENT)
        if function in (torch.Tensor.float, torch.Tensor.to) and isinstance(args[0], LazyLogits):
            lazy: LazyLogits = args[0]
            target = torch.float32 if function is torch.Tensor.float else _target(args[1:], kwargs)
            if target in (lazy.dtype, lazy.device):
                return lazy
            if isinstance(target, torch.dtype) and not lazy._deferred.is_computed:
                return _Noted.apply(lazy, target)
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.compute, (args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What is called from C++, below autograd."""
        if function in _ALIASES and isinstance(args[0], LazyLogits) and _is_whole(args):
            return LazyLogits._without_history(args[0]._deferred)
        if function._schema.is_mutable and any(isinstance(one, LazyLogits) for one in args):
            raise RuntimeError(f"{function} changes logits that have not been computed: use logits.compute()")
        args, kwargs = tree_map_only(LazyLogits, lambda one: one._deferred.values(), (args, kwargs or {}))
        return function(*args, **kwargs)


class _Head(torch.autograd.Function):  # type: ignore[misc]
    """Lazy logits from what they come from; the backward computes them again, or for the first time."""

    @staticmethod
    def forward(ctx: Any, deferred: Deferred, hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> LazyLogits:
        ctx.save_for_backward(hidden_states, weight, bias)
        ctx.how = (deferred.pending.head, deferred.pointwise, deferred._autocast)
        ctx.set_materialize_grads(False)
        return LazyLogits._without_history(deferred)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (gradient,) = gradients
        if gradient is None:
            return None, None, None, None
        again = torch.is_grad_enabled()  # create_graph=True
        with torch.enable_grad():
            hidden_states, weight, bias = ctx.saved_tensors
            # Aliases: a tied weight itself is behind the hidden states, too.
            of: list[Any] = [
                x if x is None else x.view_as(x) for x in (hidden_states, *_present(weight, bias, ctx.how[0]))
            ]
            logits = _linear(of[0], of[1], of[2], *ctx.how)
        needed = ctx.needs_input_grad[1:]
        wanted = [x for x, need in zip(of, needed, strict=True) if need]
        found = iter(torch.autograd.grad(logits, wanted, gradient, create_graph=again))
        return None, *(next(found) if need else None for need in needed)


class _Noted(torch.autograd.Function):  # type: ignore[misc]
    """Lazy logits in another dtype."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits, dtype: torch.dtype) -> LazyLogits:
        ctx.dtype = lazy.dtype
        ctx.set_materialize_grads(False)
        return LazyLogits._without_history(lazy._deferred.to(dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (gradient,) = gradients
        return None if gradient is None else gradient.to(ctx.dtype), None


class _Values(torch.autograd.Function):  # type: ignore[misc]
    """Lazy logits, computed."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits) -> Tensor:
        return lazy._deferred.values().detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


_ALIASES = frozenset({torch.ops.aten.alias.default, torch.ops.aten.detach.default, torch.ops.aten.view.default})


def _is_whole(args: Any) -> bool:
    return len(args) == 1 or tuple(args[1]) == args[0].shape


#: What is known of a tensor without its numbers.
_METADATA = frozenset(
    {
        *(
            getattr(torch.Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "ndim", "layout", "is_cuda"),
                *("requires_grad", "grad_fn", "is_leaf", "output_nr", "grad", "_base"),
            )
        ),
        *(
            getattr(torch.Tensor, name)
            for name in (
                *("size", "dim", "numel", "nelement", "stride", "is_contiguous", "element_size", "is_floating_point"),
                *("__len__", "register_hook", "requires_grad_", "detach_"),
            )
        ),
        torch.Tensor.requires_grad.__set__,
    }
)
