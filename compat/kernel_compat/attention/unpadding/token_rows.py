"""Rows of real tokens taken out of a padded batch, and put back.

Each is the gradient of the other, which autograd doesn't know: the gradient of ``index_select`` adds up atomically.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["put_rows", "take_rows"]


def take_rows(x: Tensor, order: Tensor, count: int) -> Tensor:
    """The rows ``order[:count]`` of x.

    Args:
        x: (rows, ...).
        order: (rows,) int64, a permutation of the rows.
    """
    return _apply(_Take, _take, x, order, count)


def put_rows(x: Tensor, order: Tensor, count: int) -> Tensor:
    """The tensor whose rows ``order[:count]`` are those of x, and whose others are zero.

    Args:
        x: (count, ...).
        order: (rows,) int64, a permutation of the rows.

    Returns:
        (rows, ...).
    """
    return _apply(_Put, _put, x, order, count)


def _apply(differentiable: Any, function: Any, x: Tensor, order: Tensor, count: int) -> Tensor:
    traced = torch.compiler.is_compiling()  # whose compiler has gradients of its own for these operations
    found: Tensor = (function if traced or not x.requires_grad else differentiable.apply)(x, order, count)
    return found


def _take(x: Tensor, order: Tensor, count: int) -> Tensor:
    return x.index_select(0, order[:count])


def _put(x: Tensor, order: Tensor, count: int) -> Tensor:
    words = _as_words(x)
    rows = words.new_empty(order.shape[0], *words.shape[1:])
    rows = rows.index_fill_(0, order[count:], 0).index_copy_(0, order[:count], words)
    return rows if words is x else rows.view(x.dtype)


def _as_words(x: Tensor) -> Tensor:
    """The same memory as int64, if rows are a whole number of them: an index kernel's time is that of its elements, not bytes."""
    size = 8 // x.element_size()
    if torch.compiler.is_compiling() or x.ndim < 2 or x.shape[-1] % size or x.storage_offset() % size:
        return x
    return x.contiguous().view(torch.int64)


class _Take(torch.autograd.Function):  # type: ignore[misc]
    forward = staticmethod(_take)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, order, ctx.count = inputs
        ctx.save_for_backward(order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return put_rows(grad, order, ctx.count), None, None


class _Put(torch.autograd.Function):  # type: ignore[misc]
    forward = staticmethod(_put)
    setup_context = _Take.setup_context

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return take_rows(grad, order, ctx.count), None, None
