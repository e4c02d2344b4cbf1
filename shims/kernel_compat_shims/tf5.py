"""transformers 5.0 and later: every attention name with ``flash`` in it is looked up on the hub."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from kernel_compat.attention.defaults import resolve
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each

from ._dispatch import FORWARD, MODEL, UTILS, check_of, forward_of, namespace, with_own_globals


def _loader(original: Callable[..., Any]) -> Callable[..., Any]:
    loaded: dict[Any, Any] = {}
    lock = threading.Lock()

    @wraps(original)
    def lazy_import_flash_attention(implementation: Any, *args: Any, **kwargs: Any) -> Any:
        entry = resolve(implementation)
        module: Any = sys.modules[UTILS]
        if entry is None:
            with lock:
                before = module._loaded_implementation
                try:
                    return original(implementation, *args, **kwargs)
                except BaseException:
                    # Up to 5.22 the name is marked as loaded already: the next call would run the previous kernel.
                    module._loaded_implementation = before
                    raise
        if entry not in loaded:
            kernel = namespace(entry)
            functions = [kernel.flash_attn_func, kernel.flash_attn_varlen_func]
            if hasattr(module, "_flash_with_kvcache_fn"):  # from 5.4 on
                functions.append(kernel.flash_attn_with_kvcache)
            functions += [vars(module)["_pad_input"], vars(module)["_unpad_input"]]
            # Upstream's function keeps in its module's globals what it loads: a copy leaves those as they are.
            copy = with_own_globals(
                original, _lazy_imports=lambda *args, **kwargs: functions, _loaded_implementation=None
            )
            loaded[entry] = copy(entry.name)
        return loaded[entry]

    return lazy_import_flash_attention


def _load_functions(name: str) -> None:
    """Load a name's functions together with the model, because torch.compile may be tracing the first forward."""
    module: Any = sys.modules[UTILS]
    module.lazy_import_flash_attention(name)


SHIMS = (
    Shim(
        name="tf5_flash_forward",
        protects="attention sinks, and models that call transformers' flash attention themselves",
        distribution="transformers",
        versions=">=5.0,<6",
        reason="transformers drops attention sinks, and passes FlashAttention-4 the maximum length as a tensor, which raises",
        upstream="huggingface/transformers#41427, huggingface/transformers#42736, huggingface/transformers#48353",
        delete_when="the oldest supported transformers calls the functions of a registered name with all arguments, or refuses",
        seams=(FORWARD,),
        replace=each(lambda original: forward_of(original, original)),
    ),
    Shim(
        name="tf5_loader",
        protects="the kernel of a registered name",
        distribution="transformers",
        versions=">=5.0,<6",
        reason="names with flash in them are looked up on the hub, and up to 5.22 count as loaded even if that fails",
        upstream="huggingface/transformers#41427; lazy_import_flash_attention of 5.22.2 and of 5.23.0",
        delete_when="the oldest supported transformers loads the functions of a registered name without the hub",
        seams=(Seam(f"{UTILS}:lazy_import_flash_attention", ("implementation", "attention_wrapper")),),
        replace=each(_loader),
    ),
    Shim(
        name="tf5_check",
        protects="the attention of a model that is loaded under a registered name",
        distribution="transformers",
        versions=">=5.0,<6",
        reason="a name is taken for FlashAttention-2 by a part of it (5.0 to 5.3) or replaced by a compatible one (from 5.2)",
        upstream="huggingface/transformers#44177; PreTrainedModel._check_and_adjust_attn_implementation of 5.3.0",
        delete_when="the oldest supported transformers keeps registered names as they are",
        seams=(
            Seam(f"{MODEL}._check_and_adjust_attn_implementation", ("self", "attn_implementation", "is_init_check")),
            Seam(f"{MODEL}.get_correct_attn_implementation", ("self", "requested_attention", "is_init_check")),
        ),
        replace=each(lambda original: check_of(original, _load_functions)),
    ),
)
