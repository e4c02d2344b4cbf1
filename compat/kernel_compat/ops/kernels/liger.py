"""liger-kernel under the calling conventions of the ops, so that no kernel writes into a tensor that others can see.

Written for liger-kernel 0.6.5 to 0.8.5 (https://github.com/linkedin/Liger-Kernel). Its own modules write gradients over saved
tensors, over the gradients that they get, and over query and key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from ...errors import UnsupportedFeatureError
from ..losses.lazy import Pointwise
from .backward import refuse_second_derivative, untraced


def rms_norm(offset: float = 0.0) -> Callable[..., Tensor]:
    """The kernel of ``rms_norm``; the weight is multiplied as ``offset + weight``."""
    from liger_kernel.transformers.functional import liger_rms_norm

    def kernel(hidden_states: Tensor, weight: Tensor, eps: float, *, casting: str) -> Tensor:
        dtype = hidden_states.dtype
        wide = torch.promote_types(dtype, weight.dtype)
        if weight.dtype != dtype:
            hidden_states, weight = hidden_states.to(wide), weight.to(wide)
        # In place, it would write over gradients that another branch may need: Gemma 2 norms a layer's result, too.
        normed: Tensor = liger_rms_norm(hidden_states, weight, eps, offset, casting, in_place=False)
        refuse_second_derivative(normed, "rms_norm_implementation='liger_kernel'")
        return normed.to(dtype) if casting == "gemma" else normed  # transformers' product has the wider dtype

    return kernel


def rms_norm_offset() -> Callable[..., Tensor]:
    """The kernel of ``rms_norm`` for weights that are stored minus one."""
    return rms_norm(1.0)


def swiglu() -> Callable[..., Tensor]:
    """The kernel of ``swiglu_mlp``: ``silu(gate) * up``."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    from .triton_swiglu import swiglu_backward

    class SiLUMul(LigerSiLUMulFunction):  # type: ignore[misc]
        """Liger's forward; its backward writes the gradients over gate and up."""

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
            gate, up = ctx.saved_tensors
            return tuple(found.view(gradient.shape) for found in swiglu_backward(gate, up, gradient))

    def kernel(gate: Tensor, up: Tensor) -> Tensor:
        if hasattr(gate, "to_local"):  # a DTensor
            local = kernel(gate.to_local(), up.to_local())
            return type(gate).from_local(local, gate.device_mesh, gate.placements)
        if torch.compiler.is_compiling():  # which removes copies that make no difference
            traced: Tensor = LigerSiLUMulFunction.apply(gate.clone(), up.clone())
            return traced
        product: Tensor = SiLUMul.apply(gate, up)
        refuse_second_derivative(product, "swiglu_mlp_implementation='liger_kernel'")
        return product

    return kernel


def rotary() -> Callable[..., tuple[Tensor, Tensor]]:
    """The kernel of ``rotary_pos_emb``."""
    from liger_kernel.transformers.functional import liger_rope

    def kernel(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
            feature, option = "gradients for cos and sin", "rotary_pos_emb_implementation='liger_kernel'"
            raise UnsupportedFeatureError(feature, option, "Detach them, or use eager.")
        if torch.compiler.is_compiling():  # a graph has no writes in place; it removes copies that make no difference
            query, key = liger_rope(query, key, cos, sin)
            return _ClonedGradient.apply(query), _ClonedGradient.apply(key)
        query, key = liger_rope(_copied(query), _copied(key), cos, sin)
        refuse_second_derivative(query, "rotary_pos_emb_implementation='liger_kernel'")
        return _CopiedGradient.apply(query), _CopiedGradient.apply(key)

    return kernel


def _copied(x: Tensor) -> Tensor:
    """A copy, where Liger would rotate in place: it copies other layouts itself."""
    by_position = x.transpose(1, 2)
    return by_position.clone().transpose(1, 2) if by_position.is_contiguous() else x


class _CopiedGradient(Function):  # type: ignore[misc]
    """The identity, with a copy of the gradient for the rotation's backward, which works in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _copied(gradient)


class _ClonedGradient(_CopiedGradient):
    """The same in a graph, where the layout of the gradient is not known."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


def cross_entropy() -> Callable[..., Tensor]:
    """The kernel of ``cross_entropy_loss``, from hidden states."""
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

    def kernel(
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        bias: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum"] = "mean",
        pointwise: Sequence[Pointwise] = (),
    ) -> Tensor:
        factor, softcap = _factor_and_softcap(pointwise)
        if factor != 1.0:
            hidden_states = hidden_states * factor
            bias = None if bias is None else bias * factor
        kind = hidden_states.device.type
        if torch.is_autocast_enabled(kind):  # casts as it does for a linear layer
            dtype = torch.get_autocast_dtype(kind)
            hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        trained = weight.requires_grad or (bias is not None and bias.requires_grad)
        if torch.is_grad_enabled() and trained and not hidden_states.requires_grad:
            hidden_states = hidden_states.detach().requires_grad_()  # Liger computes no gradient otherwise
        options = {"target": labels, "ignore_index": ignore_index, "reduction": reduction, "softcap": softcap}
        loss: Tensor = _LinearCrossEntropy.apply(
            fused_linear_cross_entropy_forward, options, hidden_states, weight, bias
        )
        refuse_second_derivative(loss, "cross_entropy_loss_implementation='liger_kernel'")
        return loss

    return untraced(kernel)


class _LinearCrossEntropy(Function):  # type: ignore[misc]
    """Liger's loss, whose gradients are computed with it. They are kept out of `save_for_backward`: no hook sees them."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[..., tuple[Any, ...]],
        options: dict[str, Any],
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        results = compute(_input=hidden_states, weight=weight, bias=bias, **options)
        loss: Tensor = results[0]
        ctx.computed = results[-3:]  # the gradients of hidden states, weight and bias
        if options["reduction"] == "mean":  # over no tokens it is NaN, where Liger returns 0
            loss = loss.masked_fill((options["target"] == options["ignore_index"]).all(), torch.nan)
        return loss

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.computed = ctx.computed, None
        if gradients is None:
            raise RuntimeError(
                "cross_entropy_loss_implementation='liger_kernel' computes its gradients once: a second backward "
                "(retain_graph=True) needs another forward"
            )
        # Scaled on the device: Liger's own backward waits for the factor. Of one dimension, it is not rounded to half precision.
        for gradient in gradients:
            if gradient is not None:
                torch.mul(gradient, factor.reshape(1), out=gradient)
        return (None, None, *gradients)


def _factor_and_softcap(pointwise: Sequence[Pointwise]) -> tuple[float, float | None]:
    """The factor of the logits and the softcap after it. Casts are left out: Liger computes the loss in float32."""
    steps = [one for one in pointwise if one.kind != "to"]
    factor, softcap = 1.0, None
    if len(steps) >= 3 and [one.kind for one in steps[-2:]] == ["tanh", "times"]:
        softcap = float(steps[-1].value)
        before, steps = steps[-3], steps[:-3]
        if before != Pointwise("over", softcap):
            raise _unknown(pointwise)
    for one in steps:
        if one.kind == "tanh":
            raise _unknown(pointwise)
        factor *= float(one.value) if one.kind == "times" else 1 / float(one.value)
    return factor, softcap


def _unknown(pointwise: Sequence[Pointwise]) -> UnsupportedFeatureError:
    steps = ", ".join(f"{one.kind} {one.value}".strip() for one in pointwise)
    return UnsupportedFeatureError(
        f"this model's operations on its logits ({steps})",
        "cross_entropy_loss 'liger_kernel'",
        "chunk_loss supports them.",
    )
