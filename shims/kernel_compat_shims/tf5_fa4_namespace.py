"""transformers 5.0 to 5.3: an environment with flash-attn-4 alone appears to have FlashAttention-2.

Both packages install into `flash_attn`, and `is_flash_attn_2_available` looks for that import name only.
"""

from __future__ import annotations

from functools import cache, wraps

from kernel_compat.environment import Environment
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each


def _unneeded(environment: Environment) -> str | None:
    owners = environment.imports.get("flash_attn", ())
    if "flash-attn-4" not in owners:
        return "flash-attn-4 is not installed"
    if "flash-attn" in owners:
        return "flash-attn is installed beside flash-attn-4"
    return None


SHIM = Shim(
    name="tf5_fa4_namespace",
    distribution="transformers",
    versions=">=5.0,<5.4",
    reason="with flash-attn-4 alone, transformers reports FlashAttention-2 as available",
    upstream="huggingface/transformers#44559",
    delete_when="the oldest supported transformers is 5.4",
    seams=(Seam("transformers.utils.import_utils:is_flash_attn_2_available", ()),),
    replace=each(lambda original: cache(wraps(original)(lambda: False))),
    unneeded_because=_unneeded,
)
