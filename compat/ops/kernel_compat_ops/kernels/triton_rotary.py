"""Rotary position embedding in Triton, the half-split rotation: ``x * cos + rotate_half(x) * sin``.

There is no sum of more than two terms and every value has one writer, so results are deterministic. They are eager's to
the bit, gradients included: both products and their sum are rounded where eager rounds them, and don't fuse.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_compat.errors import UnsupportedFeatureError
from kernel_compat.kernels.custom_operator import operator

__all__ = ["rotary_pos_emb"]

_NAME = "rotary_pos_emb_implementation='triton'"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

#: The number of channels of one half, over several heads, that a program rotates at a time.
_TILE = 2048


def rotary_pos_emb(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first `rotary_dim` channels of every head; the others pass.

    Args:
        query: (batch, heads, length, head_dim), of any strides; float16, bfloat16 or float32.
        key: (batch, kv_heads, length, head_dim), likewise.
        cos, sin: (batch or 1, length, rotary_dim), of one dtype, which need no gradient. Their halves may differ.

    Returns:
        New tensors in the dtype that the tensor and `cos` promote to, with the strides of query and key.

    Raises:
        UnsupportedFeatureError: another dtype, or a gradient for `cos` or `sin`.
        ValueError: the shapes don't fit, or `rotary_dim` is odd.
    """
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise UnsupportedFeatureError("gradients for cos and sin", _NAME, "Detach them, or use eager.")
    for dtype in (query.dtype, key.dtype, cos.dtype):
        if dtype not in _DTYPES:
            raise UnsupportedFeatureError(str(dtype), _NAME, "Use float16, bfloat16 or float32, or eager.")
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(f"cos is {tuple(cos.shape)} in {cos.dtype}, sin {tuple(sin.shape)} in {sin.dtype}")
    if cos.dim() != 3 or cos.shape[2] % 2:
        raise ValueError(f"cos has shape {tuple(cos.shape)}, not (batch or 1, length, rotary_dim), rotary_dim even")
    for name, x in (("query", query), ("key", key)):
        fits = x.dim() == 4 and cos.shape[0] in (1, x.shape[0]) and cos.shape[1] == x.shape[2]
        if not fits or cos.shape[2] > x.shape[3]:
            raise ValueError(f"{name} of shape {tuple(x.shape)} does not go with cos of {tuple(cos.shape)}")
        if not x.device == cos.device == sin.device:
            raise ValueError(f"{name} is on {x.device}, cos on {cos.device}, sin on {sin.device}")
    rotate = _rotate_op if torch.compiler.is_compiling() or query.is_meta else _Rotate.apply
    return (
        rotate(query, cos, sin, torch.promote_types(query.dtype, cos.dtype), False),
        rotate(key, cos, sin, torch.promote_types(key.dtype, cos.dtype), False),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    length: tl.tensor,
    x_batch: tl.tensor,
    x_head: tl.tensor,
    x_position: tl.tensor,
    x_channel: tl.tensor,
    out_batch: tl.tensor,
    out_head: tl.tensor,
    out_position: tl.tensor,
    out_channel: tl.tensor,
    cos_batch: tl.tensor,
    ROTARY: tl.constexpr,
    REST: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """One program for a token and `BLOCK_HEADS` of its heads.

    `x` and `out` are (batch, heads, length, ROTARY + REST) of any strides; `cos` and `sin` (batch or 1, length, ROTARY), contiguous.
    """
    batch = tl.program_id(0).to(tl.int64) // length
    position = tl.program_id(0).to(tl.int64) % length
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)[:, None]
    x += batch * x_batch + head * x_head + position * x_position
    out += batch * out_batch + head * out_head + position * out_position
    half: tl.constexpr = ROTARY // 2
    channel = tl.arange(0, BLOCK_HALF)
    inside = channel < half
    angle = batch * cos_batch + position * ROTARY + channel
    cos1 = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos + angle + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin + angle + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    valid = (head < heads) & inside[None, :]
    x1 = tl.load(x + channel[None, :] * x_channel, mask=valid, other=0.0).to(tl.float32)
    x2 = tl.load(x + (channel[None, :] + half) * x_channel, mask=valid, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    out1 = (x1 * cos1).to(dtype).to(tl.float32)
    out2 = (x2 * cos2).to(dtype).to(tl.float32)
    if TRANSPOSED:
        out1 += (x2 * sin2).to(dtype).to(tl.float32)
        out2 -= (x1 * sin1).to(dtype).to(tl.float32)
    else:
        out1 -= (x2 * sin1).to(dtype).to(tl.float32)
        out2 += (x1 * sin2).to(dtype).to(tl.float32)
    tl.store(out + channel[None, :] * out_channel, out1.to(dtype), mask=valid)
    tl.store(out + (channel[None, :] + half) * out_channel, out2.to(dtype), mask=valid)
    if REST > 0:
        rest = ROTARY + tl.arange(0, BLOCK_REST)[None, :]
        valid = (head < heads) & (rest < ROTARY + REST)
        tl.store(out + rest * out_channel, tl.load(x + rest * x_channel, mask=valid, other=0.0).to(dtype), mask=valid)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    """`x` (batch, heads, length, head_dim), rotated; or, for the backward, multiplied by the transposed matrix of the rotation."""
    out = _output(x, cos, sin, dtype, transposed)
    if not out.numel():
        return out
    batch, heads, length, head_dim = x.shape
    rotary = cos.shape[-1]
    half = triton.next_power_of_2(max(rotary // 2, 1))
    block_heads = min(triton.next_power_of_2(heads), max(_TILE // half, 1))
    sizes = heads, length, *x.stride(), *out.stride(), 0 if cos.shape[0] == 1 else length * rotary
    with torch.cuda.device_of(x):
        _rotate_kernel[(batch * length, triton.cdiv(heads, block_heads))](
            x,
            cos.contiguous(),
            sin.contiguous(),
            out,
            *sizes,
            ROTARY=rotary,
            REST=head_dim - rotary,
            TRANSPOSED=transposed,
            BLOCK_HEADS=block_heads,
            BLOCK_HALF=half,
            BLOCK_REST=triton.next_power_of_2(max(head_dim - rotary, 1)),
            # A product that fuses with the sum would not be rounded.
            enable_fp_fusion=False,
        )
    return out


def _output(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


_rotate_op = operator("triton_rotary", _rotate, _output)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, _, transposed = inputs
    ctx.rest = x.dtype, not transposed
    ctx.save_for_backward(cos, sin)


def _gradients(rotate: Any, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return rotate(grad, *ctx.saved_tensors, *ctx.rest), None, None, None, None


_rotate_op.register_autograd(lambda ctx, grad: _gradients(_rotate_op, ctx, grad), setup_context=_keep)


class _Rotate(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _rotate(*inputs)
        _keep(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(_Rotate.apply, ctx, grad)
