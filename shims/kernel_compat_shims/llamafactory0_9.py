"""llamafactory 0.9: ``flash_attn`` takes the five names of an enum, and packed rows are masked as for eager under any but FlashAttention-2's.

A YAML file's ``flash_attn`` is not compared with the enum before the model's config gets its attention name; an option's on the command line
is, by argparse.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kernel_compat.attention.defaults import resolve
from kernel_compat.attention.roles import IMPLEMENTATION
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each

from ._flash_names import has_varlen_kernel

CONFIGURE = "llamafactory.model.model_utils.attention:configure_attn_implementation"
COLLATOR = "llamafactory.data.collator:SFTDataCollatorWith4DAttentionMask.__post_init__"


def _configure(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @wraps(original)
    def configure_attn_implementation(config: Any, model_args: Any) -> None:
        if resolve(model_args.flash_attn) is None:
            return original(config, model_args)
        setattr(config, IMPLEMENTATION.spellings[0], model_args.flash_attn)

    return configure_attn_implementation


def _collator(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(original)
    def __post_init__(self: Any) -> None:
        if has_varlen_kernel(self.attn_implementation):
            self.attn_implementation = "flash_attention_2"  # the collator alone reads it: positions, and no mask
        original(self)

    return __post_init__


#: Two, because each is applied as soon as its module has been imported: other modules import the function by its name.
SHIMS = (
    Shim(
        name="llamafactory_names",
        distribution="llamafactory",
        versions="==0.9.*",
        reason="flash_attn refuses every name but its own five",
        upstream="llamafactory 0.9.5, configure_attn_implementation",
        delete_when="the oldest supported llamafactory takes any name of transformers' table",
        seams=(Seam(CONFIGURE, ("config", "model_args")),),
        replace=each(_configure),
        on_import=True,
    ),
    Shim(
        name="llamafactory_packing",
        distribution="llamafactory",
        versions="==0.9.*",
        reason="neat_packing makes a 4D mask under every name but flash_attention_2",
        upstream="llamafactory 0.9.5, SFTDataCollatorWith4DAttentionMask",
        delete_when="the oldest supported llamafactory packs without masks under any name",
        seams=(Seam(COLLATOR, ("self",)),),
        replace=each(_collator),
        on_import=True,
    ),
)
