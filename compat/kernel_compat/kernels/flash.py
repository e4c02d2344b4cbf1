"""FlashAttention-2, -3 and -4: the code that their packages need beside their rows of the catalog."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .catalog import CATALOG, FA3_FWD, FLASH_ATTN, FLASH_ATTN_3
from .kernel import Kernel
from .provider import Features

__all__ = ["FLASH_ATTENTION_2", "FLASH_ATTENTION_3", "FLASH_ATTENTION_4"]


def _as_built(config: str) -> Callable[[Any, Features], Features]:
    """FlashAttention-3 may be built without some features: a module beside the interface records which."""

    def refine(module: Any, features: Features) -> Features:
        try:
            flags = importlib.import_module(config).CONFIG["build_flags"]
        except (ImportError, AttributeError, KeyError):
            return features

        def built(part: str) -> bool:
            return not flags.get(f"FLASHATTENTION_DISABLE_{part}", False)

        return replace(
            features,
            window=features.window and built("LOCAL"),
            softcap=features.softcap and built("SOFTCAP"),
            paged=features.paged and built("PAGEDKV") and built("APPENDKV"),
            backward=features.backward and built("BACKWARD"),
            dtypes=features.dtypes if built("FP16") else ("bfloat16",),
        )

    return refine


def _whole_pages(page_size: int, head_dim: int) -> str | None:
    return f"its pages are multiples of 256 tokens, not of {page_size}" if page_size % 256 else None


FLASH_ATTENTION_4 = Kernel("flash_attention_4", CATALOG["flash_attention_4"])
FLASH_ATTENTION_3 = Kernel(
    "flash_attention_3",
    (
        replace(FLASH_ATTN_3, refine=_as_built("flash_attn_config")),
        replace(FA3_FWD, refine=_as_built("fa3_fwd_config")),
    ),
)
FLASH_ATTENTION_2 = Kernel("flash_attention_2", (replace(FLASH_ATTN, unpaged_because=_whole_pages),))
