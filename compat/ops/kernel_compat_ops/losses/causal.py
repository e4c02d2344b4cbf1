"""Causal cross-entropy by a kernel: over the logits, or over the hidden states, where the head returns lazy logits in training."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernel_compat.attention.roles import LABELS, LOSS_TYPE, TOKENS
from kernel_compat.errors import UnsupportedFeatureError
from kernel_compat.policy.capabilities import has_own_forward, is_over_ranks

from ..instances import replaced
from ..recognisers.probing import Unproven, quiet, ranks
from ..spec import KernelSpec
from .labels import checked
from .lazy import Forward, LazyLogits, is_freed, refused

#: Names of attributes. The head's: the `Forward` that is running. The model's: its head; the forward that its instance had.
FORWARD, HEAD, INNER = "_kernel_compat_current_forward", "_kernel_compat_head", "_kernel_compat_forward"


class ExtraLossOutputs(NamedTuple):
    """The outputs of a model's own loss function besides the loss, as VeOmni's has, and the keyword arguments that it reads.

    Attributes:
        function: the model's own loss function.
        dimensions: one entry for each value after the loss in the tuple: ``logits.ndim`` if the value is the logits, which may be
            flattened; None if it is None. None instead of a tuple if the function returns the loss alone.
        keywords: the keyword arguments that the function reads besides those of the causal cross-entropy.
    """

    function: Callable[..., Any]
    dimensions: tuple[int | None, ...] | None
    keywords: frozenset[str]

    def with_loss(self, loss: Tensor, logits: Any, vocab_size: int) -> Any:
        """The loss as the function would return it: alone, or in a tuple with these logits. Lazy logits keep their shape."""
        if self.dimensions is None:
            return loss
        values = []
        for ndim in self.dimensions:
            as_is = ndim is None or isinstance(logits, LazyLogits) or ndim == logits.ndim
            values.append(None if ndim is None else logits if as_is else logits.reshape(-1, vocab_size))
        return (loss, *values)

    def require_unread(self, keywords: Mapping[str, Any]) -> None:
        """Refuse keyword arguments that the model's own function reads: it may compute something else with them.

        Raises:
            UnsupportedFeatureError: one is passed, and neither None nor False.
        """
        for name in self.keywords.intersection(keywords):
            if keywords[name] is not None and keywords[name] is not False:
                raise UnsupportedFeatureError(
                    f"{name}=, which the model's own loss function reads",
                    "a kernel for cross_entropy_loss",
                    f"Leave {name} out, or set cross_entropy_loss_implementation='eager'.",
                )


class CausalLoss(NamedTuple):
    """A module that computes the causal cross-entropy of the logits of its head, a linear layer."""

    model: Any
    head: nn.Linear
    extras: ExtraLossOutputs | None = None


def causal_loss(
    logits: Any,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    cross_entropy: Callable[..., Tensor] | None = None,
    **kwargs: Any,
) -> Tensor:
    """The causal cross-entropy, as transformers' ``ForCausalLMLoss``.

    Args:
        logits: (batch, length, vocabulary); the loss is computed in float32 or wider.
        labels: (batch, length), shifted here by one; unused where `shift_labels` is passed.
        num_items_in_batch: the divisor of the sum over tokens; without it, the loss is their mean.
        shift_labels: labels shifted already.
        cross_entropy: called with the logits, `vocab_size`, labels (batch * length,), `ignore_index` and a `reduction`, ``mean`` or
            ``sum``; torch's by default.
    """
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss = (cross_entropy or _of_logits)(
        logits,
        vocab_size,
        labels=shift_labels.reshape(-1),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    if num_items_in_batch is None:
        return loss
    return loss / (num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch)


class Loss:
    """The ``loss_function`` of a model: `causal_loss` by another `cross_entropy`.

    Pickled, it becomes `causal_loss`, or the model's own function if that returns a tuple.
    """

    def __init__(self, cross_entropy: Callable[..., Tensor], extras: ExtraLossOutputs | None = None) -> None:
        self._cross_entropy, self._extras = cross_entropy, extras

    def __call__(self, logits: Any, labels: Tensor | None, vocab_size: int, *args: Any, **kwargs: Any) -> Any:
        """The loss, with the parameters of transformers' ``ForCausalLMLoss``; in a tuple if the model's own function returns one.

        Raises:
            UnsupportedFeatureError: an argument for which the model's own function may compute something else.
        """
        if self._extras is not None:
            self._extras.require_unread(kwargs)
        loss = causal_loss(logits, labels, vocab_size, *args, cross_entropy=self._cross_entropy, **kwargs)
        return loss if self._extras is None else self._extras.with_loss(loss, logits, vocab_size)

    def __deepcopy__(self, memo: dict[int, Any]) -> Loss:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        extras = self._extras
        return functools.partial, (causal_loss if extras is None or extras.dimensions is None else extras.function,)


def _of_logits(logits: Tensor, vocab_size: int, *, labels: Tensor, **options: Any) -> Tensor:
    """The cross-entropy of logits (..., vocabulary) by torch's function."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(logits.to(wide).view(-1, vocab_size), labels.to(logits.device), **options)


