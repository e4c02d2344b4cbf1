"""Shared by the shims of all releases: how a registered name passes upstream's checks and reaches its kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType, SimpleNamespace
from typing import Any

from kernel_compat.attention.defaults import require_protected, resolve, unproven
from kernel_compat.attention.names import AttentionName
from kernel_compat.attention.roles import (
    CAUSALITY,
    ENCODER_DECODER,
    MASK,
    PAGES,
    POSITIONS,
    SINKS,
    SOFTCAP,
    TOKENS,
    WINDOW,
)
from kernel_compat.kernels.provider import FUNCTIONS
from kernel_compat.patching.pass_through import unwrapped
from kernel_compat.patching.seam import Seam
from kernel_compat.policy.flash_flags import require_flash_support
from kernel_compat.policy.layers import require_declared

from . import _own_attention

MODEL = "transformers.modeling_utils:PreTrainedModel"
UTILS = "transformers.modeling_flash_attention_utils"

#: With the parameters that the replacement reads by position or by name.
FORWARD = Seam(
    f"{UTILS}:_flash_attention_forward",
    (
        *("query_states", "key_states", "value_states", "attention_mask", "query_length", "is_causal", "dropout"),
        *("position_ids", "softmax_scale", "sliding_window", "use_top_left_mask", "softcap", "deterministic"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "target_dtype"),
    ),
)


def by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `_flash_attention_forward`, by their names."""
    return {**dict(zip(FORWARD.parameters, args, strict=False)), **kwargs}


@cache
def namespace(entry: AttentionName) -> SimpleNamespace:
    """The functions of a name's kernel, as attributes that upstream reads. Loads the kernel."""
    functions = entry.kernel.load()
    return SimpleNamespace(**{name: getattr(functions, name) for name in FUNCTIONS})


def forward_of(original: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
    """A `_flash_attention_forward` that computes registered names by their kernels, and calls `others` for other names."""

    @wraps(original)
    def _flash_attention_forward(*args: Any, **kwargs: Any) -> Any:
        # In 4.x the parameter is `implementation`, and callers pass `attn_implementation`.
        name = kwargs.get("attn_implementation") or kwargs.get("implementation")
        entry = resolve(name)
        if (entry is None and name is not None) or PAGES.of(kwargs) is not None:
            return others(*args, **kwargs)
        arguments = by_name(args, kwargs)
        query, key, value = arguments["query_states"], arguments["key_states"], arguments["value_states"]
        dtype = arguments.get("target_dtype")
        if dtype is not None and query.dtype.itemsize == 4:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if entry is None:
            output = _own_attention.attend(query, key, value, arguments)
            return others(*args, **kwargs) if output is None else output
        if entry.forward is None:  # a model that calls this function itself, not the library's attention function
            _own_attention.require_whole_sequences(entry)
        from kernel_compat.attention.call import AttentionCall, PackedLengths
        from kernel_compat.attention.forward import flash_attention

        call = AttentionCall(
            query,
            key,
            value,
            arguments[CAUSALITY.named(arguments)],
            MASK.of(arguments),
            scale=arguments.get("softmax_scale"),
            softcap=SOFTCAP.of(arguments),
            sinks=SINKS.of(arguments),
            dropout=arguments.get("dropout") or 0.0,
            deterministic=arguments.get("deterministic"),
            sliding_window=WINDOW.of(arguments),
            positions=POSITIONS.of(arguments),
            lengths=PackedLengths.of(arguments),
        )
        return flash_attention(entry.kernel, call)

    return _flash_attention_forward


def check_of(
    original: Callable[..., Any], load_functions: Callable[[str], None] = lambda name: None
) -> Callable[..., Any]:
    """A method that checks a requested attention name: others by `original`, registered ones by the library, which loads their functions."""

    @wraps(original)
    def _check_and_adjust_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        entry = resolve(attn_implementation)
        if entry is None:
            return original(self, attn_implementation, *args, **kwargs)
        require_protected()
        require_flash_support(self, entry.name, any_mask=entry.supported.masks)
        require_declared(self, entry)
        _own_attention.prepare(type(self), entry.name)
        entry.kernel.load()
        if entry.forward is None:  # a user's own forward is not the library's to prove
            from kernel_compat.proofs.gate import require_padding_free, require_proof

            require_proof(self, entry.name, unproven())
            is_of_tokens = self.main_input_name in TOKENS.spellings and not ENCODER_DECODER.attribute_of(self.config)
            if entry.padding_free and is_of_tokens:
                require_padding_free(self, entry.name, unproven(), by_name=True)
        load_functions(attn_implementation)
        return attn_implementation

    return _check_and_adjust_attn_implementation


def with_own_globals(original: Any, **names: Any) -> Callable[..., Any]:
    """A copy of a function, without other code's wrappers, with globals of its own: a copy of the function's, and `names`."""
    original = unwrapped(original)
    globals_ = {**original.__globals__, **names}
    copy = FunctionType(original.__code__, globals_, original.__name__, original.__defaults__, original.__closure__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy


# transformers 4


def with_implementation(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords with the name moved from `attn_implementation`, which 4.x ignores, to `implementation`, which it reads."""
    name = kwargs.get("attn_implementation")
    if kwargs.get("implementation") is None and isinstance(name, str) and name.startswith("flash_attention_"):
        kwargs["implementation"] = name
    return kwargs


def by_implementation(
    original: Callable[..., Any], forget: Callable[[dict[str, Any]], object]
) -> Callable[[Any], Callable[..., Any]]:
    """Copies, one for each implementation, of a function that keeps in its globals what it loads first; `forget` removes that."""
    copies: dict[Any, tuple[Any, Callable[..., Any]]] = {}
    lock = threading.Lock()

    def copy_for(implementation: Any) -> Callable[..., Any]:
        key = implementation if isinstance(implementation, str) else id(implementation)
        with lock:
            if key not in copies:
                copy = with_own_globals(original)
                forget(copy.__globals__)
                copies[key] = (implementation, copy)  # an identity is unique only as long as its object lives
        return copies[key][1]

    return copy_for
