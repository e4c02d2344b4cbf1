"""transformers 5.24 and later: masks of packed sequences hide what they intersect, such as the blocks of images, under torch.compile.

In a graph a mask function's closure can't be read, and its name and arguments say what it is. Up to 5.23 a union with blocks has the name of
a union; from 5.24 on it is intersected with the packed sequences, which every graph without a mask has, and looks like packed sequences alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each


def _naming_unions(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def and_masks(*mask_functions: Callable[..., Any]) -> Callable[..., Any]:
        combined: Callable[..., Any] = original(*mask_functions)
        if all(getattr(function, "__name__", "") != "or_mask" for function in mask_functions):
            return combined

        def mask_of_a_union(*indices: Any) -> Any:
            return combined(*indices)

        return mask_of_a_union

    return and_masks


SHIM = Shim(
    name="tf5_mask_unions",
    distribution="transformers",
    versions=">=5.24,<6",
    reason="under torch.compile the blocks of images are indistinguishable from packed sequences, and would be left out of the mask",
    protects="compiled models: masks with blocks that see each other",
    upstream="transformers 5.24.0, create_causal_mask",
    delete_when="the oldest supported torch reads the closures of functions that are made in a graph",
    seams=(Seam("transformers.masking_utils:and_masks", ("mask_functions",)),),
    replace=each(_naming_unions),
)
