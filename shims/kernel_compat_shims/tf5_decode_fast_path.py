"""transformers 5.4 and later: continuous batching passes its block table to kernels by their name.

`is_flash_attention_requested` decides: a name with a 3 in it gets the table, from 5.13 on a name with a 2 as well (for XPU).
From 5.9 to 5.15 models with sliding windows, for which there is no block table, fail in the first step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from kernel_compat.attention.defaults import resolve
from kernel_compat.attention.roles import HEAD_DIM, IMPLEMENTATION, LAYER_TYPES, WINDOW
from kernel_compat.errors import KernelCompatError
from kernel_compat.patching.pass_through import unwrapped
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each

from ._dispatch import with_own_globals

_BATCHING = "transformers.generation.continuous_batching"
#: The function by which upstream's decision reads the name.
_QUESTION = "is_flash_attention_requested"

_logger = logging.getLogger(__name__)


def _decision(decide: Callable[..., Any]) -> Callable[..., Any]:
    """Upstream's decision, which for a registered name depends on its kernel and no longer on the name."""
    decide = unwrapped(decide)
    if _QUESTION not in getattr(getattr(decide, "__code__", None), "co_names", ()):
        raise KernelCompatError(f"{decide.__name__} no longer calls {_QUESTION}")

    @wraps(decide)
    def in_processor(self: Any) -> Any:
        """5.4 to 5.8: the cache exists already, and the decision is written into it."""
        requested = self.cache.max_blocks_per_request > 0
        return _by_kernel(decide, self.config, self.cache.block_size, requested)(self)

    @wraps(decide)
    def in_config(config: Any, cb_config: Any, user_requested: bool, *args: Any, **kwargs: Any) -> Any:
        """5.9 and later: the decision is written into the config of continuous batching, before there is a cache."""
        page_size = getattr(cb_config, "page_size", None) or cb_config.block_size  # renamed in 5.18
        requested = user_requested and cb_config.max_blocks_per_request != 0
        return _by_kernel(decide, config, page_size, requested)(config, cb_config, user_requested, *args, **kwargs)

    return in_processor if decide.__name__.startswith("_") else in_config


def _by_kernel(decide: Callable[..., Any], config: Any, page_size: int, requested: bool) -> Callable[..., Any]:
    """`decide` for one config. Upstream's other conditions, such as CUDA, stay.

    A name with a forward of the user's own keeps upstream's decision, because that forward may or may not take block tables.
    """
    entry = resolve(IMPLEMENTATION.attribute_of(config))
    if entry is None or entry.forward is not None:
        return decide
    reason = entry.kernel.unpaged_because(page_size, _head_dim(config)) or _windows(config)
    if reason is not None and requested:
        _logger.warning("max_blocks_per_request is ignored for %r: %s.", entry.name, reason)

    def is_flash_attention_requested(*args: Any, version: Any = None, **kwargs: Any) -> bool:
        return reason is None and version != 2  # 2 alone means XPU, where no kernel has a paged cache

    return with_own_globals(decide, is_flash_attention_requested=is_flash_attention_requested)


def _head_dim(config: Any) -> int:
    """0 where a config has none: upstream can't make a cache by it."""
    head_dim = HEAD_DIM.attribute_of(config)
    return int(head_dim or getattr(config, "hidden_size", 0) // getattr(config, "num_attention_heads", 1))


def _windows(config: Any) -> str | None:
    """Why a model's layers have no block table; None where all have one. 5.9 to 5.15 fail in the first step."""
    types = LAYER_TYPES.attribute_of(config)
    if types is None:
        types = ["full_attention" if WINDOW.attribute_of(config) is None else "sliding_attention"]
    others = sorted({kind for kind in types if kind != "full_attention"})
    return f"a model with {' and '.join(others)} layers has no block table" if others else None


SHIM = Shim(
    name="tf5_decode_fast_path",
    protects="continuous batching",
    distribution="transformers",
    versions=">=5.4,<6",
    reason="names with a 3 in them, from 5.13 on a 2 too, get a block table whether or not their kernel has a paged cache",
    upstream="huggingface/transformers#44379, huggingface/transformers#46028, huggingface/transformers#48701",
    delete_when="the oldest supported transformers decides by the kernel's functions",
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
    replace=each(_decision),
)
