"""RMSNorm in Triton, batch-invariant: a row's result and its gradient are the same to the bit whatever the others are.

One program computes a row, and all rows are computed by one binary: its layout, and so the order in which a row is
summed, follows from the hidden size, the dtypes and the formula alone. Nothing that depends on the batch (strides, the
alignment of an address, the number of rows) reaches the compiler.

Besides the order of the sum of squares, every operation and every rounding of the forward is eager's. The gradients are
computed in float32 and rounded once, where eager rounds between its operations.
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

__all__ = ["MAX_HIDDEN", "rms_norm"]

#: A row is held in the registers of one program.
MAX_HIDDEN = 65536

_NAME = "rms_norm_implementation='triton'"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

#: The backward shares the rows out among programs of this many warps in total, each of which sums its share of the
#: weight's gradient.
_WARPS = 4096


@first_derivative_only(_NAME)
def rms_norm(hidden_states: Tensor, weight: Tensor, eps: float, *, offset: bool, casting: str) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension.

    Args:
        hidden_states: (..., hidden), of any strides; float16, bfloat16 or float32.
        weight: (hidden,).
        offset: multiply by ``1 + weight``.
        casting: ``llama``: the normalized value is rounded to the dtype of `hidden_states` and then multiplied in the
            dtype that it and the weight promote to, which is the result's. ``gemma``: the product alone is rounded, to
            the dtype of `hidden_states`.

    Raises:
        UnsupportedFeatureError: another casting or dtype, or more than `MAX_HIDDEN` channels.
        ValueError: the shapes don't fit.
    """
    if casting not in ("llama", "gemma"):
        raise UnsupportedFeatureError(f"casting {casting!r}", _NAME, "Use 'llama' or 'gemma', or eager.")
    for dtype in (hidden_states.dtype, weight.dtype):
        if dtype not in _DTYPES:
            raise UnsupportedFeatureError(str(dtype), _NAME, "Use float16, bfloat16 or float32, or eager.")
    if weight.dim() != 1 or hidden_states.shape[-1:] != weight.shape:
        raise ValueError(f"weight has shape {tuple(weight.shape)} for hidden_states of {tuple(hidden_states.shape)}")
    if weight.device != hidden_states.device:
        raise ValueError(f"weight is on {weight.device}, hidden_states on {hidden_states.device}")
    if weight.shape[0] > MAX_HIDDEN:
        raise UnsupportedFeatureError(
            f"a hidden size of {weight.shape[0]}", _NAME, f"Use up to {MAX_HIDDEN}, or eager."
        )
    inputs = hidden_states, weight, eps, offset, casting == "gemma"
    normed: Tensor = (
        _forward_op(*inputs)[0] if torch.compiler.is_compiling() or weight.is_meta else _RmsNorm.apply(*inputs)
    )
    return normed


