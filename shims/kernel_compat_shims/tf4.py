"""transformers 4.54 to 4.57: one flash attention implementation per process, and attention names that are replaced."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kernel_compat.attention.defaults import resolve
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each

from ._dispatch import FORWARD, MODEL, UTILS, by_implementation, check_of, forward_of, namespace, with_implementation


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    return forward_of(original, lambda *args, **kwargs: original(*args, **with_implementation(kwargs)))


def _loader(original: Callable[..., Any]) -> Callable[..., Any]:
    copy_for = by_implementation(original, lambda names: names.update(_flash_fn=None, _process_flash_kwargs_fn=None))

    @wraps(original)
    def lazy_import_flash_attention(implementation: Any, *args: Any, **kwargs: Any) -> Any:
        if implementation is None:
            return original(implementation, *args, **kwargs)
        if entry := resolve(implementation):
            implementation = namespace(entry)
        else:
            original(implementation, *args, **kwargs)  # a later call without a name gets this one
        return copy_for(implementation)(implementation, *args, **kwargs)

    return lazy_import_flash_attention


def _config(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # Its setter reads this for the parts that a dict doesn't name.
        vars(self).setdefault("_attn_implementation_internal", None)
        original(self, *args, **kwargs)

    return __init__


SHIMS = (
    Shim(
        name="tf4_flash_forward",
        protects="the kernel of every flash attention but the first",
        distribution="transformers",
        versions=">=4.55,<5",
        reason="the first flash implementation loaded serves every model; 4.55 also makes sliding windows one token too wide",
        upstream="huggingface/transformers#41347, huggingface/transformers#39408, huggingface/transformers#40163",
        delete_when="the oldest supported transformers is 5.0",
        seams=(FORWARD,),
        replace=each(_forward),
    ),
    Shim(
        name="tf4_loader",
        protects="the kernel of a registered name",
        distribution="transformers",
        versions=">=4.55,<5",
        reason="transformers keeps the first flash implementation it loads, and later names get that one too",
        upstream="huggingface/transformers#41427",
        delete_when="the oldest supported transformers is 5.0",
        seams=(Seam(f"{UTILS}:lazy_import_flash_attention", ("implementation",)),),
        replace=each(_loader),
    ),
    Shim(
        name="tf4_check",
        protects="the attention of a model that is loaded under a registered name",
        distribution="transformers",
        versions=">=4.54,<5",
        reason="4.57 replaces names that start with flash_attention by a hub kernel where FlashAttention is not installed",
        upstream="huggingface/transformers#40178, huggingface/transformers#41010",
        delete_when="the oldest supported transformers is 5.0",
        seams=(
            Seam(
                f"{MODEL}._check_and_adjust_attn_implementation",
                ("self", "attn_implementation", "is_init_check"),
            ),
            Seam(
                f"{MODEL}.get_correct_attn_implementation",
                ("self", "_requested_attention", "is_init_check"),
                versions="==4.55.*",
            ),
            Seam(
                f"{MODEL}.get_correct_attn_implementation",
                ("self", "requested_attention", "is_init_check"),
                versions=">=4.56",
            ),
        ),
        replace=each(check_of),
    ),
    Shim(
        name="tf4_config",
        distribution="transformers",
        versions=">=4.54,<4.56",
        reason="from_pretrained with a dict of attention names fails on a missing attribute of the config",
        upstream="huggingface/transformers#39984",
        delete_when="the oldest supported transformers is 4.56",
        seams=(Seam("transformers.configuration_utils:PretrainedConfig.__init__", ("self",)),),
        replace=each(_config),
    ),
)
