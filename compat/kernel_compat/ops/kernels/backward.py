"""Errors of kernels that have no second derivative, and kernels that torch.compile must not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def refuse_second_derivative(out: Any, option: str) -> None:
    """Make the backward of a kernel raise with ``create_graph=True``, where it would return gradients without a graph.

    Args:
        out: a tensor that the kernel's autograd function has returned; nothing is done for one without a graph.
        option: the field and its value, for the error.
    """
    node = None if torch.compiler.is_compiling() else out.grad_fn
    if node is None:
        return

    def before(gradients: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{option} has no second derivative (create_graph=True)")

    node.register_prehook(before)


def untraced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, called by torch.compile through a graph break; with ``fullgraph=True`` torch.compile raises.

    Traced by torch 2.11, liger-kernel 0.8's fused cross-entropy returns another loss in each call. A library's kernel is
    traced only where a test has shown that its results stay right.
    """
    wrapped: Callable[..., Any] = torch.compiler.disable(kernel)
    return wrapped


__all__ = ["refuse_second_derivative", "untraced"]
