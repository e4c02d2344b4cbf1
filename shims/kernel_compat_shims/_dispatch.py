"""Shared by the shims of all releases: how a registered name passes upstream's checks and reaches its kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

from kernel_compat.attention.defaults import resolve, unproven
from kernel_compat.attention.names import AttentionName
from kernel_compat.choosing.flash_flags import require_flash_support

from ._own_attention import attention_of_running, own_attention, require_whole_sequences

#: The parameters of upstream's `_flash_attention_forward` that the replacement reads by position or by name.
FORWARD_PARAMETERS = (
    "query_states",
    "key_states",
    "value_states",
    "attention_mask",
    "query_length",
    "is_causal",
    "dropout",
    "position_ids",
    "softmax_scale",
    "sliding_window",
    "use_top_left_mask",
    "softcap",
    "deterministic",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "target_dtype",
)


def namespace(entry: AttentionName) -> SimpleNamespace:
    """The functions of a name's kernel, as attributes that upstream reads. Loads the kernel."""
    return SimpleNamespace(**entry.kernel.load()._asdict())


def forward_of(original: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
    """A `_flash_attention_forward` that computes registered names by their kernels.

    Args:
        original: upstream's function, whose name and signature the result has.
        others: called with the same arguments if the name isn't registered.
    """

    @wraps(original)
    def _flash_attention_forward(*args: Any, **kwargs: Any) -> Any:
        # In 4.x the parameter is `implementation`, and callers pass `attn_implementation`.
        name = kwargs.get("attn_implementation") or kwargs.get("implementation")
        entry = resolve(name)
        if (entry is None and name is not None) or kwargs.get("block_table") is not None:
            return others(*args, **kwargs)
        given = {**dict(zip(FORWARD_PARAMETERS, args, strict=False)), **kwargs}
        query, key, value = given["query_states"], given["key_states"], given["value_states"]
        dtype = given.get("target_dtype")
        if dtype is not None and query.dtype.itemsize == 4:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if entry is None:
            output = attention_of_running(query, key, value, given)
            return others(*args, **kwargs) if output is None else output
        if entry.forward is None:  # a model that calls this function itself, not the library's attention function
            require_whole_sequences(entry)
        from kernel_compat.attention.call import AttentionCall, PackedLengths
        from kernel_compat.attention.forward import flash_attention

        call = AttentionCall(
            query,
            key,
            value,
            given["is_causal"],
            given.get("attention_mask"),
            scale=given.get("softmax_scale"),
            softcap=given.get("softcap"),
            sinks=given.get("s_aux"),
            dropout=given.get("dropout") or 0.0,
            deterministic=given.get("deterministic"),
            sliding_window=given.get("sliding_window"),
            position_ids=given.get("position_ids"),
            lengths=PackedLengths.of(given),
        )
        return flash_attention(entry.kernel, call)

    return _flash_attention_forward


def with_implementation(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords with the name moved from `attn_implementation`, which 4.x ignores, to `implementation`, which it reads."""
    name = kwargs.get("attn_implementation")
    if kwargs.get("implementation") is None and isinstance(name, str) and name.startswith("flash_attention_"):
        kwargs["implementation"] = name
    return kwargs


def implementation_key(implementation: Any) -> Any:
    """Dictionary key of an implementation: the name, or the identity of an object, which need not be hashable."""
    return implementation if isinstance(implementation, (str, AttentionName)) else id(implementation)


def check_of(original: Callable[..., Any], preload: Callable[[str], None] = lambda name: None) -> Callable[..., Any]:
    """A method that checks a requested attention name: registered names by the library's rules, others by `original`.

    Args:
        original: upstream's method.
        preload: called with a registered name that passes the checks.
    """

    @wraps(original)
    def check(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        entry = resolve(attn_implementation)
        if entry is None:
            return original(self, attn_implementation, *args, **kwargs)
        require_flash_support(self, entry.name)
        own_attention.prepare(type(self), entry.name)
        entry.kernel.load()
        if entry.forward is None:  # a user's own forward is not the library's to prove
            from kernel_compat.proving.loading import require_proof

            require_proof(self, entry.name, unproven())
        preload(attn_implementation)
        return attn_implementation

    return check
