"""transformers 5.0 and later: every attention name with ``flash`` in it is looked up on the hub.

- `lazy_import_flash_attention` (huggingface/transformers#41427) reloads whenever two models with different names alternate, loads
  unknown names from the hub, and up to 5.22 marks a name as loaded before it is: after a failed load the next call runs the
  previous kernel.
- `_flash_attention_forward` drops attention sinks (#42736), and from 5.4 on passes the maximum length of packed sequences as a
  tensor (#48353, open).
- 5.0 to 5.3 decide by a part of the name that it is FlashAttention-2; from 5.2 on a name is replaced where the model lists
  compatible implementations (#44177).
- Models with attention classes of their own, which transformers moves to its attention interface one by one (#43030 for
  ModernBERT), know no registered names; models with remote code may never be moved.

Delete a shim when the oldest supported transformers resolves registered names itself, without the hub and by the model.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from functools import wraps
from typing import Any

from kernel_compat.attention.defaults import resolve
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim

from ._dispatch import FORWARD_PARAMETERS, check_of, forward_of, namespace
from ._own_attention import own_attention

_UTILS = "transformers.modeling_flash_attention_utils"
_MODEL = "transformers.modeling_utils:PreTrainedModel"

#: Prefix under which upstream's loader gets a registered name: it passes names of its own to no hub loader.
_OURS = "kernel_compat:"


def _not_ours(record: logging.LogRecord) -> bool:
    """Filter for upstream's warning that a kernel has no paged cache: a registered kernel refuses a block table itself."""
    return _OURS not in record.getMessage()


def _replace_forward(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    original = originals["_flash_attention_forward"]
    return {"_flash_attention_forward": forward_of(original, original)}


def _replace_loaders(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    from_hub = originals["load_and_register_attn_kernel"]
    lazy = originals["lazy_import_flash_attention"]
    loaded: dict[Any, Any] = {}
    lock = threading.Lock()

    @wraps(from_hub)
    def load_and_register_attn_kernel(attn_implementation: str, *args: Any, **kwargs: Any) -> Any:
        entry = resolve(attn_implementation.replace(_OURS, "", 1))
        if entry is None:
            return from_hub(attn_implementation, *args, **kwargs)
        return namespace(entry)

    @wraps(lazy)
    def lazy_import_flash_attention(implementation: Any, *args: Any, **kwargs: Any) -> Any:
        entry = resolve(implementation)
        key = (implementation, entry)
        if entry is not None and key in loaded:
            return loaded[key]
        module: Any = sys.modules[_UTILS]
        with lock:
            before = {n: v for n, v in vars(module).items() if n == "_loaded_implementation" or n.endswith("_fn")}
            if entry is None:
                try:
                    return lazy(implementation, *args, **kwargs)
                except BaseException:
                    # Up to 5.22 the name is marked as loaded already: the next call would run the previous kernel.
                    module._loaded_implementation = before["_loaded_implementation"]
                    raise
            module._loaded_implementation = None  # the name may have been loaded last, with another kernel
            logger = logging.getLogger(_UTILS)
            logger.addFilter(_not_ours)
            try:
                loaded[key] = lazy(implementation.replace(entry.name, _OURS + entry.name), *args, **kwargs)
            finally:
                logger.removeFilter(_not_ours)
                vars(module).update(before)  # `loaded` keeps registered names, the module upstream's own
        return loaded[key]

    return {
        "load_and_register_attn_kernel": load_and_register_attn_kernel,
        "lazy_import_flash_attention": lazy_import_flash_attention,
    }


def _replace_check(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    def preload(name: str) -> None:
        # At load time, because torch.compile may be tracing the first forward.
        module: Any = sys.modules[_UTILS]
        module.lazy_import_flash_attention(name.removeprefix("paged|"))

    return {name: check_of(original, preload) for name, original in originals.items()}


SHIMS = (
    Shim(
        name="tf5_flash_forward",
        distribution="transformers",
        versions=">=5.0,<6",
        reason=(
            "transformers reloads the flash implementation whenever two models alternate, drops attention sinks "
            "and passes FlashAttention-4 the maximum length as a tensor, which raises"
        ),
        upstream="huggingface/transformers#41427, huggingface/transformers#42736, huggingface/transformers#48353",
        delete_when="the oldest supported transformers calls the functions of a registered name and refuses arguments that they lack",
        seams=(Seam(f"{_UTILS}:_flash_attention_forward", FORWARD_PARAMETERS),),
        replace=_replace_forward,
    ),
    Shim(
        name="tf5_loader",
        distribution="transformers",
        versions=">=5.0,<6",
        reason=(
            "transformers looks up every unknown name with flash in it on the hub, and marks a name as loaded even if "
            "loading it fails (up to 5.22)"
        ),
        upstream="huggingface/transformers#41427; lazy_import_flash_attention of 5.22.2 and of 5.23.0",
        delete_when="the oldest supported transformers loads the functions of a registered name without the hub",
        seams=(
            Seam(
                "transformers.integrations.hub_kernels:load_and_register_attn_kernel",
                ("attn_implementation", "attention_wrapper"),
            ),
            Seam(f"{_UTILS}:lazy_import_flash_attention", ("implementation", "attention_wrapper")),
        ),
        replace=_replace_loaders,
    ),
    Shim(
        name="tf5_check",
        distribution="transformers",
        versions=">=5.0,<6",
        reason=(
            "transformers treats a name as FlashAttention-2 by a part of it (5.0 to 5.3), and replaces it if a model "
            "lists compatible implementations (5.2 and later)"
        ),
        upstream="huggingface/transformers#44177; PreTrainedModel._check_and_adjust_attn_implementation of 5.3.0",
        delete_when="the oldest supported transformers keeps registered names as they are",
        seams=(
            Seam(
                f"{_MODEL}._check_and_adjust_attn_implementation",
                ("self", "attn_implementation", "is_init_check"),
            ),
            Seam(f"{_MODEL}.get_correct_attn_implementation", ("self", "requested_attention", "is_init_check")),
        ),
        replace=_replace_check,
    ),
    Shim(
        name="tf5_own_attention",
        distribution="transformers",
        versions=">=5.0,<6",
        reason=(
            "models that choose their attention class from a table of their own don't know registered names, and call "
            "_flash_attention_forward without a name, or without having imported it"
        ),
        upstream="huggingface/transformers#43030; in remote code on every release",
        delete_when="no supported model, remote code included, has attention classes of its own",
        seams=(),
        replace=lambda originals: {},
        complete=own_attention.activate,
    ),
)
