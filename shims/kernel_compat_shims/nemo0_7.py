"""nemo-automodel 0.7: for packed sequences its loader and its collater take FlashAttention's own names, and no others.

The loader replaces any other name, or raises where no FlashAttention is installed; the collater makes dense masks for it.
"""

from __future__ import annotations

from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each

from ._flash_names import FlashNames


def _shim(name: str, reason: str, module: str, attribute: str) -> Shim:
    """One for each module: programs import either without the other."""
    return Shim(
        name=name,
        distribution="nemo-automodel",
        versions="==0.7.*",
        reason=reason,
        upstream=f"nemo_automodel 0.7.0, {module}.{attribute}",
        delete_when="the oldest supported nemo_automodel takes any name of transformers' table",
        seams=(Seam(f"nemo_automodel.{module}:{attribute}", any_form=True),),
        replace=each(FlashNames),
        on_import=True,
    )


SHIMS = (
    _shim(
        "nemo_flash_names",
        "with packed sequences the loader replaces every attention name but FlashAttention's own",
        "_transformers.kernel_patches",
        "FLASH_ATTN_IMPLEMENTATIONS",
    ),
    _shim(
        "nemo_packing",
        "packed sequences get dense masks under every attention name but FlashAttention's own",
        "components.models.common.packing",
        "_FLASH_ATTN_IMPLEMENTATIONS",
    ),
)
