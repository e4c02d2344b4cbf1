"""transformers 5.0 to 5.3: FlashAttention-4 alone is taken for FlashAttention-2, whose import name it shares."""

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
    reason="with flash-attn-4 alone, transformers believes that FlashAttention-2 is there (transformers#44559)",
    seams=(Seam("transformers.utils.import_utils:is_flash_attn_2_available", ()),),
    replace=_replace,
    unneeded_because=_unneeded,
)
