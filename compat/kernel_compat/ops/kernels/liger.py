"""liger-kernel's functional API under the calling conventions of the ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ...errors import UnsupportedFeatureError
from ..lazy import Pointwise


def rms_norm(offset: float = 0.0) -> Callable[..., Tensor]:
    from liger_kernel.transformers.functional import liger_rms_norm

    def kernel(hidden_states: Tensor, weight: Tensor, eps: float, *, casting: str) -> Tensor:
        dtype = hidden_states.dtype
        if weight.dtype != dtype:
            wide = torch.promote_types(dtype, weight.dtype)
            normed: Tensor = liger_rms_norm(hidden_states.to(wide), weight.to(wide), eps, offset, casting, False)
            return normed.to(dtype) if casting == "gemma" else normed  # upstream's product has the wider dtype
        # In place it would write gradients over those that another branch may need: Gemma 2 norms behind the layer, too.
        normed = liger_rms_norm(hidden_states, weight, eps, offset, casting, False)
        return normed

    return kernel


def rms_norm_offset() -> Callable[..., Tensor]:
    return rms_norm(1.0)


def swiglu() -> Callable[..., Tensor]:
    from liger_kernel.transformers.functional import liger_swiglu

    kernel: Callable[..., Tensor] = liger_swiglu
    return kernel


def rotary() -> Callable[..., tuple[Tensor, Tensor]]:
    from liger_kernel.transformers.functional import liger_rope

    def kernel(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor] = liger_rope(_apart(query), _apart(key), cos, sin)
        return rotated

    return kernel


def _apart(x: Tensor) -> Tensor:
    """A copy, where Liger would write into what it is given: what a projection gave, which somebody may have saved."""
    exchanged = x.transpose(1, 2)
    return exchanged.clone().transpose(1, 2) if exchanged.is_contiguous() else x


def cross_entropy() -> Callable[..., Tensor]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

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
        loss: Any = liger_fused_linear_cross_entropy(
            hidden_states,
            weight,
            labels,
            bias=bias,
            ignore_index=ignore_index,
            reduction=reduction,
            softcap=softcap,
        )
        return loss if isinstance(loss, Tensor) else loss[0]

    return kernel


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
