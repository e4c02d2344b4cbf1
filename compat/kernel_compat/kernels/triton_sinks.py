"""Sinks in Triton: at most one pass over the output in the forward, and one over the output and its gradient in the backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_sinks", "gradient_of_sinks"]

#: The tokens of a program, all of one head.
_TOKENS = 64


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """`sinks.with_sinks`, in place."""
    rows, wide = _batched(out), _batched_lse(lse)
    if rows.numel():
        with torch.cuda.device_of(out):
            _forward_kernel[_grid(rows)](
                rows,
                wide,
                sinks.contiguous(),
                *_layout(rows),
                *wide.stride()[:2],
                **_sizes(out),
                UNCHANGED=1 - torch.finfo(out.dtype).eps / 4,
            )
    return out, lse


def gradient_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """`sinks._gradient_of_sinks`. Its sums are in the same order in every run."""
    grads, rows, wide = _batched(grad), _batched(out), _batched_lse(lse)
    heads, blocks, batch = grid = _grid(rows)
    partial = lse.new_zeros(batch * blocks, heads)
    if rows.numel():
        with torch.cuda.device_of(out):
            strides = (*_layout(rows), *grads.stride()[:3], *wide.stride()[:2])
            _backward_kernel[grid](grads, rows, wide, sinks.contiguous(), partial, *strides, **_sizes(out))
    return partial.sum(0).to(sinks.dtype)


def _batched(x: Tensor) -> Tensor:
    """(batch, tokens, heads, head_dim), the last dimension contiguous."""
    assert x.stride(-1) == 1
    return x if x.ndim == 4 else x[None]


def _batched_lse(lse: Tensor) -> Tensor:
    """(batch, heads, tokens)."""
    assert lse.stride(-1) == 1
    return lse if lse.ndim == 3 else lse[None]


def _grid(rows: Tensor) -> tuple[int, int, int]:
    # Heads first: programs that run together read memory that lies together.
    return rows.shape[2], triton.cdiv(rows.shape[1], _TOKENS), rows.shape[0]


def _layout(rows: Tensor) -> tuple[int, ...]:
    return rows.shape[1], *rows.stride()[:3]


def _sizes(out: Tensor) -> dict[str, Any]:
    dim = out.shape[-1]
    return {"DIM": dim, "BLOCK_DIM": triton.next_power_of_2(dim), "TOKENS": _TOKENS}


# The number of tokens changes from batch to batch: compiling for one that is 1 or a multiple of 16 gains nothing.
@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _forward_kernel(
    out: tl.tensor,
    lse: tl.tensor,
    sinks: tl.tensor,
    tokens: tl.tensor,
    of_batch: tl.tensor,
    of_token: tl.tensor,
    of_head: tl.tensor,
    lse_of_batch: tl.tensor,
    lse_of_head: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    UNCHANGED: tl.constexpr,
) -> None:
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there = token < tokens
    sums = lse + batch * lse_of_batch + head * lse_of_head + token
    before = tl.load(sums, mask=there, other=0.0)
    infinite = float("inf")
    before = tl.where(before == infinite, -infinite, before)  # FlashAttention-2's for a query that sees no key
    sink = tl.load(sinks + head).to(tl.float32)
    largest = tl.maximum(before, sink)
    after = largest + tl.log(tl.exp(before - largest) + tl.exp(sink - largest))
    factor = tl.where(before == -infinite, 0.0, tl.exp(before - after))
    tl.store(sums, tl.where(largest == -infinite, largest, after), mask=there)
    column = tl.arange(0, BLOCK_DIM)
    # The product of a factor above this limit rounds to the same value: the row is neither read nor written.
    changed = there & ~(factor > UNCHANGED)
    inside = changed[:, None] & (column < DIM)[None, :]
    place = out + batch * of_batch + head * of_head + (token * of_token)[:, None] + column[None, :]
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (value * factor[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _backward_kernel(
    grad: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    sinks: tl.tensor,
    partial: tl.tensor,
    tokens: tl.tensor,
    of_batch: tl.tensor,
    of_token: tl.tensor,
    of_head: tl.tensor,
    grad_of_batch: tl.tensor,
    grad_of_token: tl.tensor,
    grad_of_head: tl.tensor,
    lse_of_batch: tl.tensor,
    lse_of_head: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there = token < tokens
    column = tl.arange(0, BLOCK_DIM)
    inside = there[:, None] & (column < DIM)[None, :]
    value = tl.load(
        out + batch * of_batch + head * of_head + (token * of_token)[:, None] + column[None, :], mask=inside, other=0.0
    ).to(tl.float32)
    gradient = tl.load(
        grad + batch * grad_of_batch + head * grad_of_head + (token * grad_of_token)[:, None] + column[None, :],
        mask=inside,
        other=0.0,
    ).to(tl.float32)
    delta = tl.sum(tl.where(gradient == 0.0, 0.0, gradient * value), axis=1)
    after = tl.load(lse + batch * lse_of_batch + head * lse_of_head + token, mask=there, other=0.0)
    sink = tl.load(sinks + head).to(tl.float32)
    shares = tl.where(delta == 0.0, 0.0, tl.exp(sink - after) * delta)
    row = batch * tl.num_programs(1) + tl.program_id(1)
    tl.store(partial + row * tl.num_programs(0) + head, -tl.sum(shares, axis=0))
