"""Cross-entropy of a linear layer's outputs, computed a chunk of tokens at a time: plain torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..losses.labels import checked
from ..losses.lazy import Pointwise, applied, as_autocast
from .backward import first_derivative_only

#: The fewest and the most tokens in a chunk. Fewer would leave a GPU's matrix units idle.
SMALLEST, LARGEST = 256, 2048


@first_derivative_only("cross_entropy_loss_implementation='chunk_loss'")
def chunk_loss(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    pointwise: Sequence[Pointwise] = (),
) -> Tensor:
    """The cross-entropy of ``linear(hidden_states, weight, bias)``, computed a chunk of tokens at a time.

    The gradients are computed with the loss, so that no chunk is kept: besides the results it needs memory for a chunk's
    logits and, where the weight has a gradient, for one float32 tensor of the weight's size. In half precision logits and their
    gradients are rounded in the places where those of a linear layer with a float32 loss are.

    Args:
        hidden_states: (tokens, hidden).
        weight: (vocabulary, hidden).
        labels: (tokens,), int64 or uint8: the class of each token, or `ignore_index`.
        bias: (vocabulary,).
        reduction: the mean over the labels that are not `ignore_index`, or their sum.
        pointwise: operations on each logit before the loss, in order.

    Returns:
        The loss: one number in float32, or in float64 for such hidden states.

    Raises:
        ValueError: the shapes of hidden states and labels differ, or another reduction.
        TypeError: labels of another dtype, or an `ignore_index` that is no integer.
        RuntimeError: a label is no class; or in the backward, with ``create_graph=True``.
    """
    if hidden_states.dim() != 2 or labels.shape != hidden_states.shape[:1]:
        shapes = f"{tuple(hidden_states.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"hidden_states must be (tokens, hidden) and labels (tokens,), not {shapes}")
    labels, ignore_index = checked(labels, len(hidden_states), ignore_index, reduction)
    inputs = as_autocast(hidden_states, weight, bias)
    if not torch.is_grad_enabled():
        inputs = tuple(None if x is None else x.detach() for x in inputs)
    loss: Tensor = _ChunkLoss.apply(*inputs, labels, ignore_index, reduction, tuple(pointwise))
    return loss


def chunk_size(hidden: int, with_weight: bool) -> int:
    """The number of tokens in a chunk.

    Where the weight has a gradient, a chunk's logits take half of the weight's memory: each chunk reads and writes the
    whole gradient of the weight, which takes longer than the products of a smaller chunk.
    """
    return max(SMALLEST, min(hidden // 2, LARGEST) // SMALLEST * SMALLEST) if with_weight else 2 * SMALLEST


class _ChunkLoss(torch.autograd.Function):  # type: ignore[misc]
    """`chunk_loss`, with the shapes of its arguments; `labels` in int64."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignore_index: int,
        reduction: str,
        pointwise: tuple[Pointwise, ...],
    ) -> Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        counted = labels != ignore_index  # (tokens,)
        divisor = counted.sum() if reduction == "mean" else None
        hidden_gradient = torch.empty_like(hidden_states) if needs_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=wide) if bias is not None and needs_bias else None
        loss = torch.zeros((), dtype=wide, device=hidden_states.device)
        size = chunk_size(hidden_states.shape[1], needs_weight)
        for start in range(0, hidden_states.shape[0], size):
            part = slice(start, start + size)
            counts = counted[part].unsqueeze(-1)  # (chunk, 1)
            # Masked here rather than in the gradient of the logits, whose rows are longer.
            rows = hidden_states[part].masked_fill(~counts, 0.0)  # (chunk, hidden)
            targets = labels[part].unsqueeze(-1).where(counts, 0)  # (chunk, 1)
            logits = [linear(rows, weight, bias)]  # after each operation: (chunk, vocabulary)
            for operation in pointwise:
                logits.append(applied(operation, logits[-1]))
            log_probabilities = logits[-1].log_softmax(-1, dtype=wide)
            of_targets = log_probabilities.gather(-1, targets)  # (chunk, 1)
            # Not in place: traced by torch.compile, a result that the forward has changed in place has no gradient.
            loss = loss - of_targets.masked_fill(~counts, 0.0).sum()
            if not (needs_hidden or needs_weight or needs_bias):
                continue
            # exp - 1 of the targets, before it is rounded: rounded first, a probability near 1 would leave 0.
            gradient = torch.exp(log_probabilities, out=torch.empty_like(logits[-1]))  # (chunk, vocabulary)
            gradient.scatter_(-1, targets, torch.expm1(of_targets).to(gradient.dtype))
            del log_probabilities
            if bias_gradient is not None:
                gradient.masked_fill_(~counts, 0.0)
            for index in reversed(range(len(pointwise))):
                gradient = _backward(pointwise[index], gradient, logits[index], logits[index + 1])
            if hidden_gradient is not None:
                hidden_gradient[part] = (gradient @ weight).masked_fill_(~counts, 0.0)
            if weight_gradient is not None:
                weight_gradient += gradient.mT @ rows
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0, dtype=wide)
        # Gradients of the sum, which half precision can hold; the backward divides and multiplies them in float32.
        ctx.save_for_backward(divisor, hidden_gradient, weight_gradient, bias_gradient)
        ctx.dtypes = (hidden_states.dtype, weight.dtype, None if bias is None else bias.dtype)
        return loss if divisor is None else loss / divisor

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Any, ...]:
        divisor, *gradients = ctx.saved_tensors
        if divisor is not None:
            factor = factor / divisor.clamp_min(1)  # of no tokens the loss is NaN, and the gradient 0
        factor = factor.reshape(1)  # of no dimension, it would be rounded to half precision
        scaled = (
            None if gradient is None else torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None, None)


def _backward(operation: Pointwise, gradient: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """The gradient of the logits before an operation, from that of the logits after it; all (chunk, vocabulary)."""
    if operation.kind == "tanh":
        return gradient * (1 - after * after)
    return gradient.to(before.dtype) if operation.kind == "to" else applied(operation, gradient)
