"""torch 2.12 on: what its FlashAttention-4 backend needs of flash-attn-4, and gets wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_compat.patching.shim import Shim

from ._torch_fa4 import IMPORT, deactivate_when_undone, not_installed, replace_import


def _replace(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: replace_import(original) for name, original in originals.items()}


SHIMS = (
    Shim(
        name="torch2_12_fa4",
        distribution="torch",
        versions=">=2.12,<2.14",
        reason=(
            "torch's FA4 backend takes two results of flash-attn-4's forward, which returns more since 4.0.0b19: once it "
            "is active every attention call of the process dies, SDPA's included"
        ),
        seams=(IMPORT,),
        replace=_replace,
        unneeded_because=not_installed,
        complete=deactivate_when_undone,
    ),
    Shim(
        name="torch2_14_fa4",
        distribution="torch",
        versions=">=2.14,<3",
        reason=(
            "flash-attn-4's backward is silently wrong on sm_90 for head dimensions that are no multiple of 32, and torch's "
            "FA4 backend hands them on, SDPA's included"
        ),
        seams=(IMPORT,),
        replace=_replace,
        unneeded_because=not_installed,
    ),
)
