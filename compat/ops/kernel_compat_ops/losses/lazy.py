"""The logits of a training forward whose loss is computed from the hidden states."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partialmethod
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from kernel_compat.errors import UnsupportedFeatureError


class Pointwise(NamedTuple):
    """One operation on each logit: ``times`` or ``over`` a number, ``tanh``, or a cast ``to`` a dtype."""

    kind: Literal["times", "over", "tanh", "to"]
    value: Any = None


def applied(step: Pointwise, x: Tensor) -> Tensor:
    """A tensor after an operation. A function: torch 2.10 traces no call of a named tuple."""
    if step.kind == "times":
        return x * step.value
    if step.kind == "over":
        return x / step.value
    return torch.tanh(x) if step.kind == "tanh" else x.to(step.value)


@dataclass(eq=False)
class Forward:
    """One forward with labels and gradients, whose loss takes the hidden states.

    Attributes:
        model: the module whose forward it is.
        head: its output embeddings.
        taken: whether the loss has taken the hidden states.
        done: whether the forward has returned.
    """

    model: Any
    head: Any
    taken: bool = False
    done: bool = False


@dataclass(eq=False, repr=False)
class LazyLogits:
    """Logits (batch, length, vocabulary) that are not computed, because the loss is computed from the hidden states.

    `compute` returns them. It is no tensor: every other use raises and names `compute`.

    While the model's forward runs, pointwise operations (multiplication and division by a number, tanh, casts) return
    lazy logits that the loss applies them to; any other operation raises `UnsupportedFeatureError`.

    Attributes:
        hidden_states: (batch, length, hidden).
        weight: (vocabulary, hidden), the head's.
        bias: (vocabulary,), the head's.
        forward: the forward that made them.
        pointwise: operations on each logit, in order.
        layout: applied to the logits that `compute` returns, as by a caller whose model computed without padding; None for nothing.
    """

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None
    forward: Forward
    pointwise: tuple[Pointwise, ...] = ()
    layout: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        self._autocast = autocast_dtype(self.hidden_states)
        self._versions = None if torch.compiler.is_compiling() else self._current_versions()

    def compute(self) -> Tensor:
        """Compute the logits from the last hidden states and the head: one matrix product, again in every call.

        Gradients of the result reach the hidden states and the head, unless they are switched off.

        A change in place of the hidden states or the head is found by their version counters. Not found: changes of the head
        that don't raise its counter (an optimizer with ``fused=True``, assignments to ``weight.data``), those of a head
        that FSDP2 has sharded again, and all changes after a compiled forward.

        Returns:
            (batch, length, vocabulary), as the model's forward would return them with gradients off.

        Raises:
            RuntimeError: the hidden states or the head have been changed since the forward, as by the optimizer's step.
        """
        if self._versions is not None:
            for name, before, now in zip(_NAMES, self._versions, self._current_versions(), strict=True):
                if before != now and now is not None:
                    raise RuntimeError(
                        f"these logits can't be computed any more: the {name} changed after the forward. "
                        "Call compute() before the optimizer's step"
                    )
        device, dtype = self.hidden_states.device.type, self._autocast
        with nullcontext() if device == "meta" else torch.autocast(device, dtype, dtype is not None):
            logits = self._linear()
            for step in self.pointwise:
                logits = applied(step, logits)
        return logits if self.layout is None else self.layout(logits)

    def _linear(self) -> Tensor:
        if not is_freed(self.weight):
            return functional.linear(self.hidden_states, self.weight, self.bias)
        head = self.forward.model.get_output_embeddings()
        if hasattr(head, "unshard") or not hasattr(head.weight, "full_tensor"):
            logits: Tensor = head(self.hidden_states)  # whose hooks gather its parameters
            return logits
        # FSDP2 has sharded the head together with the rest again, after the backward.
        weight, bias = (None if x is None else x.full_tensor().detach() for x in (head.weight, head.bias))
        return functional.linear(self.hidden_states, weight, bias)

    def _current_versions(self) -> tuple[int | None, ...]:
        """The version counters of hidden states, weight and bias; None for a tensor without one or without memory."""
        tensors = (self.hidden_states, self.weight, self.bias)
        return tuple(None if x is None or x.is_inference() or is_freed(x) else x._version for x in tensors)

    # Pointwise operations, within the forward

    @property
    def shape(self) -> torch.Size:
        """(batch, length, vocabulary)."""
        self._require_forward("shape", AttributeError)
        return torch.Size((*self.hidden_states.shape[:-1], self.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the logits would have."""
        self._require_forward("dtype", AttributeError)
        first = self._autocast or self.hidden_states.dtype
        return next((step.value for step in reversed(self.pointwise) if step.kind == "to"), first)

    @property
    def device(self) -> torch.device:
        """The device of the hidden states."""
        self._require_forward("device", AttributeError)
        return self.hidden_states.device

    def float(self) -> LazyLogits:
        """The logits in float32."""
        return self._then("float", Pointwise("to", torch.float32))

    def tanh(self) -> LazyLogits:
        """The hyperbolic tangent of the logits."""
        return self._then("tanh", Pointwise("tanh"))

    def contiguous(self) -> LazyLogits:
        """The logits themselves."""
        self._require_forward("contiguous")
        return self

    def to(self, *args: Any, **kwargs: Any) -> LazyLogits:
        """The logits in another dtype; a device must be their own."""
        kwargs.pop("non_blocking", None)
        targets = (*args, *kwargs.values())
        if len(targets) == 1 and kwargs.keys() <= {"dtype", "device"}:
            if isinstance(targets[0], torch.dtype):
                return self._then("to", Pointwise("to", targets[0]))
            if isinstance(targets[0], str | int | torch.device) and torch.device(targets[0]) == self.device:
                return self
        self.refuse("to")

    def __mul__(self, other: Any) -> LazyLogits:
        return self._then("*", Pointwise("times", other))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> LazyLogits:
        return self._then("/", Pointwise("over", other))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        lazy = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, LazyLogits)]
        lazy[0].refuse(getattr(function, "__name__", str(function)))

    def _then(self, use: str, step: Pointwise) -> LazyLogits:
        self._require_forward(use)
        if step.kind in ("times", "over") and (isinstance(step.value, bool) or not isinstance(step.value, int | float)):
            self.refuse(use)
        other = LazyLogits(self.hidden_states, self.weight, self.bias, self.forward, (*self.pointwise, step))
        other._autocast, other._versions = self._autocast, self._versions
        return other

    # Every other use

    def _require_forward(self, use: str, error: type[Exception] = TypeError) -> None:
        if self.forward.done:
            self.refuse(use, error=error)

    def refuse(self, use: str, *args: Any, error: type[Exception] = TypeError) -> NoReturn:
        """Raise for a use that needs the logits as a tensor."""
        if self.forward.done:
            raise error(f"{use!r} needs a tensor, and these logits are not computed: use logits.compute()")
        raise refused(
            f"{use!r} on the logits, in the forward of {type(self.forward.model).__name__} or in a hook on its head"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse(name, error=AttributeError)

    def __repr__(self) -> str:
        return "LazyLogits: not computed, since the loss is computed from the hidden states. compute() returns them"


#: The operators and conversions that need a tensor.
_REFUSED = """
    add radd sub rsub rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg abs invert
    eq ne lt le gt ge getitem setitem contains len iter bool int float complex index array reduce_ex
"""
for _name in _REFUSED.split():
    setattr(LazyLogits, f"__{_name}__", partialmethod(LazyLogits.refuse, f"__{_name}__"))
LazyLogits.__hash__ = object.__hash__  # type: ignore[method-assign]

_NAMES = ("hidden states", "head's weight", "head's bias")


def refused(feature: str) -> UnsupportedFeatureError:
    """The error of a model whose loss can't be computed from the hidden states."""
    return UnsupportedFeatureError(
        feature, "a cross_entropy_loss over hidden states", "Set cross_entropy_loss_implementation='eager'."
    )


def is_freed(parameter: Tensor) -> bool:
    """Whether a parameter has no memory, until the forward of its module gathers its shards."""
    return not torch.compiler.is_compiling() and parameter.untyped_storage().size() == 0


def autocast_dtype(x: Any) -> torch.dtype | None:
    """The dtype that autocast casts the inputs of a linear layer to; None where autocast is off."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def as_autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The inputs of a linear layer, cast as autocast casts them where it is on for the first one's device."""
    dtype = autocast_dtype(tensors[0])
    return tensors if dtype is None else tuple(None if x is None else x.to(dtype) for x in tensors)
