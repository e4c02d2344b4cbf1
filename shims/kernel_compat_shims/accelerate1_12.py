"""accelerate 1.12 and later: sequence parallelism takes FlashAttention-2 and -3, sdpa and hub kernels, and refuses any other name.

The check is in the dataclass, before a model exists. DeepSpeed looks the name up in transformers' table afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each

from ._flash_names import CountsAsFlash, has_varlen_kernel


def _post_init(original: Any) -> Callable[..., Any]:
    @wraps(original)
    def __post_init__(self: Any) -> None:
        # The name may come from the environment variable, which upstream reads after this.
        name = self.sp_attn_implementation
        if name is None:
            name = os.environ.get("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION")
        if not has_varlen_kernel(name):
            return original(self)
        self.sp_attn_implementation = CountsAsFlash(name)
        original(self)
        self.sp_attn_implementation = name

    return __post_init__


SHIM = Shim(
    name="accelerate_sequence_parallel",
    distribution="accelerate",
    versions=">=1.12,<2",
    reason="sequence parallelism refuses every attention name but those of its own list and hub kernels",
    upstream="huggingface/accelerate#3959; accelerate 1.15.0, DeepSpeedSequenceParallelConfig.__post_init__",
    delete_when="the oldest supported accelerate takes any name of transformers' table",
    seams=(Seam("accelerate.utils.dataclasses:DeepSpeedSequenceParallelConfig.__post_init__", ("self",)),),
    replace=each(_post_init),
)
