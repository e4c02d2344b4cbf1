"""transformers 5.4 on: continuous batching gives its block table to kernels with a 2 or a 3 in their name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import wraps
from types import FunctionType
from typing import Any

from kernel_compat.attention.defaults import resolve
from kernel_compat.errors import KernelCompatError
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim

_BATCHING = "transformers.generation.continuous_batching"
#: What upstream's decision asks of the name: whether it is that of FlashAttention-2 or -3.
_QUESTION = "is_flash_attention_requested"

_logger = logging.getLogger(__name__)


def _in_processor(decide: Callable[..., Any]) -> Callable[..., Any]:
    """5.4 to 5.8, where the cache exists already and what is decided is written into it."""

    @wraps(decide)
    def _ensure_decode_fast_path_is_available(self: Any) -> Any:
        cache = self.cache
        asked = cache.max_blocks_per_request > 0
        return _answered(decide, self.config, cache.block_size, asked)(self)

    return _ensure_decode_fast_path_is_available


def _in_config(decide: Callable[..., Any]) -> Callable[..., Any]:
    """5.9 on, where it is written into the config of continuous batching before there is a cache."""

    @wraps(decide)
    def ensure_decode_fast_path_is_available(
        config: Any, cb_config: Any, user_requested: bool, *args: Any, **kwargs: Any
    ) -> Any:
        page_size = getattr(cb_config, "page_size", None) or cb_config.block_size  # renamed in 5.18
        asked = user_requested and cb_config.max_blocks_per_request != 0
        return _answered(decide, config, page_size, asked)(config, cb_config, user_requested, *args, **kwargs)

    return ensure_decode_fast_path_is_available


def _answered(decide: Callable[..., Any], config: Any, page_size: int, asked: bool) -> Callable[..., Any]:
    """Upstream's decision; for a registered name with the kernel's answer in the place of the name's.

    What else it asks, such as for CUDA, it asks as before. A forward of the user's own is given what it was given: whether
    it knows of block tables can't be told.
    """
    entry = resolve(config._attn_implementation)
    if entry is None or entry.forward is not None:
        return decide
    reason = entry.kernel.unpaged_because(page_size, _head_dim(config)) or _windows(config)
    if reason is not None and asked:
        _logger.warning("max_blocks_per_request is ignored for %r: %s.", entry.name, reason)

    def is_flash_attention_requested(*args: Any, version: Any = None, **kwargs: Any) -> bool:
        return reason is None and version != 2  # 2 alone is asked for XPU, where no kernel has a paged cache

    names = {**decide.__globals__, _QUESTION: is_flash_attention_requested}
    return FunctionType(decide.__code__, names, decide.__name__, decide.__defaults__, decide.__closure__)


def _head_dim(config: Any) -> int:
    """0 where a config doesn't tell: upstream makes no cache by such a one."""
    given = getattr(config, "head_dim", None)
    return int(given or getattr(config, "hidden_size", 0) // getattr(config, "num_attention_heads", 1))


def _windows(config: Any) -> str | None:
    """Upstream has no block table for layers with a window: 5.9 to 5.15 find out in the first step, and die."""
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"]
    others = sorted({kind for kind in types if kind != "full_attention"})
    return f"a model with {' and '.join(others)} layers has no block table" if others else None


def _replace(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, decide in originals.items():
        if _QUESTION not in getattr(getattr(decide, "__code__", None), "co_names", ()):
            raise KernelCompatError(f"{name} does not ask {_QUESTION}: it decides by something else")
    wrappers = {
        "_ensure_decode_fast_path_is_available": _in_processor,
        "ensure_decode_fast_path_is_available": _in_config,
    }
    return {name: wrappers[name](decide) for name, decide in originals.items()}


SHIM = Shim(
    name="tf5_decode_fast_path",
    distribution="transformers",
    versions=">=5.4,<6",
    reason=(
        "transformers gives the block table of continuous batching to names with a 2 or a 3 in them (up to 5.12 a 3 alone), "
        "whatever their kernel can do"
    ),
    seams=(
        Seam(
            f"{_BATCHING}.continuous_api:ContinuousBatchProcessor._ensure_decode_fast_path_is_available",
            ("self",),
            versions="<5.9",
        ),
        Seam(
            f"{_BATCHING}.initialization:ensure_decode_fast_path_is_available",
            ("config", "cb_config", "user_requested"),
            versions=">=5.9",
        ),
    ),
    replace=_replace,
)
