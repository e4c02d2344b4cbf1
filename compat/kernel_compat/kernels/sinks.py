"""Attention by a kernel's primitives: with sinks for kernels that have none, and as one operator for torch.compile.

A sink s adds exp(s) to the denominator of each row's softmax. If l is the log-sum-exp of a row's scores, l' = log(exp(l) + exp(s))
is the one with the sink, and the output is that without sinks times exp(l - l'). A flash backward computes the probabilities
again, as exp(score - l'): from l' and the output with sinks its gradients are exact. The gradient of a head's sink is
-exp(s - l') * sum(grad * output), summed over the rows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import Tensor

from .custom_operator import operator
from .options import Lengths
from .primitives import Pattern, Primitives

__all__ = ["attention_by_primitives", "register", "with_sinks"]


#: Primitives by the name of their kernel: a custom operator takes no Python objects.
_primitives: dict[str, Primitives] = {}


def register(kernel: str, primitives: Primitives) -> None:
    """Make a kernel's primitives known to `attention_by_primitives`."""
    _primitives[kernel] = primitives


def attention_by_primitives(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, lengths: Lengths | None, pattern: Pattern
) -> Tensor:
    """Attention by a kernel whose primitives were registered; sinks are computed from its log-sum-exp.

    Under torch.compile it is one custom operator.

    Args:
        kernel: the name that the primitives were registered under.
        q: (batch, length, heads, head_dim), or (tokens, heads, head_dim) with lengths.
        k, v: likewise, with kv_heads.
        sinks: (heads,), or None for attention without sinks.

    Returns:
        As `q`, with the head dimension of `v`.
    """
    inputs = (q, k, v, sinks, *(lengths or (None, None, 0, 0)), *pattern, kernel)
    if torch.compiler.is_compiling() or q.is_meta:
        return _forward_op(*inputs)[0]
    return _Attention.apply(*inputs)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """An output and its log-sum-exp with sinks. Writes into both where the device runs Triton.

    Args:
        out: (batch, length, heads, head_dim) or (tokens, heads, head_dim).
        lse: (batch, heads, length) or (heads, tokens). Infinite, of any sign, for a query that sees no key.
        sinks: (heads,).
    """
    if runs_triton(out):
        from .triton_sinks import add_sinks

        return add_sinks(out, lse, sinks)
    lse = lse.masked_fill(lse.isinf(), -torch.inf)
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    factor = (lse - total).exp().nan_to_num(0.0)  # 0 for a sink of minus infinity before a query that sees no key
    return (out * factor.transpose(-1, -2)[..., None]).to(out.dtype), total


def _gradient_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of sinks, from the output and the log-sum-exp with them. Queries without a gradient add nothing.

    A kernel leaves the output of tokens behind the last sequence unwritten.
    """
    if runs_triton(out):
        from .triton_sinks import gradient_of_sinks

        return gradient_of_sinks(grad, out, lse, sinks)
    products = torch.where(grad == 0, 0, grad.to(lse.dtype) * out)
    delta = products.sum(-1).transpose(-1, -2)
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
    shares = torch.where(delta == 0, 0, weights * delta)
    return -(shares if shares.ndim == 2 else shares.sum(0)).sum(-1).to(sinks.dtype)


def runs_triton(tensor: Tensor) -> bool:
    return tensor.is_cuda and _HAS_TRITON


_HAS_TRITON = importlib.util.find_spec("triton") is not None


def _forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
    lengths, pattern, kernel = _structured(arguments)
    out, lse = _primitives[kernel].forward(q, k, v, lengths, pattern)
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


def _structured(arguments: tuple[Any, ...]) -> tuple[Lengths | None, Pattern, str]:
    """The sequences, the pattern and the kernel's name, of their fields in turn: a custom operator takes neither tuples nor None for one."""
    lengths, pattern, kernel = arguments[:4], arguments[4:-1], arguments[-1]
    return None if lengths[0] is None else Lengths(*lengths), Pattern(*pattern), kernel


def _forward_outputs(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse = (q.shape[-2], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(lse, dtype=dtype)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lengths, pattern, kernel = _structured(arguments)
    grad = grad.contiguous()
    grads = _primitives[kernel].backward(grad, q, k, v, out, lse, lengths, pattern)
    # An operator's outputs are tensors: an empty one for sinks that aren't there.
    return (*grads, q.new_empty(0) if sinks is None else _gradient_of_sinks(grad, out, lse, sinks))


def _backward_outputs(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(inputs[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs[:4])


_ARGUMENTS = ", ".join(
    [
        "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k",
        *(f"{'SymInt' if kind is int else kind.__name__} {name}" for name, kind in get_type_hints(Pattern).items()),
        "str kernel",
    ]
)
_forward_op = operator(
    "attention",
    _forward,
    _forward_outputs,
    f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_ARGUMENTS}) -> (Tensor, Tensor)",
)
_backward_op = operator(
    "attention_backward",
    _backward,
    _backward_outputs,
    f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, {_ARGUMENTS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, cu_q, cu_k, *ctx.arguments = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, cu_q, cu_k)


def _gradients(backward: Callable[..., Any], ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *grads, of_sinks = backward(grad, *ctx.saved_tensors, *ctx.arguments)
    sinks = ctx.saved_tensors[3]
    return (*grads, None if sinks is None else of_sinks, None, None, *(None for _ in ctx.arguments))


_forward_op.register_autograd(lambda ctx, grad, _: _gradients(_backward_op, ctx, grad), setup_context=_keep)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _forward(*inputs)
        _keep(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(f"sinks of {ctx.arguments[-1]} have no second derivative (create_graph=True)")
        return _gradients(_backward, ctx, grad)
