"""The reference kernel: plain torch, every feature but paged, on any device; slow, and right.

Scores are computed in full, in float32 or the inputs' higher precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention over equal lengths.

    Args:
        q: (batch, q_len, heads, head_dim).
        k, v: (batch, kv_len, kv_heads, head_dim), heads a multiple of kv_heads; v's head_dim may differ.

    Returns:
        (batch, q_len, heads, v's head_dim), in q's dtype.
    """
    import torch

    q_position = torch.arange(q.shape[1], device=q.device) + (k.shape[1] - q.shape[1])
    k_position = torch.arange(k.shape[1], device=q.device)
    visible = _visible(q_position, k_position, causal, window_size)
    return _attention(q, k, v, visible, dropout_p, softmax_scale, softcap, s_aux)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention over packed sequences: the i-th takes q[cu_seqlens_q[i]:cu_seqlens_q[i+1]], and k and v likewise.

    Args:
        q: (total_q, heads, head_dim).
        k, v: (total_k, kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,), int32 or int64.

    Returns:
        (total_q, heads, v's head_dim), in q's dtype.
    """
    import torch

    from .indices import sequence_numbers

    def positions(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
        index = torch.arange(total, device=q.device)
        sequence = sequence_numbers(cu_seqlens, total)
        # Tokens behind the last sequence get zeros; the other kernels leave them unwritten.
        return sequence, index - cu_seqlens.to(index.dtype)[sequence.clamp(max=cu_seqlens.shape[0] - 1)]

    # Offsets decrease where transformers 5.0 to 5.5 appends padding: such sequences have no token.
    cu_seqlens_q, cu_seqlens_k = (offsets.cummax(0).values for offsets in (cu_seqlens_q, cu_seqlens_k))
    q_sequence, q_position = positions(cu_seqlens_q, q.shape[0])
    k_sequence, k_position = positions(cu_seqlens_k, k.shape[0])
    extra = (cu_seqlens_k.diff() - cu_seqlens_q.diff()).to(q_position.dtype)
    q_position = q_position + extra[q_sequence.clamp(max=extra.shape[0] - 1)]
    together = (q_sequence[:, None] == k_sequence[None]) & (q_sequence < cu_seqlens_q.shape[0] - 1)[:, None]
    visible = _visible(q_position, k_position, causal, window_size) & together
    return _attention(q[None], k[None], v[None], visible, dropout_p, softmax_scale, softcap, s_aux)[0]


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    segments: tuple[Tensor, Tensor] | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention with any mask and bias: `kernel_compat.kernels.adapter.Functions.masked_attention`."""
    import torch

    q_position = torch.arange(q.shape[1], device=q.device) + (k.shape[1] - q.shape[1])
    k_position = torch.arange(k.shape[1], device=q.device)
    mask = _visible(q_position, k_position, causal, window_size)
    if segments is not None:
        of_q, of_k = segments[0][:, None, :, None], segments[1][:, None, None, :]
        mask = mask & (of_q == of_k) & (of_q >= 0)
    if visible is not None:
        mask = mask & visible
    return _attention(q, k, v, mask, dropout_p, softmax_scale, softcap, s_aux, bias)


def _visible(q_position: Tensor, k_position: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
    """The mask (q_len, kv_len), True where a query sees a key. Positions are aligned to the bottom right corner."""
    import torch

    distance = q_position[:, None] - k_position[None]
    visible = torch.ones_like(distance, dtype=torch.bool)
    left, right = window
    if causal:
        right = 0
    if left >= 0:
        visible = visible & (distance <= left)
    if right >= 0:
        visible = visible & (-distance <= right)
    return visible


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    dropout_p: float,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    import torch

    with torch.autocast(q.device.type, enabled=False):  # autocast computes the products in half precision
        dtype = q.dtype if q.dtype == torch.float64 else torch.float32
        groups = q.shape[2] // k.shape[2]
        q_, k_, v_ = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
        k_, v_ = k_.repeat_interleave(groups, 1), v_.repeat_interleave(groups, 1)
        scores = q_ @ k_.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias
        # The least finite number and a product with the mask, not -inf: a query that sees no key gets zeros, and
        # gradients of zero, where softmax over -inf alone would give NaN.
        scores = scores.masked_fill(~visible, torch.finfo(dtype).min)
        if sinks is not None:
            column = sinks.to(dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = scores.softmax(dim=-1)[..., : visible.shape[-1]] * visible
        weights = torch.nn.functional.dropout(weights, dropout_p)
        return (weights @ v_).transpose(1, 2).to(q.dtype).contiguous()  # as FlashAttention's: models call view()
