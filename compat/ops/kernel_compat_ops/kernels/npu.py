"""torch_npu's fused functions under the calling conventions of the ops. Never run on hardware.

Written from the schemas of torch-npu 2.14.0 (``csrc/aten/npu_native_functions_by_codegen.yaml`` in its wheel) and its
docstrings. ``group_type=2`` of `npu_grouped_matmul`, which sums over groups of rows, is not in the docstring but in Ascend's
training code (https://gitee.com/ascend/MindSpeed).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernel_compat.errors import UnsupportedFeatureError

from . import routing


def rms_norm(offset: bool) -> Callable[..., Tensor]:
    """The kernel of ``rms_norm``, by ``npu_rms_norm``: hidden states (..., hidden), weight (hidden,)."""
    import torch_npu

    def kernel(hidden_states: Tensor, weight: Tensor, eps: float, *, casting: str) -> Tensor:
        scale = 1.0 + weight if offset else weight
        wide = torch.promote_types(hidden_states.dtype, scale.dtype)
        normed: Tensor = torch_npu.npu_rms_norm(hidden_states.to(wide), scale.to(wide), epsilon=eps)[0]
        return normed.to(hidden_states.dtype) if casting == "gemma" else normed

    return kernel


def rotary_pos_emb() -> Callable[..., tuple[Tensor, Tensor]]:
    """The kernel of ``rotary_pos_emb``, by ``npu_rotary_mul``: (batch, heads, length, head_dim); cosines without the heads."""
    import torch_npu

    def kernel(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (batch, 1, length, head_dim)
        rotate: Callable[..., Tensor] = torch_npu.npu_rotary_mul
        return rotate(query, cos, sin), rotate(key, cos, sin)

    return kernel


def cross_entropy() -> Callable[..., Tensor]:
    """The kernel of ``cross_entropy_loss``: `chunk_loss`, which runs on any device."""
    import torch_npu  # noqa: F401 - registers the device with torch

    from .chunk_loss import chunk_loss

    return chunk_loss


def experts() -> Callable[..., Tensor]:
    """The kernel of ``moe``, by ``npu_grouped_matmul``.

    Called with hidden states (tokens, hidden), ids and weights (tokens, k), `gate_up` (experts, 2 * intermediate, hidden) and `down`
    (experts, hidden, intermediate); returns (tokens, hidden).
    """
    import torch_npu

    def kernel(
        hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        if hidden_states.dtype != torch.bfloat16:
            raise UnsupportedFeatureError(str(hidden_states.dtype), "moe 'fused_npu'", "It takes bfloat16.")
        known = routing.in_range(top_k_index, len(gate_up))  # (tokens, k), as index and weights
        index = top_k_index.where(known, 0).long()
        weights = top_k_weights.where(known, 0).to(hidden_states.dtype)
        flat = index.flatten()
        # (experts,): the number of rows of each
        counts = torch.zeros(len(gate_up), dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        rows, places = torch_npu.npu_moe_token_permute(hidden_states, index)  # (tokens * k, hidden), (tokens * k,)
        product = torch_npu.npu_grouped_matmul
        wide = _GroupedLinear.apply(product, rows, gate_up.mT, counts)  # (tokens * k, 2 * intermediate)
        # (tokens * k, hidden)
        narrow = _GroupedLinear.apply(product, torch_npu.npu_swiglu(wide, dim=-1), down.mT, counts)
        result: Tensor = torch_npu.npu_moe_token_unpermute(narrow, places, probs=weights)
        return result

    return kernel


class _GroupedLinear(torch.autograd.Function):  # type: ignore[misc]
    """``x @ weight``, each group of rows with its own weight; `npu_grouped_matmul` has no backward.

    `x` is (rows, in), `weight` (experts, in, out), `counts` (experts,); the result is (rows, out).
    """

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
        for_x = for_weight = None
        if ctx.needs_input_grad[1]:
            (for_x,) = ctx.product(
                [gradient], [weight.mT], group_list=counts, split_item=2, group_type=0, group_list_type=1
            )
        if ctx.needs_input_grad[2]:
            (for_weight,) = ctx.product(
                [x.T], [gradient], group_list=counts, split_item=3, group_type=2, group_list_type=1
            )
        return None, for_x, for_weight, None


__all__ = ["cross_entropy", "experts", "rms_norm", "rotary_pos_emb"]
