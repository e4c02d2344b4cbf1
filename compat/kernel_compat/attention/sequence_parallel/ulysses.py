"""Sequence parallelism around any attention function: each rank holds a slice of the tokens, and attends with a slice of the heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["process_group", "ulysses"]


def ulysses(forward: Callable[..., Any], group: ProcessGroup | DeviceMesh | None = None) -> Callable[..., Any]:
    """Attention over a sequence that is spread over the ranks of a group, by the all-to-all of DeepSpeed-Ulysses.

    Rank r holds the tokens ``[r * length, (r + 1) * length)``, of the same length on every rank. Before `forward` one
    all-to-all scatters the heads and gathers the sequence, after it a second one does the reverse; with fewer key than
    query heads those of the keys are repeated where there are fewer than ranks. Parameters' gradients are each rank's share:
    their sum over the ranks is the gradient of the sum of the ranks' losses.

    Everything about the sequence but query, key, value and ``position_ids`` is that of the full sequence: ``cu_seq_lens_*``,
    ``max_length_*``, masks. The mask function that comes with ``register_attention(..., sequence_parallel=group)`` gathers
    the ranks' slices of a padding mask; with this function alone it must be given in full.

    Args:
        forward: an attention function of transformers' calling convention, such as the one that `register_attention` describes.
            It gets (batch, heads / ranks, ranks * length, head_dim), ``s_aux`` of its heads, and no slice of ``position_ids``.
        group: a process group or a mesh of one dimension; None for the default group, looked up at every call.

    Returns:
        A function called as `forward`; its output has the rank's slice of the tokens and all heads. With
        ``skip_sequence_parallel=True`` or VeOmni's ``skip_ulysses=True`` it calls `forward` with what it is given: for
        layers whose tokens are not spread, and with a cache. So it does in a group of one rank.

    Raises:
        TypeError: `forward` is not callable, or `group` is no group that this rank is in.
    """
    if not callable(forward):
        raise TypeError(f"forward must be callable, not {forward!r}")
    from .all_to_all import spread

    return spread(forward, process_group(group))


def process_group(group: Any) -> ProcessGroup | None:
    """The process group of a group, a mesh of one dimension, or None.

    Raises:
        TypeError: it is something else, such as what ``new_group`` answers a rank outside of the group.
    """
    if group is None:
        return None
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"a group is a torch.distributed ProcessGroup that this rank is in, a DeviceMesh of one dimension or None, not {group!r}"
        )
    return group
