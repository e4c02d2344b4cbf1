"""trl 0.23.1 to 1.15: SFTTrainer warns of packed sequences under a name that isn't in its list.

1.16 has no list.
"""

from __future__ import annotations

from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each

from ._flash_names import FlashNames

SHIM = Shim(
    name="trl_flash_names",
    distribution="trl",
    versions=">=0.23.1,<1.16",
    reason="SFTTrainer warns of cross-contamination under names that aren't in its list",
    upstream="trl 1.15.0, trl.trainer.sft_trainer.FLASH_ATTENTION_VARIANTS",
    delete_when="the oldest supported trl is 1.16",
    seams=(Seam("trl.trainer.sft_trainer:FLASH_ATTENTION_VARIANTS", any_form=True),),
    replace=each(FlashNames),
    on_import=True,
)
