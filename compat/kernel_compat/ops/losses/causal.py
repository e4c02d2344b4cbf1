"""Cross-entropy without logits: the head of a model hands its hidden states on, and the loss takes them and the head's weight."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import UnsupportedFeatureError
from ..instances import replaced
from ..recognisers.probing import Unproven, quiet
from .lazy import Deferred, LazyLogits, Pending, as_it_is

#: On the head, the forward that it works for; on a model, its head.
PENDING, HEAD, INNER = "_kernel_compat_pending", "_kernel_compat_head", "_kernel_compat_forward"


@dataclass(frozen=True)
class CausalLoss:
    """A model that computes the causal cross-entropy of what its head gives.

    Attributes:
        model: the module whose forward takes labels.
        head: its output embeddings, a linear layer.
        position: of `labels` among the arguments of its forward.
    """

    model: Any
    head: nn.Linear
    position: int


def takes_labels(module: nn.Module) -> bool:
    """Whether a module is a model of transformers whose forward computes a loss."""
    loss = inspect.getattr_static(type(module), "loss_function", None)
    return isinstance(loss, property) and "labels" in inspect.signature(type(module).forward).parameters


def causal_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The formula, and the parameters, of transformers' ``ForCausalLMLoss``: see `targets` and `divided`."""
    flat = targets(labels, shift_labels, ignore_index, logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(wide).view(-1, vocab_size)
    return divided(
        functional.cross_entropy(logits, flat, ignore_index=ignore_index, reduction=reduction), num_items_in_batch
    )


def targets(labels: Any, shift_labels: Any, ignore_index: int, device: Any) -> Tensor:
    """The next token of each, flat: `shift_labels` as they are, or `labels` (batch, length) one place to the left."""
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    flat: Tensor = shift_labels.reshape(-1).to(device)
    return flat


def divided(loss: Tensor, items: Any) -> Tensor:
    """A sum of losses, divided by the number of tokens that count in all of the batch, where it is given."""
    if items is None:
        return loss
    return loss / (items.to(loss.device) if isinstance(items, Tensor) else items)


def find(model: nn.Module) -> tuple[str, Any] | None:
    """The outermost part of a model that takes labels, with its path; None where there is none."""
    return next(((path, module) for path, module in model.named_modules() if takes_labels(module)), None)


def prove(module: Any) -> CausalLoss:
    """That a module's loss is the causal cross-entropy, over a plain linear head.

    Raises:
        Unproven: it isn't.
    """
    head = module.get_output_embeddings()
    if head is None:
        raise Unproven(f"it has no language modelling head: its loss is of the kind {module.loss_type or 'unknown'!r}")
    if not _is_linear(head):
        what = f"{type(head).__module__}.{type(head).__qualname__}"
        raise Unproven(f"its head is a {what}, and not a linear layer of torch's")
    if replaced(head) is not None:
        raise Unproven("the forward of its head has been replaced")
    with quiet() as generator:
        size = 7
        logits = torch.randn(2, 5, size, generator=generator)
        labels = torch.tensor([[1, 2, -100, 3, 0], [6, -100, -100, 5, 4]])
        for options in ({}, {"num_items_in_batch": 3}, {"shift_labels": labels.roll(-1, 1)}, {"ignore_index": 3}):
            if "ignore_index" in options:
                labels = labels.where(labels >= 0, 3)
            expected = causal_loss(logits, labels, size, **options)
            try:
                given = module.loss_function(logits=logits, labels=labels, vocab_size=size, **options)
                off = abs(float(given) - float(expected))
            except Exception as error:
                raise Unproven(f"its loss_function failed on a probe ({type(error).__name__}: {error})") from error
            if not off < 1e-5:
                raise Unproven(
                    f"its loss_function differs from the causal cross-entropy by {off:.1e} with {options or 'labels'}"
                )
    names = list(inspect.signature(type(module).forward).parameters)
    return CausalLoss(module, head, names.index("labels") - 1)


def head_forward(kernel: Callable[..., Tensor]) -> Callable[..., Any]:
    """The forward of a head: logits to come within a forward with labels; the loss, where that is requested."""

    def forward(self: Any, input: Tensor, request: dict[str, Any] | None = None) -> Any:
        if request is not None:
            return kernel(input, self.weight, bias=self.bias, **request)
        pending = getattr(self, PENDING, None) if torch.compiler.is_compiling() else _waiting.get()
        if pending is not None and pending.head is self:
            if torch.is_grad_enabled() and (self._backward_hooks or self._backward_pre_hooks):
                _refuse_backward_hooks()
            return Deferred(input, self.weight, self.bias, pending)
        return functional.linear(input, self.weight, self.bias)

    return forward


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch 2.11 fails at raising this when it traces it
def _refuse_backward_hooks() -> NoReturn:
    raise _refused("a backward hook on the head, which no gradient of logits comes through")


#: The forward with labels that this thread is in. What is compiled can't ask for it, and finds it on the head.
_waiting: ContextVar[Pending | None] = ContextVar("kernel_compat_pending", default=None)


class Loss:
    """What takes the place of a model's ``loss_function``; of an unpickled model's, `causal_loss`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(
        self,
        logits: Any,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(logits, Deferred):
            return causal_loss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
        if vocab_size != logits.vocab_size:
            raise ValueError(
                f"the head gives {logits.vocab_size} logits a token, and the loss is asked for {vocab_size}"
            )
        hidden_states = logits.hidden_states
        request = {
            "labels": targets(labels, shift_labels, ignore_index, hidden_states.device),
            "ignore_index": ignore_index,
            "reduction": "mean" if num_items_in_batch is None else "sum",
            "pointwise": logits.pointwise,
        }
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        if request["labels"].shape[0] != rows.shape[0]:
            raise ValueError(
                f"there are labels for {request['labels'].shape[0]} tokens, and hidden states of {rows.shape[0]}"
            )
        if not torch.compiler.is_compiling() and logits.pending.changed:
            raise _refused(
                f"the forward of {type(self.model).__name__}, which changes its logits in place before the loss"
            )
        logits.pending.used = True
        return divided(self._of(rows, request), num_items_in_batch)

    def _of(self, rows: Tensor, request: dict[str, Any]) -> Any:
        head, outer = getattr(self.model, HEAD)[0], self.model.get_output_embeddings()
        if outer is head and not hasattr(head.weight, "full_tensor"):
            return head.forward(rows, request)  # its hooks have run
        # What shards its parameters has them whole within its forward.
        return outer(rows, request)

    def __deepcopy__(self, memo: dict[int, Any]) -> Loss:
        return Loss(copy.deepcopy(self.model, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return as_it_is, (causal_loss,)


def model_forward(found: CausalLoss, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model: with labels, its own with lazy logits; without, its own.

    Args:
        inner: called with the model first.
    """
    position = found.position

    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = args[position] if len(args) > position else kwargs.get("labels")
        if labels is None:
            return inner(self, *args, **kwargs)
        head = getattr(self, HEAD)[0]
        pending, before = Pending(self, head), getattr(head, PENDING, None)
        compiling = torch.compiler.is_compiling()
        token = None if compiling else _waiting.set(pending)
        setattr(head, PENDING, pending)
        try:
            outputs = inner(self, *args, **kwargs)
        finally:
            setattr(head, PENDING, before)
            if token is not None:
                _waiting.reset(token)
        if not pending.used:
            raise _unused(self, head, name)
        return outputs if compiling else _with_tensors(outputs)

    return forward


def _unused(model: Any, head: Any, name: str) -> UnsupportedFeatureError:
    """Why a forward hasn't handed the hidden states to the loss."""
    outer, of = model.get_output_embeddings(), f"of {type(model).__name__}, which"
    if outer is not head:
        if _is_linear(outer):
            return UnsupportedFeatureError(
                f"the head {of} has been replaced since the ops were applied",
                f"cross_entropy_loss {name!r}",
                "Undo the ops, and apply them to the model as it is now.",
            )
        what = f"{type(outer).__module__}.{type(outer).__qualname__}"
        return _refused(f"the head {of} has been replaced by a {what} since the ops were applied")
    if not isinstance(model.loss_function, Loss):
        return _refused(f"the loss_function {of} has been replaced since the ops were applied")
    if head._forward_hooks:
        return _refused(f"the forward {of} computes its loss from the logits, or a hook on its head computes them")
    return _refused(f"the forward {of} computes its loss from the logits itself")


def _refused(what: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        what, "a cross_entropy_loss over hidden states", "Set cross_entropy_loss_implementation='eager'."
    )


def _is_linear(head: Any) -> bool:
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


def _with_tensors(outputs: Any) -> Any:
    """The outputs of a forward, whose logits may be asked whether they are a tensor."""
    if isinstance(outputs, tuple):
        return tuple(LazyLogits(one) if isinstance(one, Deferred) else one for one in outputs)
    if isinstance(getattr(outputs, "logits", None), Deferred):
        outputs.logits = LazyLogits(outputs.logits)
    return outputs
