"""FlashAttention-3: ``flash_attn_interface``, built from source, or the forward alone as ``fa3_fwd_interface``."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

from .kernel import Features, Kernel, Provider


def _as_built(config: str) -> Any:
    """Builds leave parts out (windows, fp16, paged caches ...) and record which in a module beside the interface."""

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


_HOPPER: dict[str, Any] = {"min_capability": (9, 0), "max_capability": (9, 9)}

KERNEL = Kernel(
    "flash_attention_3",
    (
        Provider(
            module="flash_attn_interface",
            distribution="flash-attn-3",
            features=Features(softcap=True, deterministic=True, paged=True, **_HOPPER),
            install=(
                "flash-attn-3 is on no package index: build it from the hopper folder of the flash-attention source, "
                "or install its forward alone: pip install fa3-fwd"
            ),
            renamed={"block_table": "page_table"},
            refine=_as_built("flash_attn_config"),
        ),
        Provider(
            module="fa3_fwd_interface",
            distribution="fa3-fwd",
            features=Features(softcap=True, window=False, backward=False, dtypes=("bfloat16",), **_HOPPER),
            install="Install it with: pip install fa3-fwd",
            renamed={"block_table": "page_table"},
            refine=_as_built("fa3_fwd_config"),
        ),
    ),
)
