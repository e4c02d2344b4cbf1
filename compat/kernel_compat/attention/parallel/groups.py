"""The process group whose ranks sequences are spread over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Ranks", "default_group", "group_source", "ranks_source"]


class Ranks(NamedTuple):
    """The ranks that a sequence is spread over.

    Attributes:
        group: of all of them.
        head_ranks: how many neighbouring ranks share the heads of their tokens; None for as many as is best for a layer.
    """

    group: ProcessGroup
    head_ranks: int | None


def ranks_source(group: Any, head_ranks: int | None) -> Callable[[], Ranks | None]:
    """A function that returns the `Ranks` of `ContextParallel` at each call, None for none; raises as `process_group`."""
    if not _is_plane(group) and not _is_function(group):
        source = group_source(group)
        return lambda: None if (current := source()) is None else Ranks(current, head_ranks)
    of_meshes: dict[tuple[Any, Any], Ranks] = {}

    def ranks() -> Ranks | None:
        current = group() if _is_function(group) else group
        if current is None:
            return None
        if not _is_plane(current):
            return Ranks(process_group(current), head_ranks)
        key = current, default_group()  # behind a new default group a mesh is equal to one of the last
        if key not in of_meshes:
            of_meshes[key] = _ranks_of(current)
        return of_meshes[key]

    return ranks


def _is_function(group: Any) -> bool:
    """Whether this is a function that returns a group at each call. A mesh can be called, too."""
    return callable(group) and group is not default_group and not hasattr(group, "get_group")


def _is_plane(group: Any) -> bool:
    """Whether a group is a mesh of two dimensions."""
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(group, DeviceMesh) and group.ndim == 2


def _ranks_of(mesh: DeviceMesh) -> Ranks:
    import torch.distributed as dist

    ranks = mesh.mesh.flatten().tolist()
    # A group has its ranks in ascending order otherwise, and others would share heads.
    order = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    try:
        # The others of the default group needn't make it, and wait for nothing.
        flat = dist.new_group(ranks, use_local_synchronization=True, **order)
    except TypeError as error:
        if not order:
            raise
        raise ValueError(
            f"the ranks of a mesh of two dimensions are {mesh.mesh.tolist()}: this torch makes groups in ascending order alone"
        ) from error
    return Ranks(flat, mesh.size(1))


def group_source(group: Any) -> Callable[[], ProcessGroup | None]:
    """A function that returns the process group of `ulysses` at each call, None for none; raises as `process_group`."""
    if group is None or group is True or group is default_group:
        return default_group
    if _is_function(group):
        return lambda: None if (current := group()) is None else process_group(current)
    fixed = process_group(group)
    return lambda: fixed


def default_group() -> ProcessGroup:
    """The default process group; raises ValueError if there is none yet."""
    from torch.distributed import group

    if group.WORLD is None:
        raise ValueError(
            "sequence parallelism over the default process group, which has not been initialized: call "
            "torch.distributed.init_process_group first"
        )
    return group.WORLD


def process_group(group: Any) -> ProcessGroup:
    """The process group of a group or a mesh of one dimension.

    Raises:
        TypeError: it is neither: also the value that ``new_group`` returns on a rank outside of the group.
    """
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            "a group is a torch.distributed ProcessGroup that this rank is in, a DeviceMesh of one dimension, a function "
            f"that returns one of these, or None, not {group!r}"
        )
    return group
