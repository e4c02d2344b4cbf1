"""liger-kernel's functional API under the calling conventions of the ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ...errors import UnsupportedFeatureError
from ..losses.lazy import Pointwise
from ..rewriting import with_globals
from .ownership import (
    Alone,
    guard_backward,
    is_learning,
    own_gradients,
    own_saved,
    saving_by,
    untraced,
    with_own_gradient,
)


def rms_norm(offset: float = 0.0) -> Callable[..., Tensor]:
    from liger_kernel.transformers import functional

    in_place = _with(own_gradients, functional.liger_rms_norm, "LigerRMSNormFunction")

    def kernel(hidden_states: Tensor, weight: Tensor, eps: float, *, casting: str) -> Tensor:
        dtype = hidden_states.dtype
        wide = torch.promote_types(dtype, weight.dtype)
        if weight.dtype != dtype:
            hidden_states, weight = hidden_states.to(wide), weight.to(wide)
        # In place its backward writes over gradients that another branch may need: Gemma 2 norms behind the layer, too. Not in
        # place it fills with zeros first what it then writes.
        traced = torch.compiler.is_compiling()
        call = functional.liger_rms_norm if traced else in_place
        normed: Tensor = call(hidden_states, weight, eps, offset, casting, not traced)
        guard_backward(normed, "rms_norm_implementation='liger_kernel'")
        return normed.to(dtype) if casting == "gemma" else normed  # upstream's product has the wider dtype

    return kernel


def rms_norm_offset() -> Callable[..., Tensor]:
    return rms_norm(1.0)


def swiglu() -> Callable[..., Tensor]:
    from liger_kernel.transformers import functional

    in_place = _with(own_saved, functional.liger_swiglu, "LigerSiLUMulFunction")

    def kernel(gate: Tensor, up: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # which takes those copies away that nobody would miss
            traced: Tensor = functional.liger_swiglu(gate.clone(), up.clone())
            return traced
        product: Tensor = in_place(gate, up)
        guard_backward(product, "swiglu_mlp_implementation='liger_kernel'", once=True)
        return product

    return kernel


def rotary() -> Callable[..., tuple[Tensor, Tensor]]:
    from liger_kernel.transformers import functional

    alone = Alone()
    in_place = _with(partial(own_gradients, copy=_apart), functional.liger_rope, "LigerRopeFunction")

    def kernel(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(_apart(query), _apart(key), cos, sin)

    def consuming(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        own = (alone(query), alone(key))
        if is_learning():
            return query, key
        return rotate(query if own[0] else _apart(query), key if own[1] else _apart(key), cos, sin)

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            query, key = functional.liger_rope(query, key, cos, sin)
            return with_own_gradient(query), with_own_gradient(key)
        rotated: tuple[Tensor, Tensor] = in_place(query, key, cos, sin)
        guard_backward(rotated[0], "rotary_pos_emb_implementation='liger_kernel'")
        return rotated

    kernel.consuming = consuming  # type: ignore[attr-defined]
    return kernel


def _apart(x: Tensor) -> Tensor:
    """A copy, where Liger would write into what it is given."""
    exchanged = x.transpose(1, 2)
    return exchanged.clone().transpose(1, 2) if exchanged.is_contiguous() else x


def cross_entropy() -> Callable[..., Tensor]:
    from liger_kernel.transformers import functional

    fused = _with(_without_waiting, functional.liger_fused_linear_cross_entropy, "LigerFusedLinearCrossEntropyFunction")

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
        factor, softcap = _as_liger_has_it(pointwise)
        if factor != 1.0:
            hidden_states = hidden_states * factor
            bias = None if bias is None else bias * factor
        kind = hidden_states.device.type
        if torch.is_autocast_enabled(kind):  # as the linear layer would
            dtype = torch.get_autocast_dtype(kind)
            hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        trained = weight.requires_grad or (bias is not None and bias.requires_grad)
        if torch.is_grad_enabled() and trained and not hidden_states.requires_grad:
            hidden_states = hidden_states.detach().requires_grad_()  # without which Liger computes no gradient at all
        loss: Any = fused(
            hidden_states,
            weight,
            labels,
            bias=bias,
            ignore_index=ignore_index,
            reduction=reduction,
            softcap=softcap,
        )
        if not isinstance(loss, Tensor):
            loss = loss[0]
        guard_backward(loss, "cross_entropy_loss_implementation='liger_kernel'", once=True)
        if reduction == "mean":  # of no tokens, where Liger has 0
            loss = loss.masked_fill((labels == ignore_index).all(), torch.nan)
        return loss

    return untraced(kernel)


def _with(change: Callable[[Any], Any], call: Any, name: str) -> Callable[..., Any]:
    """One of Liger's functions that applies a changed autograd function."""
    return with_globals(call, {name: change(call.__globals__[name])})


def _without_waiting(function: Any) -> type[torch.autograd.Function]:
    """Liger's backward asks the device whether the loss's gradient is one, and has the host wait for all that is queued."""
    from .triton_scale import scale_

    class OnDevice(function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            ctx.is_own = saving_by() is None  # what is saved, which the results are
            return function.forward(ctx, *args)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor, *others: Any) -> Any:
            results = function.backward(ctx, torch.ones((), dtype=gradient.dtype, device="cpu"), *others)
            if not ctx.is_own:
                return tuple(None if result is None else (result * gradient).to(result.dtype) for result in results)
            for result in results:
                if result is not None:
                    scale_(result, gradient)
            return results

    return OnDevice


def _as_liger_has_it(pointwise: Sequence[Pointwise]) -> tuple[float, float | None]:
    """A factor for the logits, and the softcap that follows; it computes in float32 anyway."""
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
    what = ", ".join(f"{one.kind} {one.value}".strip() for one in pointwise)
    return UnsupportedFeatureError(
        f"what this model does to its logits ({what})", "cross_entropy_loss 'liger_kernel'", "chunk_loss can do it."
    )
