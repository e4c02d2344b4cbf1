"""transformers 4.54 to 4.57: one flash attention implementation per process, and attention names that are replaced.

- `lazy_import_flash_attention` keeps the first implementation that it loads, and the attention name is passed to a parameter that
  `_flash_attention_forward` ignores (huggingface/transformers#41347, #41427; both merged for 5.0).
- 4.55 makes sliding windows one token too wide (#39408, fixed by #40163 in 4.56).
- 4.57 replaces names that start with ``flash_attention`` by a hub kernel (#40178, #41010).
- 4.54 and 4.55 fail on a dict of attention names (#39984, in 4.56).
- Models with attention classes of their own, which transformers moves to its attention interface one by one (#38301 for BERT,
  #43030 for ModernBERT), know no registered names.

Delete this module when the oldest supported transformers is 5.0.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from functools import wraps
from typing import Any

from kernel_compat.attention.defaults import resolve
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim

from ._dispatch import FORWARD_PARAMETERS, check_of, forward_of, implementation_key, namespace, with_implementation
from ._own_attention import own_attention

_UTILS = "transformers.modeling_flash_attention_utils"


def _replace_forward(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    original = originals["_flash_attention_forward"]

    def others(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **with_implementation(kwargs))

    return {"_flash_attention_forward": forward_of(original, others)}


def _replace_loader(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    original = originals["lazy_import_flash_attention"]
    loaded: dict[Any, Any] = {}
    lock = threading.Lock()

    def load(implementation: Any) -> Any:
        module = sys.modules[_UTILS]
        functions = module._lazy_imports(implementation)
        return functions, module._lazy_define_process_function(functions[1])

    @wraps(original)
    def lazy_import_flash_attention(implementation: Any, *args: Any, **kwargs: Any) -> Any:
        if implementation is None:
            return original(implementation, *args, **kwargs)
        entry = resolve(implementation)
        key = implementation_key(implementation if entry is None else entry)
        if key not in loaded:
            if entry is None:
                original(implementation, *args, **kwargs)  # a later call without a name gets this one
            with lock:
                # Keeps the object itself, because an identity is unique only as long as its object lives.
                loaded[key] = (implementation, load(implementation if entry is None else namespace(entry)))
        return loaded[key][1]

    return {"lazy_import_flash_attention": lazy_import_flash_attention}


def _replace_check(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: check_of(original) for name, original in originals.items()}


def _replace_config(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    original = originals["__init__"]

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # Its setter reads this for the parts that a dict doesn't name.
        vars(self).setdefault("_attn_implementation_internal", None)
        original(self, *args, **kwargs)

    return {"__init__": __init__}


SHIMS = (
    Shim(
        name="tf4_flash_forward",
        distribution="transformers",
        versions=">=4.55,<5",
        reason=(
            "transformers passes the attention name to a parameter that is ignored, so that the first flash "
            "implementation loaded serves every model; 4.55 also makes sliding windows one token too wide"
        ),
        upstream="huggingface/transformers#41347, huggingface/transformers#39408, huggingface/transformers#40163",
        delete_when="the oldest supported transformers is 5.0",
        seams=(Seam(f"{_UTILS}:_flash_attention_forward", FORWARD_PARAMETERS),),
        replace=_replace_forward,
    ),
    Shim(
        name="tf4_loader",
        distribution="transformers",
        versions=">=4.55,<5",
        reason="transformers keeps the first flash implementation it loads, and later names get that one too",
        upstream="huggingface/transformers#41427",
        delete_when="the oldest supported transformers is 5.0",
        seams=(Seam(f"{_UTILS}:lazy_import_flash_attention", ("implementation",)),),
        replace=_replace_loader,
    ),
    Shim(
        name="tf4_check",
        distribution="transformers",
        versions=">=4.54,<5",
        reason=(
            "transformers 4.57 replaces every name that starts with flash_attention by a hub kernel if the kernels "
            "package is installed and FlashAttention is not; the kernel of a registered name is checked at load time"
        ),
        upstream="huggingface/transformers#40178, huggingface/transformers#41010",
        delete_when="the oldest supported transformers is 5.0",
        seams=(
            Seam(
                "transformers.modeling_utils:PreTrainedModel._check_and_adjust_attn_implementation",
                ("self", "attn_implementation", "is_init_check"),
            ),
            Seam(
                "transformers.modeling_utils:PreTrainedModel.get_correct_attn_implementation",
                ("self", "_requested_attention", "is_init_check"),
                versions="==4.55.*",
            ),
            Seam(
                "transformers.modeling_utils:PreTrainedModel.get_correct_attn_implementation",
                ("self", "requested_attention", "is_init_check"),
                versions=">=4.56",
            ),
        ),
        replace=_replace_check,
    ),
    Shim(
        name="tf4_config",
        distribution="transformers",
        versions=">=4.54,<4.56",
        reason="from_pretrained with a dict of attention names fails on a missing attribute of the config",
        upstream="huggingface/transformers#39984",
        delete_when="the oldest supported transformers is 4.56",
        seams=(Seam("transformers.configuration_utils:PretrainedConfig.__init__", ("self",)),),
        replace=_replace_config,
    ),
    Shim(
        name="tf4_own_attention",
        distribution="transformers",
        versions=">=4.54,<5",
        reason=(
            "models that choose their attention class from a table of their own don't know registered names, and call "
            "_flash_attention_forward without a name, or without having imported it"
        ),
        upstream="huggingface/transformers#38301, huggingface/transformers#43030",
        delete_when="the oldest supported transformers is 5.0",
        seams=(),
        replace=lambda originals: {},
        complete=own_attention.activate,
    ),
)
