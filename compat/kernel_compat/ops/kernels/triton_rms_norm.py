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

from ...errors import UnsupportedFeatureError
from .backward import refuse_second_derivative

__all__ = ["MAX_HIDDEN", "rms_norm"]

#: A row is held in the registers of one program.
MAX_HIDDEN = 65536

_NAME = "rms_norm_implementation='triton'"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

#: The backward shares the rows out among programs of this many warps in total, each of which sums its share of the
#: weight's gradient.
_WARPS = 4096


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
    if torch.compiler.is_compiling() or hidden_states.is_meta:
        out, _ = _forward_op(hidden_states, weight, eps, offset, casting == "gemma")
        return out
    normed: Tensor = _RmsNorm.apply(hidden_states, weight, eps, offset, casting == "gemma")
    refuse_second_derivative(normed, _NAME)
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
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    scale = _scale(tl.load(weight + columns, mask=inside, other=0.0), OFFSET, GEMMA)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program * share, tl.minimum((program + 1) * share, rows)):
        given = tl.load(grad + row * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + row * HIDDEN + columns, mask=inside, other=0.0)
        factor = tl.load(rstd + row)
        normal = value.to(tl.float32) * factor
        scaled = given * scale
        mean = tl.sum(scaled * normal, axis=0) * (1.0 / HIDDEN)
        result = (scaled - normal * mean) * factor
        tl.store(grad_x + row * HIDDEN + columns, result.to(grad_x.dtype.element_ty), mask=inside)
        if GEMMA:
            total += given * normal
        else:
            total += given * normal.to(value.dtype).to(tl.float32)
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


# torch.compile calls an opaque custom operator. `torch.library.triton_op` would work as well, but its `wrap_triton` refuses
# interpreted kernels, and inductor fuses nothing with a Triton kernel that is not its own. Eager code calls an
# autograd.Function: dispatching a custom operator with a gradient takes longer than a small kernel. Dynamo never traces
# that function: it mixes up its arguments, or refuses the same tensor twice. The operator also runs on the meta device.


def _forward(x: Tensor, weight: Tensor, eps: float, offset: bool, gemma: bool) -> tuple[Tensor, Tensor]:
    out, rstd = _forward_outputs(x, weight, eps, offset, gemma)
    if out.numel():
        with torch.cuda.device_of(x):
            constants = _constants(x.shape[-1], offset, gemma)
            _forward_kernel[(rstd.numel(),)](_aligned(x), _aligned(weight), out, rstd, eps, **constants)
    return out, rstd


def _forward_outputs(x: Tensor, weight: Tensor, eps: float, offset: bool, gemma: bool) -> tuple[Tensor, Tensor]:
    dtype = x.dtype if gemma else torch.promote_types(x.dtype, weight.dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    return out, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: bool, gemma: bool
) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = _backward_outputs(grad, x, weight, rstd, offset, gemma)
    rows, hidden = rstd.numel(), x.shape[-1]
    if not x.numel():
        return grad_x, grad_weight.zero_()
    constants = _constants(hidden, offset, gemma)
    share = triton.cdiv(rows, _WARPS // constants["num_warps"])
    partial = torch.empty((triton.cdiv(rows, share), hidden), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _backward_kernel[(partial.shape[0],)](
            _aligned(grad),
            _aligned(x),
            _aligned(weight),
            rstd,
            grad_x,
            partial,
            rows,
            share,
            **constants,
        )
    return grad_x, partial.sum(0).to(weight.dtype)


def _backward_outputs(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: bool, gemma: bool
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(weight.shape, dtype=weight.dtype, device=x.device),
    )


_forward_op = torch.library.custom_op(
    "kernel_compat::triton_rms_norm",
    _forward,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, float eps, bool offset, bool gemma) -> (Tensor, Tensor)",
)
_forward_op.register_fake(_forward_outputs)
_backward_op = torch.library.custom_op(
    "kernel_compat::triton_rms_norm_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weight, Tensor rstd, bool offset, bool gemma) -> (Tensor, Tensor)",
)
_backward_op.register_fake(_backward_outputs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.offset, ctx.gemma = inputs
    ctx.save_for_backward(x, weight, output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, rstd = ctx.saved_tensors
    return (*_backward_op(grad, x, weight, rstd, ctx.offset, ctx.gemma), None, None, None)


_forward_op.register_autograd(_differentiate, setup_context=_keep)


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _forward(*inputs)
        _keep(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        return (*_backward(grad, x, weight, rstd, ctx.offset, ctx.gemma), None, None, None)
