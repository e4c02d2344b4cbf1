"""accelerate 1.12 and later: sequence parallelism takes FlashAttention-2 and -3, sdpa and hub kernels, and refuses any other name.

The check is in the dataclass, before a model exists. DeepSpeed looks the name up in transformers' table afterwards.
"""

from __future__ import annotations

import os

from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each

from ._flash_names import check_of


def _of_the_environment() -> str | None:
    return os.environ.get("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION")


SHIM = Shim(
    name="accelerate_sequence_parallel",
    distribution="accelerate",
    versions=">=1.12,<2",
    reason="sequence parallelism refuses every attention name but those of its own list and hub kernels",
    upstream="huggingface/accelerate#3959; accelerate 1.15.0, DeepSpeedSequenceParallelConfig.__post_init__",
    delete_when="the oldest supported accelerate takes any name of transformers' table",
    seams=(Seam("accelerate.utils.dataclasses:DeepSpeedSequenceParallelConfig.__post_init__", ("self",)),),
    replace=each(check_of("sp_attn_implementation", _of_the_environment)),
)
