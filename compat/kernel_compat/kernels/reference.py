"""The reference kernel: plain torch, every feature but paged, on any device; slow, and right.

Scores are computed in full, in float32 or the inputs' higher precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .options import Functions, Lengths, Mask, Options

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["attend", "flash_attn_func", "flash_attn_varlen_func"]


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, lengths: Lengths | None = None, mask: Mask | None = None
) -> Tensor:
    """An `options.Attend`. Heads must be a multiple of kv_heads; the value's head dimension may be any.

    Args:
        lengths: the i-th sequence takes q[cu_seqlens_q[i]:cu_seqlens_q[i+1]], and k and v likewise; int32 or int64.
    """
    import torch

    if lengths is not None:
        visible = _visible_in_sequences(lengths, q.shape[0], k.shape[0], options)
        return _attention(q[None], k[None], v[None], visible, options)[0]
    q_position = torch.arange(q.shape[1], device=q.device) + (k.shape[1] - q.shape[1])
    k_position = torch.arange(k.shape[1], device=q.device)
    visible = _visible(q_position, k_position, options)
    if mask is None:
        return _attention(q, k, v, visible, options)
    if mask.segments is not None:
        q_segment, k_segment = mask.segments[0][:, None, :, None], mask.segments[1][:, None, None, :]
        visible = visible & (q_segment == k_segment) & (q_segment >= 0)
    if mask.visible is not None:
        visible = visible & mask.visible
    return _attention(q, k, v, visible, options, mask.bias)


#: FlashAttention-2's functions by this kernel: unlike those of a `Kernel` they check nothing.
flash_attn_func = Functions(attend).flash_attn_func
flash_attn_varlen_func = Functions(attend).flash_attn_varlen_func


def _visible_in_sequences(lengths: Lengths, q_tokens: int, k_tokens: int, options: Options) -> Tensor:
    """The mask (q_tokens, k_tokens) of packed sequences."""
    import torch

    from .indices import sequence_numbers

    # Offsets decrease where transformers 5.0 to 5.5 appends padding: such sequences have no token.
    cu_seqlens_q, cu_seqlens_k = (offsets.cummax(0).values for offsets in lengths[:2])

    def positions(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        index = torch.arange(tokens, device=cu_seqlens.device)
        sequence = sequence_numbers(cu_seqlens, tokens)
        # Tokens behind the last sequence get zeros; the other kernels leave them unwritten.
        return sequence, index - cu_seqlens.to(index.dtype)[sequence.clamp(max=cu_seqlens.shape[0] - 1)]

    q_sequence, q_position = positions(cu_seqlens_q, q_tokens)
    k_sequence, k_position = positions(cu_seqlens_k, k_tokens)
    extra = (cu_seqlens_k.diff() - cu_seqlens_q.diff()).to(q_position.dtype)
    q_position = q_position + extra[q_sequence.clamp(max=extra.shape[0] - 1)]
    together = (q_sequence[:, None] == k_sequence[None]) & (q_sequence < cu_seqlens_q.shape[0] - 1)[:, None]
    return _visible(q_position, k_position, options) & together


def _visible(q_position: Tensor, k_position: Tensor, options: Options) -> Tensor:
    """The mask (q_len, kv_len), True where a query sees a key. Positions are aligned to the bottom right corner."""
    import torch

    distance = q_position[:, None] - k_position[None]
    visible = torch.ones_like(distance, dtype=torch.bool)
    left, right = options.window_size
    if options.causal:
        right = 0
    if left >= 0:
        visible = visible & (distance <= left)
    if right >= 0:
        visible = visible & (-distance <= right)
    return visible


def _attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, options: Options, bias: Tensor | None = None
) -> Tensor:
    """Attention with a mask that `(batch, heads, q_len, kv_len)` broadcasts to; as `attend` without lengths."""
    import torch

    scale, softcap, sinks = options.softmax_scale, options.softcap, options.s_aux
    with torch.autocast(q.device.type, enabled=False):  # autocast computes the products in half precision
        dtype = q.dtype if q.dtype == torch.float64 else torch.float32
        groups = q.shape[2] // k.shape[2]
        q_, k_, v_ = (x.to(dtype).transpose(1, 2) for x in (q, k, v))  # (batch, heads or kv_heads, length, head_dim)
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
        weights = torch.nn.functional.dropout(weights, options.dropout_p)
        return (weights @ v_).transpose(1, 2).to(q.dtype).contiguous()  # as FlashAttention's: models call view()
