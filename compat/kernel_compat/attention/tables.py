"""The two tables of transformers in which attention names are looked up, and our entries in them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch

from ..errors import UnsupportedFeatureError
from .forward import attention_forward
from .mask_function import attention_mask_function, plain_mask_function
from .registry import AttentionName
from .sequence_parallel.ulysses import ulysses

#: What each of our entries replaced: (table, key) -> (our value, the previous value or None).
_entries: dict[tuple[int, str], tuple[dict[str, Any], Any, Any]] = {}


def add(entry: AttentionName) -> str | None:
    """Enter a name in transformers' tables; answer why not where somebody else's entry is in the way."""
    functions, masks = tables()
    if entry.name in functions and not entry.override:
        theirs = functions[entry.name]
        return f"is taken in transformers by {getattr(theirs, '__module__', None) or theirs!r}"
    spread = entry.sequence_parallel is not False
    notes = entry.mask is None and not spread
    forward = entry.forward or attention_forward(entry.kernel, entry.name, notes)
    mask = entry.mask or (attention_mask_function if entry.forward is None else plain_mask_function)
    if spread:
        forward = ulysses(forward, entry.sequence_parallel)
    if hasattr(forward, "ulysses_group"):  # or it would be given masks of this rank's keys alone
        from .sequence_parallel.ulysses import gathering_mask_function

        mask = entry.mask or gathering_mask_function(forward.ulysses_group)
    _set(functions, entry.name, forward)
    # A forward of the user's own isn't bypassed by upstream's, nor is the exchange: they have no paged alias.
    paged = None if entry.forward is not None or spread else _paged_forward(functions, entry)
    if paged is not None:
        _set(functions, f"paged|{entry.name}", paged)
    if masks is not None:
        _set(masks, entry.name, mask)
        if paged is not None:
            _set(masks, f"paged|{entry.name}", mask)
    return None


def remove(entry: AttentionName) -> bool:
    """Put back what was there before `add`; False where somebody has replaced our entry since."""
    functions, masks = tables()
    ours = [
        _unset(table, key)
        for table in (functions, masks)
        if table is not None
        for key in (entry.name, f"paged|{entry.name}")
    ]
    return all(ours)


def tables() -> tuple[dict[str, Any], dict[str, Any] | None]:
    """``ALL_ATTENTION_FUNCTIONS`` (since 4.48) and ``ALL_MASK_ATTENTION_FUNCTIONS`` (since 4.53).

    Both are views of a dict of their class: models that make an instance of their own share it.
    """
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    try:
        masks = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    except ImportError:
        return functions._global_mapping, None
    return functions._global_mapping, masks._global_mapping


def _paged_forward(functions: dict[str, Any], entry: AttentionName) -> Callable[..., Any] | None:
    """Upstream's forward for ``paged|NAME``: there from 5.0 until 5.19 did away with the prefix."""
    if "paged|flash_attention_2" not in functions:
        return None
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
        if sliding_window and not getattr(module, "sliding_window", None):
            # It asks the layer, and layers that pass their window, as Mistral's, have none: there would be no window.
            module = SimpleNamespace(
                config=module.config,
                layer_idx=module.layer_idx,
                scaling=module.scaling,
                sliding_window=sliding_window,
            )
        cache = kwargs.get("cache")
        if entry.kernel.name == "flash_attention_4" and hasattr(cache, "trash_index"):
            kwargs["cache"] = _without_garbage(cache, kwargs["cu_seq_lens_k"], module)
        return upstream(module, *args, **kwargs)

    return paged_attention_forward


def _without_garbage(cache: Any, cu_seqlens_k: Any, module: Any) -> Any:
    """A cache of continuous batching whose values behind the last sequence are zero.

    From 5.8 to 5.13 padding reads what padding has written, and FlashAttention-4 leaves its rows unwritten and multiplies
    the values behind a sequence by probabilities of 0: one NaN among them makes every token NaN. Upstream reads zeros from
    5.14 on.
    """
    if isinstance(cu_seqlens_k, dict):
        cu_seqlens_k = cu_seqlens_k[
            "sliding_attention" if getattr(module, "sliding_window", None) else "full_attention"
        ]

    def update(*args: Any, **kwargs: Any) -> Any:
        keys, values = cache.update(*args, **kwargs)
        behind = torch.arange(len(values), device=values.device) >= cu_seqlens_k[-1]
        return keys, values.masked_fill(behind[:, None, None], 0)

    return SimpleNamespace(update=update)


def _set(table: dict[str, Any], key: str, value: Any) -> None:
    _entries[id(table), key] = (table, value, table.get(key))
    table[key] = value


def _unset(table: dict[str, Any], key: str) -> bool:
    if (id(table), key) not in _entries:
        return True
    _, value, previous = _entries.pop((id(table), key))
    if table.get(key) is not value:
        return False
    if previous is None:
        del table[key]
    else:
        table[key] = previous
    return True
