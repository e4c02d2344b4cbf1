"""liger-kernel's fused mixture of experts. Its forward reads one number back from the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import UnsupportedFeatureError
from .backward import refuse_second_derivative, untraced
from .routing import counted


def experts() -> Callable[..., Tensor]:
    """The kernel of ``moe``."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    def kernel(
        hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        _require(hidden_states)
        # Liger writes past the end of its tables for an id out of range.
        there = counted(top_k_index, len(gate_up))
        index = top_k_index.where(there, 0).to(torch.int32)
        result: Tensor = LigerFusedMoEFunction.apply(hidden_states, gate_up, down, index, top_k_weights.where(there, 0))
        refuse_second_derivative(result, "moe_implementation='fused_triton'")
        return result

    return untraced(kernel)


def _require(hidden_states: Tensor) -> None:
    dtype = hidden_states.dtype
    if dtype in (torch.float16, torch.bfloat16):
        return
    if dtype != torch.float32:
        raise UnsupportedFeatureError(str(dtype), "moe 'fused_triton'", "It takes float16, bfloat16 and float32.")
    if hidden_states.is_cuda and torch.get_float32_matmul_precision() == "highest":
        raise UnsupportedFeatureError(
            "float32 to full precision",
            "moe 'fused_triton'",
            "It multiplies in TF32: allow that by torch.set_float32_matmul_precision('high').",
        )


__all__ = ["experts"]
