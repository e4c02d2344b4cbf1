"""trl 0.23.1 to 1.15: SFTTrainer warns of packed sequences under a name that isn't in its list.

1.16 has no list.
"""

from __future__ import annotations

from typing import Any

from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each

from ._flash_names import has_varlen_kernel


class _Variants(set[str]):
    """TRL's names; contains registered names as well, which may come and go."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or has_varlen_kernel(name)


def _variants(original: Any) -> _Variants:
    return _Variants(original)


SHIM = Shim(
    name="trl_flash_names",
    distribution="trl",
    versions=">=0.23.1,<1.16",
    reason="SFTTrainer warns of cross-contamination under names that aren't in its list",
    upstream="trl 1.15.0, trl.trainer.sft_trainer.FLASH_ATTENTION_VARIANTS",
    delete_when="the oldest supported trl is 1.16",
    seams=(Seam("trl.trainer.sft_trainer:FLASH_ATTENTION_VARIANTS", any_form=True),),
    replace=each(_variants),
    on_import=True,
)
