"""The two tables in which transformers looks up attention names, and our entries in them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch

from ..errors import UnprotectedError, UnsupportedFeatureError
from ..patching.swap import Change
from .forward import attention_forward
from .mask_function import attention_mask_function, plain_mask_function
from .names import AttentionName
from .parallel.sharding import ContextParallel
from .parallel.spread import over_ranks
from .parallel.ulysses import gathering_mask_function, spread
from .roles import KEY_OFFSETS, WINDOW
from .unsupported import refusing

__all__ = ["changes_of", "forward_of", "mask_function_of", "tables", "taken_by"]


def changes_of(entry: AttentionName, unprotected: UnprotectedError | None = None) -> list[Change]:
    """The changes of transformers' tables that enter a name.

    Args:
        unprotected: what its calls are refused with; None to compute them.
    """
    functions, masks = tables()
    if unprotected is not None:
        return [Change(table, entry.name, refusing(unprotected.again)) for table in (functions, masks)]
    mask = mask_function_of(entry)
    values: dict[str, Any] = {entry.name: forward_of(entry, entry.mask is None)}
    # A forward of the user's own isn't bypassed by upstream's, nor is `ulysses`: they have no paged alias.
    if entry.forward is None and entry.spread_over is None and "paged|flash_attention_2" in functions:
        values[f"paged|{entry.name}"] = _paged_forward(entry)
    return [Change(functions, key, forward) for key, forward in values.items()] + [
        Change(masks, key, mask) for key in values
    ]


def forward_of(entry: AttentionName, records_masks: bool = False) -> Callable[..., Any]:
    """The attention function of a name.

    Args:
        records_masks: as `attention_forward` takes it, for calls that aren't spread over ranks.
    """
    alone = entry.forward or attention_forward(entry.kernel, entry.name, records_masks)
    if entry.spread_over is None:
        return alone
    if isinstance(entry.spread_over, ContextParallel):
        return over_ranks(entry.kernel, entry.name, alone, entry.spread_over)
    return spread(entry.forward or attention_forward(entry.kernel, entry.name), alone, entry.spread_over)


def mask_function_of(entry: AttentionName) -> Callable[..., Any]:
    """The mask function of a name: its own, or the library's."""
    if entry.mask is not None:
        return entry.mask
    alone = attention_mask_function if entry.forward is None else plain_mask_function
    # Or its forward would be given masks of this rank's keys alone.
    if not entry.spreads:
        return alone
    return gathering_mask_function(entry.group, alone, refuses_others=entry.is_context_parallel)


def taken_by(name: str) -> str | None:
    """The module of transformers' attention function of this name; None if transformers doesn't have the name."""
    present = tables()[0].get(name)
    return None if present is None else repr(getattr(present, "__module__", None) or present)


def tables() -> tuple[dict[str, Any], dict[str, Any]]:
    """``ALL_ATTENTION_FUNCTIONS`` and ``ALL_MASK_ATTENTION_FUNCTIONS``.

    Both are views of a dict of their class: models that make an instance of their own share it.
    """
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    masks = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    return functions._global_mapping, masks._global_mapping


def _paged_forward(entry: AttentionName) -> Callable[..., Any]:
    """Upstream's forward for ``paged|NAME``: there from 5.0 until 5.19 did away with the prefix."""
    name = entry.name
    upstream = importlib.import_module("transformers.integrations.flash_paged").paged_attention_forward

    @wraps(upstream)
    def paged_attention_forward(
        module: Any, *args: Any, softcap: float | None = None, sliding_window: int | None = None, **kwargs: Any
    ) -> Any:
        if softcap:  # dropped by upstream's
            raise UnsupportedFeatureError(
                "softcap in continuous batching", f"paged|{name}", "Use transformers 5.19 or later, or 'paged|eager'."
            )
        if sliding_window and not WINDOW.attribute_of(module):
            # It reads the layer's, and layers that pass their window, as Mistral's, have none: there would be no window.
            module = SimpleNamespace(
                config=module.config,
                layer_idx=module.layer_idx,
                scaling=module.scaling,
                sliding_window=sliding_window,
            )
        cache = kwargs.get("cache")
        if entry.kernel.name == "flash_attention_4" and hasattr(cache, "trash_index"):
            kwargs["cache"] = _without_garbage(cache, KEY_OFFSETS.of(kwargs), module)
        return upstream(module, *args, **kwargs)

    return paged_attention_forward


def _without_garbage(cache: Any, cu_seqlens_k: Any, module: Any) -> Any:
    """A cache of continuous batching whose values behind the last sequence are zero.

    From 5.8 to 5.13 padding reads what padding has written, and FlashAttention-4 leaves its rows unwritten and multiplies
    the values behind a sequence by probabilities of 0: one NaN among them makes every token NaN. Upstream reads zeros from
    5.14 on.
    """
    if isinstance(cu_seqlens_k, dict):
        cu_seqlens_k = cu_seqlens_k["sliding_attention" if WINDOW.attribute_of(module) else "full_attention"]

    def update(*args: Any, **kwargs: Any) -> Any:
        keys, values = cache.update(*args, **kwargs)
        behind = torch.arange(len(values), device=values.device) >= cu_seqlens_k[-1]
        return keys, values.masked_fill(behind[:, None, None], 0)

    return SimpleNamespace(update=update)
