"""transformers 5.0 and later: masks with chunks, as Llama 4's, raise for every name with flash in it.

The library's mask function makes them in full: kernels with masks of any kind take them, and others refuse them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kernel_compat.attention.defaults import resolve
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each


def _asking(original: Any) -> Callable[..., Any]:
    @wraps(original)
    def is_flash_attention_requested(config: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resolve(getattr(config, "_attn_implementation", None)) is not None:
            return False
        return original(config, *args, **kwargs)

    return is_flash_attention_requested


SHIM = Shim(
    name="tf5_chunked_masks",
    distribution="transformers",
    versions=">=5.0,<6",
    reason="create_chunked_causal_mask raises for every name with flash in it",
    upstream="huggingface/transformers#37351",
    delete_when="create_chunked_causal_mask leaves the refusal to the mask functions",
    seams=(Seam("transformers.masking_utils:is_flash_attention_requested", ("config",)),),
    replace=each(_asking),
)