@triton.jit  # type: ignore[untyped-decorator]
def _scale(weight: tl.tensor, OFFSET: tl.constexpr, GEMMA: tl.constexpr) -> tl.tensor:
    """The factor of the normalized value, in float32."""
    scale = weight.to(tl.float32)
    if OFFSET:
        scale = scale + 1.0
        if not GEMMA:
            scale = scale.to(weight.dtype).to(tl.float32)
    return scale


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    rstd: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    OFFSET: tl.constexpr,
    GEMMA: tl.constexpr,
) -> None:
    """One program a row: `x` and `out` are (rows, HIDDEN), `weight` (HIDDEN,), `rstd` (rows,), all contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    value = tl.load(x + row * HIDDEN + columns, mask=inside, other=0.0)
    scale = _scale(tl.load(weight + columns, mask=inside, other=0.0), OFFSET, GEMMA)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, axis=0) * (1.0 / HIDDEN) + eps)
    normal = wide * factor
    if not GEMMA:
        normal = normal.to(value.dtype).to(tl.float32)
    tl.store(out + row * HIDDEN + columns, (normal * scale).to(out.dtype.element_ty), mask=inside)
    tl.store(rstd + row, factor)


# The number of rows must not reach the compiler: see the top of this module.
@triton.jit(do_not_specialize=["rows", "share"])  # type: ignore[untyped-decorator]
def _backward_kernel(
    grad: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    rstd: tl.tensor,
    grad_x: tl.tensor,
    partial: tl.tensor,
    rows: tl.tensor,
    share: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    OFFSET: tl.constexpr,
    GEMMA: tl.constexpr,
) -> None:
    """One program for every `share` rows: `grad`, `x` and `grad_x` are (rows, HIDDEN), `rstd` (rows,).

    `partial` (programs, HIDDEN) gets each program's sum of the weight's gradient.
    """
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    scale = _scale(tl.load(weight + columns, mask=inside, other=0.0), OFFSET, GEMMA)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program * share, tl.minimum((program + 1) * share, rows)):
        grad_row = tl.load(grad + row * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row * HIDDEN + columns, mask=inside, other=0.0)
        factor = tl.load(rstd + row)
        normal = value.to(tl.float32) * factor
        scaled = grad_row * scale
        mean = tl.sum(scaled * normal, axis=0) * (1.0 / HIDDEN)
        result = (scaled - normal * mean) * factor
        tl.store(grad_x + row * HIDDEN + columns, result.to(grad_x.dtype.element_ty), mask=inside)
        if GEMMA:
            total += grad_row * normal
        else:
            total += grad_row * normal.to(value.dtype).to(tl.float32)
    tl.store(partial + program * HIDDEN + columns, total, mask=inside)


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous and at an address that every load can be vectorized at, copied where it is not."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _constants(hidden: int, offset: bool, gemma: bool) -> dict[str, Any]:
    block = triton.next_power_of_2(hidden)
    return {
        "HIDDEN": hidden,
        "BLOCK": block,
        "OFFSET": offset,
        "GEMMA": gemma,
        "num_warps": min(max(block // 512, 1), 32),
        # As in eager, where each operation is a kernel and rounds its result.
        "enable_fp_fusion": False,
    }


def _forward(x: Tensor, weight: Tensor, eps: float, offset: bool, gemma: bool) -> tuple[Tensor, Tensor]:
    """The norm (..., hidden) of `x` (..., hidden), and ``1 / sqrt(mean(x^2) + eps)`` of each row (...)."""
    out, rstd = _forward_outputs(x, weight, eps, offset, gemma)
    if out.numel():
        with torch.cuda.device_of(x):
            constants = _constants(x.shape[-1], offset, gemma)
            _forward_kernel[(rstd.numel(),)](_aligned(x), _aligned(weight), out, rstd, eps, **constants)
    return out, rstd


def _forward_outputs(x: Tensor, weight: Tensor, eps: float, offset: bool, gemma: bool) -> tuple[Tensor, Tensor]:
    dtype = x.dtype if gemma else torch.promote_types(x.dtype, weight.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: bool, gemma: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of `x` (..., hidden) and `weight` (hidden,), from that of the norm and `rstd` (...)."""
    grad_x, grad_weight = _backward_outputs(grad, x, weight)
    if not x.numel():
        return grad_x, grad_weight.zero_()
    rows, hidden = rstd.numel(), x.shape[-1]
    constants = _constants(hidden, offset, gemma)
    share = triton.cdiv(rows, _WARPS // constants["num_warps"])
    partial = x.new_empty((triton.cdiv(rows, share), hidden), dtype=torch.float32)
    inputs = (*map(_aligned, (grad, x, weight)), rstd, grad_x, partial, rows, share)
    with torch.cuda.device_of(x):
        _backward_kernel[(partial.shape[0],)](*inputs, **constants)
    return grad_x, partial.sum(0).to(weight.dtype)


def _backward_outputs(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


_forward_op = operator("triton_rms_norm", _forward, _forward_outputs)
_backward_op = operator("triton_rms_norm_backward", _backward, _backward_outputs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, *ctx.formula = inputs
    ctx.save_for_backward(x, weight, output[1])


def _gradients(backward: Any, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*backward(grad, *ctx.saved_tensors, *ctx.formula), None, None, None)


_forward_op.register_autograd(lambda ctx, grad, _: _gradients(_backward_op, ctx, grad), setup_context=_keep)


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _forward(*inputs)
        _keep(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(_backward, ctx, grad)
