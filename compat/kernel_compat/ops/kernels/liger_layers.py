"""liger-kernel's GEGLU, LayerNorm, partial rotation and cross-entropy of logits, which write into no tensor that others can see.

Written for liger-kernel 0.6.5 to 0.8.5 (https://github.com/linkedin/Liger-Kernel).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from . import liger
from .backward import refuse_second_derivative, untraced

__all__ = ["geglu", "layer_norm", "logits_cross_entropy", "partial_rotary"]


def geglu() -> Callable[..., Tensor]:
    """``gelu(gate) * up`` with the approximation by tanh."""
    from liger_kernel.ops.geglu import geglu_backward, geglu_forward

    def kernel(gate: Tensor, up: Tensor) -> Tensor:
        product: Tensor = _GeluMul.apply(geglu_forward, geglu_backward, gate, up)
        refuse_second_derivative(product, "swiglu_mlp_implementation='liger_kernel'")
        return product

    return kernel


class _GeluMul(Function):  # type: ignore[misc]
    """Liger's own writes its gradients over gate and up."""

    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], gate: Tensor, up: Tensor
    ) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.compute = backward
        ctx.save_for_backward(gate, up)
        product: Tensor = forward(gate, up)[-1]
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        found = ctx.compute(gate.clone(), up.clone(), gradient.contiguous())
        return (None, None, *(one.view(gradient.shape) for one in found))


def layer_norm() -> Callable[..., Tensor]:
    """``(hidden_states, weight, bias, eps)``, normalized over the last dimension."""
    from liger_kernel.ops import LigerLayerNormFunction

    def kernel(hidden_states: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        dtype = torch.promote_types(hidden_states.dtype, weight.dtype)
        normed: Tensor = LigerLayerNormFunction.apply(hidden_states.to(dtype), weight.to(dtype), bias.to(dtype), eps)
        refuse_second_derivative(normed, "layer_norm_implementation='liger_kernel'")
        return normed

    return kernel


def partial_rotary() -> Callable[..., tuple[Tensor, Tensor]]:
    """A rotation of as many channels as there are cosines for; the others pass."""
    full = liger.rotary()

    def kernel(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        size = cos.shape[-1]
        if size == query.shape[-1]:
            return full(query, key, cos, sin)
        turned = full(query[..., :size], key[..., :size], cos, sin)
        one, other = (torch.cat((new, x[..., size:]), dim=-1) for new, x in zip(turned, (query, key), strict=True))
        return one, other

    return kernel


def logits_cross_entropy() -> Callable[..., Tensor]:
    """Cross-entropy of logits (tokens, vocabulary) that the kernel may overwrite, and labels (tokens,)."""
    from liger_kernel.ops.cross_entropy import cross_entropy_forward

    def kernel(
        logits: Tensor, labels: Tensor, *, ignore_index: int = -100, reduction: Literal["mean", "sum"] = "mean"
    ) -> Tensor:
        loss: Tensor = _CrossEntropy.apply(cross_entropy_forward, logits, labels, ignore_index, reduction)
        refuse_second_derivative(loss, "cross_entropy_loss_implementation='liger_cross_entropy'")
        return loss

    return untraced(kernel)


class _CrossEntropy(Function):  # type: ignore[misc]
    """Liger's loss, whose gradient is computed with it, into the logits. No hook of `save_for_backward` sees it."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., Any], logits: Tensor, labels: Tensor, ignore_index: int, reduction: str
    ) -> Tensor:
        # Weight, z-loss, label smoothing, reduction, softcap, and whether to return the z-loss.
        results = compute(
            logits.detach().requires_grad_(logits.requires_grad),
            labels,
            None,
            ignore_index,
            0.0,
            0.0,
            reduction,
            None,
            False,
        )
        loss: Tensor = results[0]
        ctx.computed = results[-1].detach()
        if reduction == "mean":  # over no tokens it is NaN, where Liger returns 0
            loss = loss.masked_fill((labels == ignore_index).all(), torch.nan)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        gradient, ctx.computed = ctx.computed, None
        if gradient is None:
            raise RuntimeError(
                "cross_entropy_loss_implementation='liger_cross_entropy' computes its gradient once: a second backward "
                "(retain_graph=True) needs another forward"
            )
        return None, torch.mul(gradient, factor, out=gradient), None, None, None
