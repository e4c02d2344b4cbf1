"""deepspeed 0.17.3 to 0.18: Ulysses takes FlashAttention-2 and -3 and sdpa, and refuses any other name.

0.19 takes every name of transformers' table but eager.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each

from ._flash_names import has_varlen_kernel

REGISTER = "deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF.register_with_transformers"
NAMES = ("model_name_or_path", "core_attn_implementation", "sequence_parallel_size")


class _CountsAsFlash(str):
    """A name that also equals ``"flash_attention_2"``, which is in upstream's list, and finds its own entry in transformers' table."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "flash_attention_2" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _register(original: Any) -> Callable[..., Any]:
    inner = original.__func__

    @wraps(inner)
    def register_with_transformers(
        cls: Any, model_name_or_path: Any, core_attn_implementation: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if has_varlen_kernel(core_attn_implementation):
            core_attn_implementation = _CountsAsFlash(core_attn_implementation)
        return inner(cls, model_name_or_path, core_attn_implementation, *args, **kwargs)

    return classmethod(register_with_transformers)  # type: ignore[return-value]


SHIM = Shim(
    name="deepspeed_ulysses",
    distribution="deepspeed",
    versions=">=0.17.3,<0.19",
    reason="Ulysses refuses every attention name but flash_attention_2, flash_attention_3 and sdpa",
    upstream="deepspeedai/DeepSpeed#7887",
    delete_when="the oldest supported deepspeed is 0.19",
    seams=(
        Seam(REGISTER, (*NAMES, "max_length", "micro_batch_size"), "<0.18.2"),
        Seam(REGISTER, (*NAMES, "micro_batch_size"), ">=0.18.2"),
    ),
    replace=each(_register),
    on_import=True,
)
