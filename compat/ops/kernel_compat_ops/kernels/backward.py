"""Kernels without a second derivative, and kernels that torch.compile doesn't trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_derivative_only(
    option: str, *, traced: bool | Callable[..., Any] = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a kernel whose backward must raise with ``create_graph=True``, where it would return gradients without a graph.

    Several results of a kernel must be those of one autograd function.

    Args:
        option: the field and its value, for the error.
        traced: whether torch.compile may trace the kernel, or the function that it traces instead. Where it may not, the graph
            breaks, or ``fullgraph=True`` raises. Traced by torch 2.11, liger-kernel 0.8's fused cross-entropy returns another
            loss in each call, and its rotation wrong gradients: another library's kernel is traced only where a test has
            shown that its results stay right.
    """

    def refuse(gradients: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{option} has no second derivative (create_graph=True)")

    def decorate(kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return (traced if callable(traced) else kernel)(*args, **kwargs)
            results = kernel(*args, **kwargs)
            node = getattr(results[0] if isinstance(results, tuple) else results, "grad_fn", None)
            if node is not None:
                node.register_prehook(refuse)
            return results

        return call if traced else torch.compiler.disable(call)

    return decorate


def untraced_backward(function: Any) -> Any:
    """A subclass of an autograd function whose backward compiled autograd calls and doesn't trace."""
    untraced = staticmethod(torch.compiler.disable(function.backward))
    return type(function.__name__, (function,), {"__doc__": function.__doc__, "backward": untraced})