def over_logits(kernel: Callable[..., Tensor], extras: ExtraLossOutputs | None = None) -> Loss:
    """The loss by a kernel that takes logits (tokens, vocabulary) in float32 or wider, which it may overwrite."""

    def cross_entropy(logits: Tensor, vocab_size: int, *, labels: Tensor, **options: Any) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        copied = logits.clone() if logits.dtype == wide else logits.to(wide)
        rows = copied.reshape(-1, vocab_size)  # (tokens, vocabulary)
        labels, options["ignore_index"] = checked(labels, len(rows), **options)
        return kernel(rows, labels.to(logits.device), **options)

    return Loss(cross_entropy, extras)


def over_hidden_states(logits: Any, vocab_size: int, *, labels: Tensor, **options: Any) -> Tensor:
    """The cross-entropy by the kernel of the head that made the logits, where they are lazy; by torch's where not.

    Raises:
        ValueError: `vocab_size` or the number of labels doesn't fit the head and the hidden states.
    """
    if logits is None:
        raise refused("the loss function, which the model calls without logits")
    if not isinstance(logits, LazyLogits):
        return _of_logits(logits, vocab_size, labels=labels, **options)
    if vocab_size != logits.weight.shape[0]:
        raise ValueError(f"the head returns {logits.weight.shape[0]} logits a token, and vocab_size is {vocab_size}")
    rows = logits.hidden_states.reshape(-1, logits.hidden_states.shape[-1])  # (tokens, hidden)
    if labels.shape[0] != rows.shape[0]:
        raise ValueError(f"there are labels for {labels.shape[0]} tokens, and hidden states of {rows.shape[0]}")
    labels, options["ignore_index"] = checked(labels, len(rows), **options)
    logits.forward.taken = True
    head, outer = logits.forward.head, logits.forward.model.get_output_embeddings()
    # Parameters in shards are gathered by hooks of their module, which otherwise have run already.
    sharded = hasattr(head.weight, "full_tensor") or is_freed(head.weight)
    call = outer if outer is not head or sharded else head.forward
    loss: Tensor = call(rows, {**options, "labels": labels.to(rows.device), "pointwise": logits.pointwise})
    return loss


def find(model: nn.Module) -> tuple[str, Any] | None:
    """The path and module of the outermost part of a model that computes a loss from labels; None if no part does."""
    for path, module in model.named_modules():
        loss = inspect.getattr_static(type(module), "loss_function", None)
        if isinstance(loss, property) and LABELS.spelled(inspect.signature(type(module).forward).parameters):
            return path, module
    return None


