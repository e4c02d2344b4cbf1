"""The ranks that accelerate's `ParallelismConfig` spreads sequences over."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["MESH", "accelerate_mesh"]

#: The attribute of accelerate's state.
MESH = "context_parallel_mesh"


def accelerate_mesh() -> DeviceMesh | None:
    """The mesh of accelerate's ``cp_size`` ranks, or of ``cp_size`` x ``sp_size`` ranks, for `ContextParallel`.

    None while there is no `Accelerator` with a ``cp_size`` above 1.

    Raises:
        ValueError: there is such an `Accelerator`, and it was made before `install`.
    """
    module = sys.modules.get("accelerate.state")
    if module is None or not module.is_initialized():
        return None
    state = module.AcceleratorState()
    mesh: DeviceMesh | None = getattr(state, MESH, None)
    config = getattr(state, "parallelism_config", None)
    if mesh is None and config is not None and config.cp_enabled:
        raise ValueError("accelerate's ranks aren't known: call kernel_compat.install() before the Accelerator is made")
    return mesh
