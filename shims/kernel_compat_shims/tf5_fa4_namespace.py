"""transformers 5.0 to 5.3: an environment with flash-attn-4 alone appears to have FlashAttention-2.

Both packages install into `flash_attn`, and `is_flash_attn_2_available` looks for that import name only
(huggingface/transformers#44559; 5.4 tells the two apart).
Delete this module when the oldest supported transformers is 5.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, wraps
from typing import Any

from kernel_compat.environment import Environment
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim


def _replace(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    original = originals["is_flash_attn_2_available"]

    @cache
    @wraps(original)
    def is_flash_attn_2_available() -> bool:
        return False  # the shim applies only where flash-attn isn't installed

    return {"is_flash_attn_2_available": is_flash_attn_2_available}


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
    replace=_replace,
    unneeded_because=_unneeded,
)