def prove(module: Any) -> CausalLoss:
    """Prove that a module's loss is the causal cross-entropy of a plain linear head's logits.

    Raises:
        Unproven: the head is no linear layer, the loss differs, or no method calls `loss_function`.
    """
    head = module.get_output_embeddings()
    if head is None:
        raise Unproven(
            f"it has no language modelling head: its loss is of the kind {LOSS_TYPE.attribute_of(module) or 'unknown'!r}"
        )
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise Unproven(f"its head is a {_path(type(head))}, and not a linear layer of torch's")
    if replaced(head) is not None:
        raise Unproven("the forward of its head has been replaced")
    methods = (inspect.unwrap(f) for kind in type(module).__mro__ for f in vars(kind).values() if inspect.isfunction(f))
    if not any("loss_function" in method.__code__.co_names for method in methods):
        raise Unproven("it computes its loss itself: none of its methods calls loss_function")
    dimensions: tuple[int | None, ...] | None = None
    with quiet() as generator:
        size = 7
        logits = torch.randn(2, 5, size, generator=generator)
        labels = torch.tensor([[1, 2, -100, 3, 0], [6, -100, -100, 5, 4]])
        for options in ({}, {"num_items_in_batch": 3}, {"shift_labels": labels.roll(-1, 1)}, {"ignore_index": 3}):
            if "ignore_index" in options:
                labels = labels.where(labels >= 0, 3)
            expected = causal_loss(logits, labels, size, **options)
            try:
                loss = module.loss_function(logits=logits, labels=labels, vocab_size=size, **options)
                if isinstance(loss, tuple):
                    loss, *values = loss
                    dimensions = _dimensions(values, logits)
                off = abs(float(loss) - float(expected))
            except Unproven:
                raise
            except Exception as error:
                raise Unproven(f"its loss_function failed on a probe ({type(error).__name__}: {error})") from error
            if not off < 1e-5:
                raise Unproven(
                    f"its loss_function differs from the causal cross-entropy by {off:.1e} with {options or 'labels'}"
                )
    function = module.loss_function
    return CausalLoss(module, head, ExtraLossOutputs(function, dimensions, _keywords(function) - _CAUSAL))


#: The parameters of transformers' ``ForCausalLMLoss``, and those by which fused losses take the factors of the logits.
_CAUSAL = frozenset(inspect.signature(causal_loss).parameters) | {"hidden_states", "weights"}


def _dimensions(values: list[Any], logits: Tensor) -> tuple[int | None, ...]:
    """`ExtraLossOutputs.dimensions` of the values that a loss function returned after the loss for these logits.

    Raises:
        Unproven: a value is neither None nor the logits.
    """
    for value in values:
        if value is not None and not (
            isinstance(value, Tensor)
            and value.shape in (logits.shape, logits.reshape(-1, logits.shape[-1]).shape)
            and torch.equal(value.reshape(logits.shape), logits)
        ):
            raise Unproven(f"its loss_function returns a {_path(type(value))} beside the loss, which isn't the logits")
    return tuple(None if value is None else value.ndim for value in values)


