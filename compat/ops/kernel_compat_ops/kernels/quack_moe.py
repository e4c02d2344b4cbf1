"""Mixtures of experts by the grouped matrix products of quack-kernels. Nothing is read back from the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernel_compat.errors import UnsupportedFeatureError

from . import routing
from .backward import first_derivative_only, untraced_backward

#: quack's ``gemm``: with ``cu_seqlens_m`` the rows of the first matrix are in groups, each with its own second matrix; with
#: ``cu_seqlens_k`` the inner dimension is in groups, each with its own result.
Gemm = Callable[..., Tensor]


def experts() -> Callable[..., Tensor]:
    """The kernel of ``moe``.

    Called with hidden states (tokens, hidden), ids and weights (tokens, k), `gate_up` (experts, 2 * intermediate, hidden) and `down`
    (experts, hidden, intermediate); returns (tokens, hidden).
    """
    from quack.gemm_interface import gemm

    # With tuning, it measures all its configurations again for every number of tokens.
    product = partial(gemm, tuned=False)

    @first_derivative_only("moe_implementation='fused_quack'", traced=False)
    def kernel(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        _require(hidden_states, down)
        return SwiGluExperts.apply(product, hidden_states, top_k_index, top_k_weights, gate_up, down)

    return kernel


def _require(hidden_states: Tensor, down: Tensor) -> None:
    if hidden_states.dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedFeatureError(str(hidden_states.dtype), "moe 'fused_quack'", "It takes float16 and bfloat16.")
    if any(size % 8 for size in down.shape[1:]):
        sizes = "hidden and intermediate sizes of {} and {}".format(*down.shape[1:])
        raise UnsupportedFeatureError(sizes, "moe 'fused_quack'", "It takes multiples of 8.")


@untraced_backward
class SwiGluExperts(torch.autograd.Function):  # type: ignore[misc]
    """``down(silu(gate) * up)``, weighted and summed for each token; saves the product with `gate_up` for the backward.

    There are ``rows = tokens * k``, as `routing.sort` orders them.
    """

    @staticmethod
    def forward(ctx: Any, gemm: Gemm, *inputs: Tensor) -> Tensor:
        """Each row times the matrix of its expert."""
        hidden_states, top_k_index, top_k_weights, gate_up, down = inputs
        token, row, starts = routing.sort(top_k_index, len(gate_up))
        wide = gemm(hidden_states[token], gate_up.mT, cu_seqlens_m=starts)  # (rows, 2 * intermediate)
        gate, up = wide.chunk(2, dim=-1)
        # (rows, hidden). Those after the last group are not written.
        rows = hidden_states.new_zeros(len(token), hidden_states.shape[-1])
        gemm(silu(gate).mul_(up), down.mT, out=rows, cu_seqlens_m=starts)
        ctx.gemm = gemm
        ctx.save_for_backward(hidden_states, top_k_weights, gate_up, down, wide, token, row, starts)
        rows.mul_(_by_row(top_k_weights, row))
        return rows[row].sum(dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of rows and matrices."""
        hidden_states, top_k_weights, gate_up, down, wide, token, row, starts = ctx.saved_tensors
        gemm = ctx.gemm
        _, for_hidden, _, for_weights, for_gate_up, for_down = ctx.needs_input_grad
        d_hidden = d_weights = d_gate_up = d_down = None
        gate, up = wide.chunk(2, dim=-1)  # (rows, intermediate), as active, d_narrow and d_gate
        active = silu(gate)
        d_rows = gradient[token]  # (rows, hidden)
        weights = _by_row(top_k_weights, row)  # (rows, 1)
        if for_down:
            d_down = gemm(d_rows.T, (active * up).mul_(weights), cu_seqlens_k=starts)
        d_narrow = gemm(d_rows, down, cu_seqlens_m=starts)
        del d_rows
        if for_weights:
            # The product of the gradient with an expert's result, without saving the result: (rows,).
            by_row = (d_narrow.float() * (active * up)).sum(dim=-1)
            known = torch.arange(len(token), device=token.device) < starts[-1]
            d_weights = by_row.where(known, 0)[row].to(top_k_weights.dtype)
        if for_hidden or for_gate_up:
            d_narrow.mul_(weights)
            d_gate = torch.ops.aten.silu_backward(d_narrow * up, gate)
            d_wide = torch.cat([d_gate, d_narrow.mul_(active)], dim=-1)  # (rows, 2 * intermediate)
            if for_gate_up:
                d_gate_up = gemm(d_wide.T, hidden_states[token], cu_seqlens_k=starts)
            if for_hidden:
                rows = hidden_states.new_zeros(len(token), hidden_states.shape[-1])
                gemm(d_wide, gate_up, out=rows, cu_seqlens_m=starts)
                d_hidden = rows[row].sum(dim=1)
        return None, d_hidden, None, d_weights, d_gate_up, d_down


def _by_row(top_k_weights: Tensor, row: Tensor) -> Tensor:
    """The weights (tokens, k) in the order of the rows: (rows, 1)."""
    weights = torch.empty_like(top_k_weights.flatten())
    weights[row.flatten()] = top_k_weights.flatten()
    return weights.unsqueeze(-1)


__all__ = ["SwiGluExperts", "experts"]
