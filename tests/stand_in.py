"""A CPU kernel in plain torch for torch's own flash attention, so that everything above it runs without a GPU.

``torch.nn.attention.varlen`` and its autograd are the real ones; the stand-in replaces the CUDA kernels below them,
`aten::_flash_attention_forward` and its backward. It raises the errors of the CUDA kernels and leaves the same outputs
unwritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def cpu_flash_attention() -> Iterator[list[dict[str, Any]]]:
    """Register the CPU kernel within a block; yields a list with the arguments of each call."""
    calls: list[dict[str, Any]] = []

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        seqused_k: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        **paging: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        asked = {"scale": scale, "causal": is_causal, "window": (window_size_left, window_size_right)}
        calls.append({**asked, "head_dim": query.shape[-1], "heads": (query.shape[-2], key.shape[-2]), **paging})
        assert dropout_p == 0.0
        assert alibi_slopes is None
        assert not return_debug_mask
        _require(query, key, value, cum_seq_q, max_q)
        block_table = paging.get("block_table")
        assert cum_seq_k is not None  # torch passes it with pages, too (seen with torch 2.13)
        assert cum_seq_k.dtype == torch.int32
        if block_table is None:
            assert seqused_k is None
            assert int(cum_seq_k.diff().max()) <= max_k
        else:
            assert seqused_k is not None
            assert seqused_k.dtype == block_table.dtype == torch.int32
            key, value, cum_seq_k = _gathered(key, value, seqused_k, block_table, max_k)
        output = torch.full(query.shape, float("nan"))
        lse = torch.full((query.shape[1], query.shape[0]), float("nan"))
        window = _window(window_size_left, window_size_right)
        for at, k_at, scores, weights in _sequences(query, key, cum_seq_q, cum_seq_k, is_causal, window, scale):
            v = _repeated(value[k_at], query)
            output[at] = (weights @ v).transpose(0, 1)
            lse[:, at] = scores.logsumexp(-1)
        if block_table is not None and paging.get("num_splits") != 1:
            output *= float("nan")  # torch 2.13 computes wrong results when it splits the keys
        rng, unused = torch.zeros(2, dtype=torch.uint64), torch.empty(0)
        return output.to(query.dtype), lse, rng, unused, torch.empty(0, dtype=query.dtype)

    def backward(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor,
        cum_seq_k: Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Tensor,
        unused: Tensor,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[Tensor, ...]:
        assert out.shape == grad_out.shape
        window = _window(window_size_left, window_size_right)
        saved = out, logsumexp
        return _gradients(grad_out, query, key, value, saved, cum_seq_q, cum_seq_k, is_causal, window, scale)

    library = torch.library.Library("aten", "IMPL")
    exact = torch.autocast("cpu", enabled=False)  # autocast would compute the products in half precision
    library.impl("_flash_attention_forward", exact(forward), "CPU")
    library.impl("_flash_attention_backward", exact(backward), "CPU")
    try:
        yield calls
    finally:
        library._destroy()


def _require(query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, max_q: int) -> None:
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    assert query.dtype == key.dtype == value.dtype
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    if query.shape[-1] % 8 or query.shape[-1] > 256:
        raise RuntimeError(f"head dimension {query.shape[-1]}")
    assert query.shape[-2] % key.shape[-2] == 0
    assert cum_seq_q is not None
    assert cum_seq_q.dtype == torch.int32
    assert int(cum_seq_q.diff().max()) <= max_q


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, -1 if right is None else right


def _gathered(
    key: Tensor, value: Tensor, seqused_k: Tensor, block_table: Tensor, max_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    size = key.shape[1]
    keys, values = [], []
    for length, pages in zip(seqused_k.tolist(), block_table, strict=True):
        assert 0 <= length <= min(max_k, size * len(pages))
        used = pages[: -(-length // size)]
        assert (used >= 0).all()
        keys.append(key[used].flatten(0, 1)[:length])
        values.append(value[used].flatten(0, 1)[:length])
    offsets = torch.nn.functional.pad(seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
    return torch.cat(keys), torch.cat(values), offsets


def _gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    saved: tuple[Tensor, Tensor],
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor,
    causal: bool,
    window: tuple[int, int],
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients from the log-sum-exp and the output that are given, as the CUDA kernels compute them."""
    out, logsumexp = saved
    dq, dk, dv = (torch.zeros(x.shape) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    for at, k_at, scores, without_sinks in _sequences(query, key, cum_seq_q, cum_seq_k, causal, window, scale):
        weights = without_sinks * (scores.logsumexp(-1) - logsumexp[:, at]).exp()[..., None]
        q, do, k, v = _heads(query[at]), _heads(grad_out[at]), *(_repeated(x[k_at], query) for x in (key, value))
        dp = do @ v.transpose(1, 2)
        expected = (weights @ v).transpose(0, 1).to(out.dtype)
        torch.testing.assert_close(out[at], expected, rtol=2**-6, atol=2**-7)  # the kernels sum grad * out
        ds = weights * (dp - (weights * dp).sum(-1, keepdim=True)) * scale
        dq[at] = (ds @ k).transpose(0, 1)
        groups = (key.shape[1], query.shape[1] // key.shape[1], *k.shape[1:])  # -1 is ambiguous without keys
        dk[k_at] = (ds.transpose(1, 2) @ q).view(groups).sum(1).transpose(0, 1)
        dv[k_at] = (weights.transpose(1, 2) @ do).view(groups).sum(1).transpose(0, 1)
    return dq.to(query.dtype), dk.to(query.dtype), dv.to(query.dtype)


def _heads(x: Tensor) -> Tensor:
    return x.float().transpose(0, 1)


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    return _heads(x).repeat_interleave(query.shape[1] // x.shape[1], 0)


def _sequences(
    query: Tensor,
    key: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor,
    causal: bool,
    window: tuple[int, int],
    scale: float | None,
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """For each sequence: the slices of its queries and keys, the scores (the lowest float where hidden) and the weights."""
    assert cum_seq_q is not None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    offsets, k_offsets = cum_seq_q.tolist(), cum_seq_k.tolist()
    assert len(offsets) == len(k_offsets)
    for begin, end, k_begin, k_end in zip(offsets, offsets[1:], k_offsets, k_offsets[1:], strict=False):
        # The kernel treats a negative length as 0.
        q_len, kv_len = end - begin, max(k_end - k_begin, 0)
        at, k_at = slice(begin, end), slice(k_begin, k_begin + kv_len)
        distance = torch.arange(q_len)[:, None] + (kv_len - q_len) - torch.arange(kv_len)[None]
        left, right = window[0], 0 if causal else window[1]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if left >= 0:
            hidden = hidden | (distance > left)
        if right >= 0:
            hidden = hidden | (-distance > right)
        scores = _heads(query[at]) @ _repeated(key[k_at], query).transpose(1, 2) * scale
        scores = scores.masked_fill(hidden, torch.finfo(torch.float32).min)
        yield at, k_at, scores, scores.softmax(-1) * ~hidden


#: The maximum lengths passed to each call of `fa4_forward`.
fa4_lengths: list[tuple[int | None, int | None]] = []


def fa4_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    return_lse: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    num_splits: int = 1,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, None, None, None]:
    """flash-attn-4's varlen forward as torch calls it; since 4.0.0b19 it returns five results."""
    assert return_lse
    assert seqused_k is page_table is out is None
    fa4_lengths.append((max_seqlen_q, max_seqlen_k))
    output = torch.full(q.shape, float("nan"))
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"))
    assert cu_seqlens_k is not None
    window = _fa4_window(window_size_left, window_size_right)
    for at, k_at, scores, weights in _sequences(q, k, cu_seqlens_q, cu_seqlens_k, causal, window, softmax_scale):
        output[at] = (weights @ _repeated(v[k_at], q)).transpose(0, 1)
        lse[:, at] = scores.logsumexp(-1)
    return output.to(q.dtype), lse, None, None, None


def fa4_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """flash-attn-4's backward; as on sm_90 it is wrong if the head dimension is no multiple of 32."""
    assert cu_seqlens_k is not None
    window = _fa4_window(window_size_left, window_size_right)
    dq, dk, dv = _gradients(dout, q, k, v, (out, lse), cu_seqlens_q, cu_seqlens_k, causal, window, softmax_scale)
    return (-dq if q.shape[-1] % 32 else dq), dk, dv


def _fa4_window(left: int | None, right: int | None) -> tuple[int, int]:
    if left == right == -1:  # no window; with a single -1 flash-attn-4 hides every key
        left = right = None
    assert left is None or left >= 0
    assert right is None or right >= 0
    return _window(left, right)
