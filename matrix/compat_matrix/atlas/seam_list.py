"""The seams that the atlas always looks for, besides those of the shims."""

from __future__ import annotations

import re
from collections.abc import Mapping

from packaging.utils import canonicalize_name

_FLASH = "transformers.modeling_flash_attention_utils"
_MODEL = "transformers.modeling_utils:PreTrainedModel"
_HUB = "transformers.integrations.hub_kernels"
_VARLEN = "torch.nn.attention.varlen"
_FA2 = "flash_attn.flash_attn_interface"
_AXOLOTL = "axolotl.utils.schemas.enums"
_FA4 = "flash_attn.cute.interface"

#: The attributes that the library relies on, whether a shim replaces them or not, by distribution.
SEAMS: Mapping[str, tuple[str, ...]] = {
    "transformers": (
        "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS",
        "transformers.masking_utils:ALL_MASK_ATTENTION_FUNCTIONS",
        f"{_FLASH}:_lazy_imports",
        f"{_FLASH}:lazy_import_flash_attention",
        f"{_FLASH}:lazy_import_paged_flash_attention",
        f"{_FLASH}:_process_flash_attention_kwargs",
        f"{_FLASH}:_flash_attention_forward",
        f"{_FLASH}:FLASH_ATTENTION_COMPATIBILITY_MATRIX",
        f"{_HUB}:load_and_register_kernel",
        f"{_HUB}:load_and_register_attn_kernel",
        f"{_MODEL}._supports_flash_attn",
        f"{_MODEL}._supports_flash_attn_2",
        f"{_MODEL}._flash_attn_2_can_dispatch",
        f"{_MODEL}._flash_attn_can_dispatch",
    ),
    "torch": (
        f"{_VARLEN}:varlen_attn",
        f"{_VARLEN}:varlen_attn_out",
        "torch.nn.attention:activate_flash_attention_impl",
        "torch.nn.attention:restore_flash_attention_impl",
    ),
    # Lists of attention names; those inside of functions are found by the seams of the shims alone.
    "trl": ("trl.trainer.sft_trainer:FLASH_ATTENTION_VARIANTS", "trl.trainer.dpo_trainer:FLASH_ATTENTION_VARIANTS"),
    "axolotl": (f"{_AXOLOTL}:CANONICAL_ATTN_IMPLS", f"{_AXOLOTL}:ATTN_IMPLS_SUPPORTING_PACKING"),
    "accelerate": ("accelerate.utils.dataclasses:DeepSpeedSequenceParallelConfig",),
    "deepspeed": ("deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF",),
    "ms-swift": ("swift.arguments.sft_args:SftArguments",),
    "peft": ("peft.tuners.tuners_utils:BaseTuner.forward",),
    "flash-attn": (f"{_FA2}:flash_attn_func", f"{_FA2}:flash_attn_varlen_func", f"{_FA2}:flash_attn_with_kvcache"),
    "flash-attn-4": (
        f"{_FA4}:flash_attn_func",
        f"{_FA4}:flash_attn_varlen_func",
        f"{_FA4}:_flash_attn_fwd",
        f"{_FA4}:_flash_attn_bwd",
    ),
}


def distribution_of(target: str) -> str:
    """The distribution that installs a module, by its name.

    Args:
        target: a seam, or a dotted name.
    """
    if re.match(r"flash_attn\.cute\b", target):
        return "flash-attn-4"
    return canonicalize_name(re.split("[.:]", target)[0])
