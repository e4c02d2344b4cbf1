"""The process group whose ranks sequences are spread over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["default_group", "group_source"]


def group_source(group: Any) -> Callable[[], ProcessGroup | None]:
    """A function that returns the process group of `ulysses` at each call, None for none; raises as `process_group`."""
    if group is None or group is True or group is default_group:
        return default_group
    if callable(group) and not hasattr(group, "get_group"):
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
