"""transformers 5.0 to 5.2: GPT-OSS's config refuses every flash attention name but that of one hub kernel.

Its reason: FlashAttention-2 and -3 drop attention sinks. Registered kernels without sinks refuse the model themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kernel_compat.attention.defaults import resolve
from kernel_compat.attention.roles import IMPLEMENTATION
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each


def _setter(original: Any) -> Callable[..., Any]:
    @wraps(original)
    def __setattr__(self: Any, key: str, value: Any) -> None:
        config = original.__globals__["GptOssConfig"]
        if key.removesuffix("_internal") in IMPLEMENTATION.spellings and resolve(value) is not None:
            super(config, self).__setattr__(key, value)  # the check is all that the class's own method adds
        else:
            original(self, key, value)

    return __setattr__


SHIM = Shim(
    name="tf5_gpt_oss",
    distribution="transformers",
    versions=">=5.0,<5.3",
    reason="GPT-OSS's config raises for every name with flash in it except one hub kernel's",
    upstream="huggingface/transformers#42736, huggingface/transformers#44177",
    delete_when="the oldest supported transformers is 5.3",
    seams=(
        Seam("transformers.models.gpt_oss.configuration_gpt_oss:GptOssConfig.__setattr__", ("self", "key", "value")),
    ),
    replace=each(_setter),
)
