"""transformers 5: the loader that takes every name with ``flash`` in it for a hub kernel."""

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

#: Upstream's loader is asked for a registered name in this disguise: it would not ask the hub loader for a name of its own.
_OURS = "kernel_compat:"


def _not_ours(record: logging.LogRecord) -> bool:
    """Upstream warns of every kernel without a paged cache as it loads; ours refuse when they are asked for one."""
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
                    # Up to 5.22 the name counts as loaded before it is: the next call would get the previous kernel.
                    module._loaded_implementation = before["_loaded_implementation"]
                    raise
            # The name may be the one loaded last, for a kernel that it no longer means.
            module._loaded_implementation = None
            logger = logging.getLogger(_UTILS)
            logger.addFilter(_not_ours)
            try:
                loaded[key] = lazy(implementation.replace(entry.name, _OURS + entry.name), *args, **kwargs)
            finally:
                logger.removeFilter(_not_ours)
                vars(module).update(before)  # ours are kept here, and upstream's stay upstream's
        return loaded[key]

    return {
        "load_and_register_attn_kernel": load_and_register_attn_kernel,
        "lazy_import_flash_attention": lazy_import_flash_attention,
    }


def _replace_check(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    def preload(name: str) -> None:
        # While the model is loaded, and not in its first forward, which torch.compile may be tracing.
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
            "and hands FlashAttention-4 the maximum length as a tensor, which it dies of"
        ),
        seams=(Seam(f"{_UTILS}:_flash_attention_forward", FORWARD_PARAMETERS),),
        replace=_replace_forward,
    ),
    Shim(
        name="tf5_loader",
        distribution="transformers",
        versions=">=5.0,<6",
        reason=(
            "transformers looks for every unknown name with flash in it on the hub, and takes a name whose loading "
            "failed for loaded (up to 5.22)"
        ),
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
            "transformers takes a name for FlashAttention-2 by a part of it (5.0 to 5.3), and replaces it where a model "
            "lists implementations it was tested with (5.2 on)"
        ),
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
        seams=(),
        replace=lambda originals: {},
        complete=own_attention.build,
    ),
)
