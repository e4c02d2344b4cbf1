"""torch's flex_attention behind FlashAttention-2's keywords, and with any mask and bias.

On a GPU it is compiled, once for a set of head dimensions, dtypes and options: lengths are dynamic, and masks are tensors. On a CPU it
is computed without compiling, which stores the scores; torch has no backward there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

from .options import Lengths, Mask, Options

if TYPE_CHECKING:
    from torch import Tensor

    from .flex_mask import FlexMask

__all__ = ["attend"]


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, lengths: Lengths | None = None, mask: Mask | None = None
) -> Tensor:
    """An `options.Attend`. The value's head dimension may be any; tokens behind the last sequence get zeros."""
    from .flex_mask import any_mask, equal_lengths, packed_sequences

    pattern = (options.causal, options.window_size)
    if lengths is not None:
        packed = packed_sequences(lengths.cu_seqlens_q, lengths.cu_seqlens_k, (q.shape[0], k.shape[0]), *pattern)
        return _attention(q[None], k[None], v[None], packed, None, options)[0]
    shape = (q.shape[1], k.shape[1])
    if mask is None:
        return _attention(q, k, v, equal_lengths(*shape, *pattern, q.device), None, options)
    return _attention(q, k, v, any_mask(mask.visible, mask.segments, shape, *pattern, q.device), mask.bias, options)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: FlexMask | None, bias: Tensor | None, options: Options) -> Tensor:
    import torch

    on_cpu = q.device.type == "cpu"
    if on_cpu:
        q, k, v = q.detach(), k.detach(), v.detach()  # torch refuses inputs with gradients even where none is computed
    tokens = (mask.q_sequence, mask.k_sequence, mask.q_position, mask.k_position) if mask else ()
    limits = (mask.left, mask.right, mask.visible) if mask else ()
    scores = (q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale, options.softcap or 0.0)
    sinks = options.s_aux
    blocks = mask.blocks if mask else ()
    heads_first = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    if on_cpu or torch.compiler.is_compiling():
        compute = _attend
    else:
        tensors = (*heads_first, *tokens, *limits, *blocks, bias, sinks)
        compute = _compiled(*scores, torch.is_grad_enabled(), tuple(map(_layout, tensors)))
        _mark_dynamic(tensors)
    tiles = {} if on_cpu else _tiles(heads_first[0], heads_first[2])
    out: Tensor = compute(*heads_first, (*tokens, *limits), blocks, bias, sinks, *scores, tiles)
    return out.transpose(1, 2)


def _tiles(q: Tensor, v: Tensor) -> dict[str, Any]:
    """The ``kernel_options`` of flex_attention where its own choice fails or is slow. Shapes have heads first."""
    import torch

    if q.shape[2] == 1:
        return {}
    chosen: dict[str, Any] = {"BACKEND": "TRITON"}  # its kernel for decoding takes no number of queries that changes
    of_q, of_v = (1 << (x.shape[-1] - 1).bit_length() for x in (q, v))  # a tile's sides are powers of 2
    size, dims = q.dtype.itemsize, of_q + of_v
    memory: int = getattr(torch.cuda.get_device_properties(q.device), "shared_memory_per_block_optin", 99 * 1024)

    def fits(queries: int, keys: int, stages: int) -> bool:
        return bool(size * (queries * of_q + stages * keys * dims) <= memory - 512)

    if max(of_q, of_v) <= 256 and (size == 2 or fits(64, 64, 3)):
        return chosen
    # Measured on an H200 with head dimension 512 and bfloat16: torch's own tiles don't fit into its memory in the forward, and
    # are slower in the backward than these.
    queries, keys, stages = next(
        (tile for tile in ((64, 32, 2), (64, 32, 1), (32, 32, 1), (32, 16, 1)) if fits(*tile)), (16, 16, 1)
    )
    chosen |= {"fwd_BLOCK_M": queries, "fwd_BLOCK_N": keys, "fwd_num_stages": stages, "fwd_num_warps": 8}
    # It keeps q and the output's gradient, or k and v, of 32 tokens, and the other two of 32 tokens a stage; and 512 bytes.
    stages = (memory - 512) // (32 * dims * size) - 1
    if size == 2 and stages > 0:
        sides = dict.fromkeys(("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2"), 32)
        chosen |= {**sides, "bwd_num_stages": min(stages, 2), "bwd_num_warps": 8}
    return chosen


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
    tiles: dict[str, Any],
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
    options["kernel_options"] = tiles
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


def _layout(tensor: Tensor | None) -> tuple[Any, ...]:
    """What torch.compile compiles for anew: a dtype, head dimensions, sizes of 1, and whether there are gradients."""
    if tensor is None:
        return ()
    sizes = tensor.shape
    static = sizes[1::2] if tensor.is_floating_point() and tensor.ndim == 4 else ()  # heads and head dimension
    return (tensor.dtype, tensor.device, tensor.requires_grad, static, *(size == 1 for size in sizes))


@cache
def _compiled(*key: Any) -> Callable[..., Any]:
    """`_attend`, compiled anew for a key: torch.compile counts recompilations by the code object, and stops at eight."""
    import torch

    name = f"_attend_{_compiled.cache_info().misses}"
    code = _attend.__code__.replace(co_name=name)
    copy = FunctionType(code, _attend.__globals__, name, _attend.__defaults__, _attend.__closure__)
    compiled: Callable[..., Any] = torch.compile(copy, fullgraph=True)
    return compiled


def _mark_dynamic(tensors: tuple[Tensor | None, ...]) -> None:
    """Have torch.compile compile for any batch and length at once."""
    import torch

    for tensor in tensors:
        if tensor is not None and tensor.ndim > 1:
            of_heads = tensor.is_floating_point() and tensor.ndim == 4
            dims = [d for d, size in enumerate(tensor.shape) if size > 1 and not (of_heads and d in (1, 3))]
            torch._dynamo.maybe_mark_dynamic(tensor, dims)
