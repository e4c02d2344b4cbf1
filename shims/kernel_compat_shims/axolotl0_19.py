"""axolotl 0.19 to 0.21: the configuration takes the names of a list and hub kernels, and only some of them for packed sequences.

Under any other name packed sequences are masked as for sdpa and a warning says that tokens attend to other sequences.
"""

from __future__ import annotations

from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each

from ._flash_names import FlashNames

ENUMS = "axolotl.utils.schemas.enums"

SHIM = Shim(
    name="axolotl_flash_names",
    distribution="axolotl",
    versions=">=0.19,<0.22",
    reason="the configuration refuses every attention name but those of its own list and hub kernels",
    upstream="axolotl 0.19.0, axolotl.utils.schemas.enums",
    delete_when="the oldest supported axolotl takes any name of transformers' table",
    seams=(
        Seam(f"{ENUMS}:CANONICAL_ATTN_IMPLS", any_form=True),
        Seam(f"{ENUMS}:ATTN_IMPLS_SUPPORTING_PACKING", any_form=True),
    ),
    replace=each(FlashNames),
    on_import=True,
)
