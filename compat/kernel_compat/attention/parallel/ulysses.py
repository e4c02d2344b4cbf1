"""Sequence parallelism around any attention function: each rank holds a slice of the tokens and computes a slice of the heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from ..protocols import AttentionForward
from ..roles import LENGTHS, MASK, POSITIONS
from .groups import group_source

if TYPE_CHECKING:
    from typing import Literal

    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..forward_context import ForwardContext

#: Arguments of a call whose tokens aren't spread: ours, and VeOmni's.
SKIPS = ("skip_sequence_parallel", "skip_ulysses")

__all__ = ["SKIPS", "gathering_mask_function", "slice_of", "spread", "ulysses"]


def ulysses(
    forward: AttentionForward, group: ProcessGroup | DeviceMesh | Callable[[], Any] | Literal[True] | None = None
) -> AttentionForward:
    """Attention over a sequence that is spread over the ranks of a group, by the all-to-all of DeepSpeed-Ulysses.

    Rank r holds the tokens ``[r * length, (r + 1) * length)``, of the same length on every rank. Before `forward` one
    all-to-all scatters the heads and gathers the sequence, after it a second one does the reverse; with fewer key than
    query heads the key heads are repeated if there are fewer than ranks. Each rank has a share of a parameter's gradient:
    the sum of the shares is the gradient of the sum of the ranks' losses.

    Query, key, value and ``position_ids`` are the rank's slices. Every other argument about the sequence is that of the full
    sequence: ``cu_seq_lens_*``, ``max_length_*``, masks. The mask function of ``register_attention(...,
    sequence_parallel=group)`` gathers the ranks' slices of a padding mask; this function alone takes the full mask.

    Args:
        forward: an attention function with transformers' calling convention, as `register_attention` describes it. It gets
            (batch, heads / ranks, ranks * length, head_dim), ``s_aux`` of its heads, and no slice of ``position_ids``.
        group: a process group or a mesh of one dimension, or a function that returns one at each call, for a framework that makes
            its groups later; None or True for the default group, looked up at every call.

    Returns:
        A function called as `forward`; its output has the rank's slice of the tokens and all heads. With
        ``skip_sequence_parallel=True`` or VeOmni's ``skip_ulysses=True`` it passes its arguments on unchanged: for
        layers whose tokens are not spread, and with a cache. In a group of one rank, and without one, it does so as well.

    Raises:
        TypeError: `forward` is not callable, or `group` is no group that this rank is in; by a call, if what `group` returns is
            none.
    """
    if not callable(forward):
        raise TypeError(f"forward must be callable, not {forward!r}")
    return spread(forward, forward, group)


def spread(forward: AttentionForward, alone: AttentionForward, group: Any) -> AttentionForward:
    """`ulysses` of a forward, and another one for calls that aren't spread."""
    source = group_source(group)
    # torch stays unloaded until here.
    import torch.distributed as dist

    from ...kernels.memo import fixed_shapes
    from ..forward_context import current_context
    from .all_to_all import gather_heads, scatter_heads
    from .checks import Slice, check_call, on_every_rank, require_positions

    # The first call waits for the device in its checks, and the ranks exchange the result: most mistakes are made in every
    # call. Later calls do neither.
    first = True

    @wraps(forward)
    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        skip_sequence_parallel: bool = False,
        skip_ulysses: bool = False,
        **kwargs: Any,
    ) -> Any:
        nonlocal first
        if (group := source()) is None:
            return alone(module, query, key, value, attention_mask, **kwargs)
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if ranks == 1:
            return forward(module, query, key, value, attention_mask, **kwargs)
        if skip_sequence_parallel or skip_ulysses:
            return forward(module, query, key, value, slice_of(attention_mask, key.shape[2], ranks, rank), **kwargs)

        batch, heads, length = query.shape[:3]
        context = current_context()
        if context is not None and context.covers(batch, length, key.shape[2], causal=True):
            require_positions(context)
            kwargs = _with_model_arguments(kwargs, context)
        own = Slice(rank, ranks, batch, length, wait=first and not fixed_shapes(query))
        check = partial(check_call, module, (query, key, value), attention_mask, kwargs, own)
        if own.wait:
            attention_mask, kwargs = on_every_rank(check, (batch, length), query.device, group)
            first = False
        else:
            attention_mask, kwargs = check()
        query, key, value = scatter_heads(query, key, value, group, ranks)
        output = forward(module, query, key, value, attention_mask, **kwargs)[0]
        if output.shape[:3] != (batch, ranks * length, heads // ranks):
            raise ValueError(
                f"{forward!r} returns the shape {tuple(output.shape)} for a query of shape {tuple(query.shape)}: it must "
                "be (batch, length, heads, head_dim)"
            )
        return gather_heads(output, group, ranks), None

    attention.ulysses_group = source  # type: ignore[attr-defined]
    return attention


def gathering_mask_function(
    group: Any, alone: Callable[..., Tensor | None] | None = None, *, refuses_others: bool = False
) -> Callable[..., Tensor | None]:
    """`plain_mask_function` for tokens spread over a group: slices of a padding mask are gathered to the full sequence's.

    Every rank must get a mask, or none: the mask functions are called at the same places on every rank, so the ranks
    communicate there. A rank alone doesn't know whether another's slice has padding.

    Args:
        group: as for `ulysses`.
        alone: the mask function of calls that aren't spread; None for `plain_mask_function`.
        refuses_others: whether masks besides padding, causality, a window and chunks raise UnsupportedFeatureError here. Built of slices,
            they may fail in other ways before the forward refuses them.
    """
    import torch.distributed as dist

    from ...kernels.memo import fixed_shapes
    from ..forward_context import ChunkRecord, current_context
    from ..mask_function import chunk_size, mask_of_ones, mask_pattern, plain_mask_function, query_length
    from .all_to_all import gather_mask
    from .checks import unspread
    from .text_model import is_beside_encoder, is_unsplit

    source = group_source(group)

    def mask_function(**arguments: Any) -> Tensor | None:
        if (group := source()) is None or is_unsplit():
            return (alone or plain_mask_function)(**arguments)
        pattern = mask_pattern(arguments)
        if is_beside_encoder() and pattern is not None and not pattern.causal:
            return (alone or plain_mask_function)(**arguments)  # of the encoder's states
        mask: Tensor | None = MASK.of(arguments)
        ranks, length, context = dist.get_world_size(group), query_length(arguments), current_context()
        chunk = None
        if refuses_others and ranks > 1 and pattern is None and not _skips_all():
            chunk = chunk_size(arguments)
            if chunk is None or context is None:
                raise unspread(
                    "a mask besides padding, causality, a window and chunks, made of a rank's tokens",
                    "Pass images through ContextParallel.shard with the batch, or a 4D attention_mask of the whole batch.",
                )
        # As many keys as queries: there is no cache. Other patterns are built in full from slices, and the forward refuses them.
        columns = None if mask is None else mask.shape[1]
        if chunk is None and (
            ranks == 1
            or columns not in (length, ranks * length)
            or arguments["kv_length"] not in (length, columns)
            or pattern is None
        ):
            return plain_mask_function(**arguments)
        if mask is not None and columns == length:
            mask = gather_mask(mask, group, ranks)
        padding = None if mask is None or (not fixed_shapes(mask) and bool(mask.all())) else mask
        if chunk is None or context is None:
            return padding
        tokens = mask_of_ones(arguments, ranks * length)[:, None, None]
        context.chunks.append(ChunkRecord(tokens, padding, chunk))
        return tokens

    return mask_function


def _skips_all() -> bool:
    """Whether the model's call in progress says that its tokens aren't spread."""
    from ..forward_context import current_context

    context = current_context()
    return context is not None and not set(SKIPS).isdisjoint(context.arguments.names)


def _with_model_arguments(kwargs: dict[str, Any], context: ForwardContext) -> dict[str, Any]:
    """The keywords of a layer, with the lengths and positions that its model got and didn't pass on."""
    known = (*zip(LENGTHS, context.arguments.lengths or (), strict=False), (POSITIONS, context.arguments.positions))
    missing = {role.named(kwargs): value for role, value in known if value is not None and role.of(kwargs) is None}
    return {**kwargs, **missing}


def slice_of(mask: Tensor | None, length: int, ranks: int, rank: int) -> Tensor | None:
    """The rank's own slice of a padding mask that was gathered; other masks as they are."""
    if mask is not None and getattr(mask, "ndim", 0) == 2 and mask.shape[1] == ranks * length:
        return mask[:, rank * length : (rank + 1) * length]
    return mask
