"""The load-balancing loss of mixture-of-experts models in Triton: transformers' `load_balancing_loss_func`.

transformers 4.54 to 5.23 compute the same formula and round in different places. The softmax is rounded to the logits' dtype
(under autocast it is float32), and experts are chosen by the rounded probabilities, here as well. Among equal
probabilities torch.topk takes any; this kernel takes the first. The sums over tokens are float32, unrounded, as
upstream's since 5.16; before, it rounds each expert's mean probability to the logits' dtype. The gradient is computed
in float32 and rounded once, where upstream rounds it before the softmax's backward as well.

Every program sums a fixed share of the tokens, and the sums are added in a fixed order: results are deterministic.
Nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_compat.errors import UnsupportedFeatureError
from kernel_compat.kernels.custom_operator import operator

from .backward import first_derivative_only

__all__ = ["load_balancing_loss"]

_NAME = "load_balancing_loss_implementation='triton'"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

#: The number of logits that a program holds at a time, and the most programs that share a layer's tokens.
_TILE, _PROGRAMS = 2048, 256


@first_derivative_only(_NAME)
def load_balancing_loss(
    gate_logits: tuple[Tensor, ...] | Tensor | None,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Tensor | int:
    """``experts * sum over experts of (share of the tokens routed to it) * (its mean probability)``.

    Args:
        gate_logits: one tensor a layer of (batch * length, num_experts); float16, bfloat16 or float32, on any device.
        num_experts: the size of their last dimension.
        top_k: to how many experts a token goes.
        attention_mask: (batch, length): what each token counts; 0 for padding.

    Returns:
        A float32 scalar on the first layer's device. The number 0 if `gate_logits` is no tuple, as upstream.

    Raises:
        UnsupportedFeatureError: another dtype, or a gradient for the mask.
        ValueError: the shapes don't fit, or there is no layer.
    """
    if not isinstance(gate_logits, tuple):
        return 0
    if not gate_logits:
        raise ValueError("gate_logits is empty: there is no layer to balance")
    if attention_mask is not None and torch.is_grad_enabled() and attention_mask.requires_grad:
        raise UnsupportedFeatureError("a gradient for attention_mask", _NAME, "Detach it, or use eager.")
    for layer in gate_logits:
        if layer.dtype not in _DTYPES:
            raise UnsupportedFeatureError(str(layer.dtype), _NAME, "Use float16, bfloat16 or float32, or eager.")
        if layer.dim() != 2 or layer.shape[1] != num_experts:
            raise ValueError(f"gate_logits of shape {tuple(layer.shape)}, not (batch * length, {num_experts})")
        if attention_mask is not None and layer.shape[0] != attention_mask.numel():
            raise ValueError(f"attention_mask of shape {tuple(attention_mask.shape)} for {layer.shape[0]} tokens")
    if not 1 <= top_k <= gate_logits[0].shape[1]:
        raise ValueError(f"top_k is {top_k} of {num_experts} experts")
    device = gate_logits[0].device
    mask = None if attention_mask is None else attention_mask.reshape(-1).to(device, torch.float32)
    # Autocast makes a softmax float32 on some devices, whatever the logits are.
    sample = gate_logits[0][:0].detach()
    rounded = sample.softmax(-1).dtype == sample.dtype
    logits = [layer.to(device) for layer in gate_logits]
    graph = torch.compiler.is_compiling() or logits[0].is_meta
    loss: Tensor = _forward_op(logits, mask, top_k, rounded)[0] if graph else _Loss.apply(mask, top_k, rounded, *logits)
    return loss


@triton.jit  # type: ignore[untyped-decorator]
def _probabilities(
    logits: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The softmax in float32 (ROWS, BLOCK) of some rows: 0 after the last expert, a finite value in rows after the last."""
    expert = tl.arange(0, BLOCK)[None, :]
    valid = (row < rows)[:, None] & (expert < EXPERTS)
    logit = tl.load(logits + row[:, None] * row_stride + expert * column_stride, mask=valid, other=0.0).to(tl.float32)
    logit = tl.where(expert < EXPERTS, logit, float("-inf"))
    power = tl.exp(logit - tl.max(logit, axis=1)[:, None])
    return power / tl.sum(power, axis=1)[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _sums_kernel(
    logits: tl.tensor,
    mask: tl.tensor,
    partial: tl.tensor,
    rows: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    MASKED: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """For a share of a layer's tokens, the number routed to each expert and the sum of each expert's probability.

    `logits` is (rows, EXPERTS), `mask` (rows,), `partial` (programs, 2, EXPERTS).
    """
    program = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        probability = _probabilities(logits, row, rows, row_stride, column_stride, EXPERTS, BLOCK)
        if ROUNDED:
            probability = probability.to(logits.dtype.element_ty).to(tl.float32)
        if MASKED:
            weight = tl.load(mask + row, mask=row < rows, other=0.0)[:, None]
        else:
            weight = (row < rows).to(tl.float32)[:, None]
        total += tl.sum(probability * weight, axis=0)
        left = tl.where(expert[None, :] < EXPERTS, probability, -1.0)
        for _ in range(TOP_K):
            best = tl.max(left, axis=1)[:, None]
            first_best = tl.min(tl.where(left == best, expert[None, :], BLOCK), axis=1)[:, None]
            left = tl.where(expert[None, :] == first_best, -2.0, left)
        count += tl.sum(tl.where(left == -2.0, weight, 0.0), axis=0)
    partial += program * 2 * EXPERTS + expert
    tl.store(partial, count, mask=expert < EXPERTS)
    tl.store(partial + EXPERTS, total, mask=expert < EXPERTS)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(
    grad: tl.tensor,
    logits: tl.tensor,
    mask: tl.tensor,
    slope: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    EXPERTS: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The softmax's backward: `out` (rows, EXPERTS) from `logits` (rows, EXPERTS), `mask` (rows,) and the scalar `grad`.

    `slope` (EXPERTS,) is the loss' derivative by the sum of each expert's probability.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK)[None, :]
    probability = _probabilities(logits, row, rows, row_stride, column_stride, EXPERTS, BLOCK)
    weighted_slope = tl.load(slope + expert, mask=expert < EXPERTS, other=0.0) * tl.load(grad)
    if MASKED:
        weighted_slope = weighted_slope * tl.load(mask + row, mask=row < rows, other=0.0)[:, None]
    result = probability * (weighted_slope - tl.sum(weighted_slope * probability, axis=1)[:, None])
    valid = (row < rows)[:, None] & (expert < EXPERTS)
    tl.store(out + row[:, None] * EXPERTS + expert, result.to(out.dtype.element_ty), mask=valid)


def _blocks(experts: int) -> dict[str, Any]:
    block = triton.next_power_of_2(experts)
    return {"EXPERTS": experts, "BLOCK": block, "ROWS": max(_TILE // block, 1), "enable_fp_fusion": False}


def _forward(logits: list[Tensor], mask: Tensor | None, top_k: int, rounded: bool) -> tuple[Tensor, Tensor]:
    """The loss, a scalar, and its derivative (experts,) by the sum of each expert's probability.

    `logits` are (rows, experts) for each layer, `mask` (rows,).
    """
    experts = logits[0].shape[1]
    blocks = _blocks(experts)
    programs = min(_PROGRAMS, triton.cdiv(max(1, *map(len, logits)), blocks["ROWS"]))
    # The tokens that each program counted for each expert, and their probabilities.
    partial = logits[0].new_empty((len(logits), programs, 2, experts), dtype=torch.float32)
    constants = {"TOP_K": top_k, "MASKED": mask is not None, "ROUNDED": rounded, **blocks}
    with torch.cuda.device_of(partial):
        for layer, sums in zip(logits, partial, strict=True):
            _sums_kernel[(programs,)](layer, mask, sums, len(layer), *layer.stride(), **constants)
    tokens = sum(map(len, logits)) if mask is None else mask.sum() * len(logits)
    routed, probability = partial.flatten(0, 1).sum(0) / tokens  # (experts,) each
    return (routed * probability).sum() * experts, routed * experts / tokens


def _forward_outputs(logits: list[Tensor], mask: Tensor | None, top_k: int, rounded: bool) -> tuple[Tensor, Tensor]:
    first = logits[0]
    return first.new_empty((), dtype=torch.float32), first.new_empty(first.shape[1], dtype=torch.float32)


def _backward(grad: Tensor, logits: list[Tensor], mask: Tensor | None, slope: Tensor) -> list[Tensor]:
    """The gradients (rows, experts) of each layer's logits, from the scalar `grad`."""
    grads = _backward_outputs(grad, logits, mask, slope)
    constants = {"MASKED": mask is not None, **_blocks(len(slope))}
    with torch.cuda.device_of(slope):
        for layer, out in zip(logits, grads, strict=True):
            if rows := len(layer):
                grid = (triton.cdiv(rows, constants["ROWS"]),)
                _gradient_kernel[grid](grad, layer, mask, slope, out, rows, *layer.stride(), **constants)
    return grads


def _backward_outputs(grad: Tensor, logits: list[Tensor], mask: Tensor | None, slope: Tensor) -> list[Tensor]:
    return [layer.new_empty(layer.shape) for layer in logits]


_forward_op = operator("triton_load_balancing_loss", _forward, _forward_outputs)
_backward_op = operator("triton_load_balancing_loss_backward", _backward, _backward_outputs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, mask, _, _ = inputs
    ctx.save_for_backward(mask, output[1], *logits)


def _gradients(backward: Any, ctx: Any, grad: Tensor) -> list[Tensor]:
    mask, slope, *logits = ctx.saved_tensors
    grads: list[Tensor] = backward(grad, logits, mask, slope)
    return grads


_forward_op.register_autograd(
    lambda ctx, grad, _: (_gradients(_backward_op, ctx, grad), None, None, None), setup_context=_keep
)


class _Loss(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, mask: Tensor | None, top_k: int, rounded: bool, *logits: Tensor) -> Tensor:
        inputs = list(logits), mask, top_k, rounded
        output = _forward(*inputs)
        _keep(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_gradients(_backward, ctx, grad)
