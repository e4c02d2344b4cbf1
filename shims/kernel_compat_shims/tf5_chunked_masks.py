"""transformers 5.0 and later: masks with chunks, as Llama 4's, raise for every name with flash in it.

The library's mask function makes them in full: kernels with masks of any kind take them, and others refuse them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_compat.attention.defaults import resolve
from kernel_compat.attention.roles import IMPLEMENTATION
from kernel_compat.patching.rewriting import with_globals
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim

_MODULE = "transformers.masking_utils"


def _replace(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    from transformers.masking_utils import is_flash_attention_requested

    def requested(config: Any = None, *args: Any, **kwargs: Any) -> bool:
        if resolve(IMPLEMENTATION.attribute_of(config)) is not None:
            return False
        return bool(is_flash_attention_requested(config, *args, **kwargs))

    original = originals["create_chunked_causal_mask"]
    mapping = originals["LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING"]  # generate() looks mask functions up here
    # Its other callers must go on reading what they read: only this function's global changes.
    copy = with_globals(original, {"is_flash_attention_requested": requested})
    return {
        "create_chunked_causal_mask": copy,
        "LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING": {
            name: copy if function is original else function for name, function in mapping.items()
        },
    }


SHIM = Shim(
    name="tf5_chunked_masks",
    distribution="transformers",
    versions=">=5.0,<6",
    reason="create_chunked_causal_mask raises for every name with flash in it",
    upstream="huggingface/transformers#37351",
    delete_when="create_chunked_causal_mask leaves the refusal to the mask functions",
    seams=(
        Seam(f"{_MODULE}:create_chunked_causal_mask", any_form=True),
        Seam(f"{_MODULE}:LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING", any_form=True),
    ),
    replace=_replace,
)
