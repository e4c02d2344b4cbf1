"""torch's flex_attention behind FlashAttention-2's keywords, and with any mask and bias.

On a GPU it is compiled, once for a set of head dimensions, dtypes and options: lengths are dynamic, and masks are tensors. On a CPU it
is computed without compiling, which stores the scores; torch has no backward there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedFeatureError
from .provider import Features

if TYPE_CHECKING:
    from torch import Tensor

    from .flex_mask import FlexMask

__all__ = ["functions", "masked_attention", "refine"]

_NAME = "flash_attention_flex"


def refine(module: Any, features: Features) -> Features:
    """The features of this process: torch has no backward on a CPU."""
    import torch

    return features if torch.cuda.is_available() else replace(features, backward=False)


def functions(module: Any) -> Mapping[str, Callable[..., Any] | None]:
    """The functions of this module; ``torch.nn.attention.flex_attention`` is imported."""
    return {
        "flash_attn_func": flash_attn_func,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "flash_attn_with_kvcache": None,
    }


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
        k, v: (batch, kv_len, kv_heads, head_dim); v's head_dim may differ.
    """
    from .flex_mask import equal_lengths

    mask = equal_lengths(q.shape[1], k.shape[1], causal, window_size, q.device)
    return _attention(q, k, v, mask, None, softmax_scale, softcap, s_aux)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention over packed sequences; (tokens, heads, head_dim). Tokens behind the last sequence get zeros."""
    from .flex_mask import packed_sequences

    mask = packed_sequences(cu_seqlens_q, cu_seqlens_k, (q.shape[0], k.shape[0]), causal, window_size)
    return _attention(q[None], k[None], v[None], mask, None, softmax_scale, softcap, s_aux)[0]


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    segments: tuple[Tensor, Tensor] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention with any mask: `Functions.masked_attention`."""
    from .flex_mask import any_mask

    mask = any_mask(visible, segments, (q.shape[1], k.shape[1]), causal, window_size, q.device)
    return _attention(q, k, v, mask, bias, softmax_scale, softcap, s_aux)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: FlexMask | None,
    bias: Tensor | None,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    import torch

    on_cpu = q.device.type == "cpu"
    inputs = [q, k, v, *(x for x in (bias, sinks) if x is not None)]
    if on_cpu and any(x.requires_grad for x in inputs):
        if torch.is_grad_enabled():
            advice = "Use flash_attention_reference, a GPU, or torch.no_grad()."
            raise UnsupportedFeatureError("gradients on a CPU", _NAME, advice)
        q, k, v = q.detach(), k.detach(), v.detach()  # torch refuses them even where no gradient is computed
    tokens = (mask.q_sequence, mask.k_sequence, mask.q_position, mask.k_position) if mask else ()
    limits = (mask.left, mask.right, mask.visible) if mask else ()
    options = (q.shape[-1] ** -0.5 if scale is None else scale, softcap or 0.0)
    heads_first = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    if on_cpu or torch.compiler.is_compiling():
        attend = _attend
    else:
        shapes = (q.shape[-1], v.shape[-1], q.shape[2], k.shape[2], q.dtype, q.device)
        given = (mask is None, mask is not None and mask.visible is not None, bias is not None, sinks is not None)
        attend = _compiled(*options, shapes, given)
        _mark_dynamic(*heads_first, *tokens, *limits, *(mask.blocks if mask else ()), bias)
    out: Tensor = attend(*heads_first, (*tokens, *limits), mask.blocks if mask else (), bias, sinks, *options)
    return out.transpose(1, 2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: tuple[Any, ...],
    blocks: tuple[Tensor, ...],
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    """Attention with heads first: (batch, heads, length, head_dim)."""
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    score_mod = None
    if softcap or bias is not None:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if softcap:
                score = softcap * torch.tanh(score / softcap)
            return score if bias is None else score + bias[b, h, i, j]

        if bias is not None:
            bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    block_mask = _block_mask(pattern, blocks, (q.shape[0], q.shape[1], q.shape[2], k.shape[2])) if pattern else None
    gqa = q.shape[1] != k.shape[1]
    options = {"score_mod": score_mod, "block_mask": block_mask, "scale": scale, "enable_gqa": gqa}
    if sinks is None:
        output: Tensor = flex_attention(q, k, v, **options)
        return output
    out, aux = flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
    # As in `sinks`; autograd differentiates both of flex_attention's outputs.
    total = torch.logaddexp(aux.lse, sinks.to(aux.lse.dtype)[:, None])
    return (out * (aux.lse - total).exp()[..., None]).to(out.dtype)


def _block_mask(pattern: tuple[Any, ...], blocks: tuple[Tensor, ...], shape: tuple[int, int, int, int]) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    q_sequence, k_sequence, q_position, k_position, left, right, visible = pattern
    batch, heads, q_len, kv_len = shape
    q_sequence, q_position = q_sequence.expand(batch, -1), q_position.expand(batch, -1)
    k_sequence, k_position = k_sequence.expand(batch, -1), k_position.expand(batch, -1)
    if visible is not None:
        visible = visible.expand(batch, heads, -1, -1)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = q_position[b, i] - k_position[b, j]
        seen = (q_sequence[b, i] == k_sequence[b, j]) & (distance <= left[0]) & (-distance <= right[0])
        return seen if visible is None else seen & visible[b, h, i, j]

    rows = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    columns = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
    lists = dict(zip((*rows, *columns), blocks, strict=True))
    return BlockMask(seq_lengths=(q_len, kv_len), **lists, BLOCK_SIZE=(128, 128), mask_mod=mask_mod)


@cache
def _compiled(*key: Any) -> Callable[..., Any]:
    """`_attend`, compiled anew for a key: torch.compile counts recompilations by the code object."""
    import torch

    code = _attend.__code__.replace(co_name=f"_attend_{len(_codes)}")
    _codes.append(code)
    copy = FunctionType(code, _attend.__globals__, code.co_name, _attend.__defaults__, _attend.__closure__)
    compiled: Callable[..., Any] = torch.compile(copy, fullgraph=True)
    return compiled


_codes: list[Any] = []


def _mark_dynamic(*tensors: Tensor | None) -> None:
    """Have torch.compile compile for any length at once."""
    import torch

    for tensor in tensors:
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, [d for d, size in enumerate(tensor.shape) if size > 1])