def _keywords(function: Any) -> frozenset[str]:
    """The names of a function's parameters, and the strings in its code: it may read keyword arguments by any of them."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(getattr(function, "__func__", function), "__code__", None) or getattr(
        type(function).__call__, "__code__", None
    )
    if code is None:
        return frozenset()
    constants = (constant for constant in code.co_consts if isinstance(constant, str))
    return frozenset((*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *constants))


def unrun_because(model: Any, spec: KernelSpec, names: Iterable[object]) -> str:
    """Why a model can't be run on a probe; empty if it can. The same on every rank of a job.

    Args:
        names: the attention names of its parts.
    """
    parameters = list(model.parameters())
    if (count := ranks()) > 1:
        return f"it isn't run on one of {count} ranks, where it may wait for the others"
    if waits := [name for name in names if is_over_ranks(name) or has_own_forward(name)]:
        return f"it isn't run with the attention {waits[0]!r}, which may wait for other ranks"
    if any(p.is_meta for p in parameters) or not parameters:
        return "it has no weights yet"
    if any(type(p) not in (Tensor, nn.Parameter) or is_freed(p) for p in parameters) or any(
        type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()
    ):
        return "its weights are sharded"
    if any(p.is_inference() for p in parameters):
        return "its weights were created in inference mode"
    if getattr(model, "main_input_name", "") not in TOKENS.spellings:
        return "its input isn't tokens"
    device = model.get_input_embeddings().weight.device.type
    if not {"any", device} & {*spec.hardware.kinds} and not spec.hardware.interpreted:
        return f"the kernel doesn't run on {device}"
    return ""


def probe(model: Any) -> float:
    """The loss of a model on six tokens.

    Raises:
        Unproven: its forward failed, or returned no loss.
        UnsupportedFeatureError: a kernel can't be used in it.
    """
    device = model.get_input_embeddings().weight.device
    modes = [(module, module.training) for module in model.modules()]
    # Kernels compute the loss where gradients are on.
    with torch.inference_mode(False), torch.enable_grad():
        tokens = (torch.arange(6, device=device) % (model.get_output_embeddings().out_features - 1) + 1).unsqueeze(0)
        labels = tokens.clone()
        labels[0, 2] = -100
        try:
            for module, _ in modes:  # not by eval(), which replaces forwards where use_kernels is on
                module.training = False
            value = model(**{model.main_input_name: tokens}, labels=labels).loss
        except UnsupportedFeatureError:
            raise
        except Exception as error:  # it needs images, or another kind of tokens
            raise Unproven(f"its forward failed on a probe ({type(error).__name__}: {error})") from error
        finally:
            for module, mode in modes:
                module.training = mode
    if value is None:
        raise Unproven("its forward returned no loss for a probe with labels")
    return float(value.detach())


def head_forward(kernel: Callable[..., Tensor]) -> Callable[..., Any]:
    """The forward of a head: lazy logits within a forward with labels and gradients, logits otherwise.

    With `loss_arguments` it returns the loss of its hidden states: through the head, so that the hooks of the head gather its shards.
    """

    def forward(self: Any, input: Tensor, loss_arguments: dict[str, Any] | None = None) -> Any:
        if loss_arguments is not None:
            return kernel(input, self.weight, bias=self.bias, **loss_arguments)
        current = getattr(self, FORWARD, None) if torch.compiler.is_compiling() else _current.get()
        if current is None or current.head is not self:
            return functional.linear(input, self.weight, self.bias)
        if self._backward_hooks or self._backward_pre_hooks:
            _refuse_backward_hooks()
        return LazyLogits(input, self.weight, self.bias, current)

    return forward


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch 2.11 fails to trace the raise
def _refuse_backward_hooks() -> NoReturn:
    raise refused("a backward hook on the head, since no gradient of logits is computed")


#: The forward with labels and gradients that is running in this thread. Traced code reads the head's attribute instead.
_current: ContextVar[Forward | None] = ContextVar("kernel_compat_current_forward", default=None)


def model_forward(loss: CausalLoss, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model: with labels and gradients, the head returns lazy logits in it.

    Args:
        name: the config's value for the kernel.
        inner: the forward that it wraps, called with the model first.
    """
    parameters = [*inspect.signature(type(loss.model).forward).parameters]
    position = parameters.index(LABELS.named(parameters)) - 1

    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = args[position] if len(args) > position else LABELS.of(kwargs)
        if labels is None or not torch.is_grad_enabled():
            return inner(self, *args, **kwargs)
        head = getattr(self, HEAD)[0]
        current, before = Forward(self, head), getattr(head, FORWARD, None)
        token = None if torch.compiler.is_compiling() else _current.set(current)
        setattr(head, FORWARD, current)
        try:
            outputs = inner(self, *args, **kwargs)
        except UnsupportedFeatureError as error:
            raise _replaced(self, head, name) or error from error.__cause__
        finally:
            setattr(head, FORWARD, before)
            if token is not None:
                _current.reset(token)
        if not current.taken:
            raise _replaced(self, head, name) or refused(
                f"the forward of {type(self).__name__}, which computes its loss from the logits itself or from a hook's"
            )
        current.done = True
        return outputs if torch.compiler.is_compiling() else _computed_in_backward(outputs)

    return forward


def _computed_in_backward(outputs: Any) -> Any:
    """The outputs of a forward; in a reentrant checkpoint's backward, with the logits computed: it takes tensors alone."""
    if torch._C._current_graph_task_id() == -1:
        return outputs
    if isinstance(outputs, tuple):
        return tuple(output.compute() if isinstance(output, LazyLogits) else output for output in outputs)
    if isinstance(getattr(outputs, "logits", None), LazyLogits):
        outputs.logits = outputs.logits.compute()
    return outputs


def _replaced(model: Any, head: Any, name: str) -> UnsupportedFeatureError | None:
    """The error of a forward whose head or loss has been replaced since the ops were applied; None if neither has."""
    loss, outer = model.loss_function, model.get_output_embeddings()
    if isinstance(loss, Loss) and outer is head:
        return None
    part, by = ("head", type(outer)) if isinstance(loss, Loss) else ("loss_function", type(loss))
    return UnsupportedFeatureError(
        f"the {part} of {type(model).__name__}, which has been replaced by a {_path(by)} since the ops were applied",
        f"cross_entropy_loss {name!r}",
        "Undo the ops, and apply them to the model as it is now. Set cross_entropy_loss_implementation='eager' if that fails.",
    )


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
