"""Mixtures of experts by torch_npu's functions, as their documentation has them; never run on hardware.

Of `npu_grouped_matmul`, ``group_type=2`` (groups along what is added up over), which gives the gradient of the parameters, is
in Ascend's own training code, and not in the function's docstring.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...errors import UnsupportedFeatureError
from .routing import counted


def experts() -> Callable[..., Tensor]:
    import torch_npu

    def kernel(
        hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        if hidden_states.dtype != torch.bfloat16:
            raise UnsupportedFeatureError(str(hidden_states.dtype), "moe 'fused_npu'", "It takes bfloat16.")
        there = counted(top_k_index, len(gate_up))
        index = top_k_index.where(there, 0).long()
        weights = top_k_weights.where(there, 0).to(hidden_states.dtype)
        flat = index.flatten()
        counts = torch.zeros(len(gate_up), dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        rows, places = torch_npu.npu_moe_token_permute(hidden_states, index)
        product = torch_npu.npu_grouped_matmul
        wide = _GroupedLinear.apply(product, rows, gate_up.mT, counts)
        given = _GroupedLinear.apply(product, torch_npu.npu_swiglu(wide, dim=-1), down.mT, counts)
        result: Tensor = torch_npu.npu_moe_token_unpermute(given, places, probs=weights)
        return result

    return kernel


class _GroupedLinear(torch.autograd.Function):  # type: ignore[misc]
    """``x @ weight``, each group of rows with its own; `torch_npu` has no backward for it."""

    @staticmethod
    def forward(ctx: Any, product: Callable[..., Any], x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.product = product
        ctx.save_for_backward(x, weight, counts)
        result: Tensor = product([x], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1)[0]
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counts = ctx.saved_tensors
        d_x = d_weight = None
        if ctx.needs_input_grad[1]:
            (d_x,) = ctx.product(
                [gradient], [weight.mT], group_list=counts, split_item=2, group_type=0, group_list_type=1
            )
        if ctx.needs_input_grad[2]:
            (d_weight,) = ctx.product(
                [x.T], [gradient], group_list=counts, split_item=3, group_type=2, group_list_type=1
            )
        return None, d_x, d_weight, None


__all__ = ["experts"]
