"""transformers 4.54: a flash attention loader that caches in module globals and prompts on the terminal.

- `_flash_attention_forward` keeps the first implementation in its module's globals (huggingface/transformers#41427 rewrote this in
  5.0), and sliding windows are one token too wide (#39408, fixed by #40163 in 4.56).
- `_lazy_imports` of 4.54.1 calls `input()` when flash_attn doesn't import; 4.55 doesn't.
- `GenerationMixin.prepare_inputs_for_generation` of 4.54.1 makes up ``cu_seq_lens_*``; #40424 tells how that was reverted.

Delete this module when the oldest supported transformers is 4.55.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import wraps
from types import FunctionType
from typing import Any

from kernel_compat.attention.defaults import resolve
from kernel_compat.environment import Environment
from kernel_compat.errors import KernelUnavailableError
from kernel_compat.kernels import known_kernels
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim

from ._dispatch import FORWARD_PARAMETERS, forward_of, implementation_key, namespace, with_implementation

_UTILS = "transformers.modeling_flash_attention_utils"
_CACHE = ("_flash_fn", "_flash_varlen_fn", "_pad_fn", "_unpad_fn", "_is_fa3", "_flash_supports_window")


def _replace_forward(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    original: FunctionType = originals["_flash_attention_forward"]
    copies: dict[Any, tuple[Any, Callable[..., Any]]] = {}
    lock = threading.Lock()

    def others(*args: Any, **kwargs: Any) -> Any:
        implementation = with_implementation(kwargs).get("implementation")
        if implementation is None:
            return original(*args, **kwargs)
        key = implementation_key(implementation)
        with lock:
            # It caches in its module's globals: a copy with globals of its own has a cache of its own.
            if key not in copies:
                copies[key] = (implementation, _with_globals(original, {}, without=_CACHE))
        return copies[key][1](*args, **kwargs)

    return {"_flash_attention_forward": forward_of(original, others)}


def _replace_loader(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    original: FunctionType = originals["_lazy_imports"]

    def input(prompt: object = "") -> str:
        kernel = known_kernels()["flash_attention_2"]
        reasons = kernel.unavailable_because(Environment.detect()) or ["flash_attn does not import"]
        raise KernelUnavailableError(kernel.name, reasons, kernel.providers[0].install)

    @wraps(original)
    def _lazy_imports(impl: Any) -> Any:
        entry = resolve(impl)
        # One copy per load, because `use_remote_fa2`, the user's answer to the prompt, may have been set in the globals.
        return _with_globals(original, {"input": input})(impl if entry is None else namespace(entry))

    return {"_lazy_imports": _lazy_imports}


def _replace_generate(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    original = originals["prepare_inputs_for_generation"]

    @wraps(original)
    def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
        if resolve(self.config._attn_implementation) is None:
            return original(self, *args, **kwargs)
        flag = "_supports_attention_backend"
        own = vars(self).get(flag)
        vars(self)[flag] = False  # for a model with this flag upstream makes up cu_seq_lens_*
        try:
            return original(self, *args, **kwargs)
        finally:
            vars(self).pop(flag, None)
            if own is not None:
                vars(self)[flag] = own

    return {"prepare_inputs_for_generation": prepare_inputs_for_generation}


def _with_globals(
    function: FunctionType, additions: Mapping[str, Any], without: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """A copy of the function whose globals are a copy of the function's, with `additions` and `without` some names."""
    namespace = {name: value for name, value in function.__globals__.items() if name not in without}
    copy = FunctionType(
        function.__code__, {**namespace, **additions}, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


SHIMS = (
    Shim(
        name="tf4_54_flash_forward",
        distribution="transformers",
        versions="==4.54.*",
        reason=(
            "the first flash implementation loaded in the process serves every later name, and sliding windows are "
            "one token too wide"
        ),
        upstream="huggingface/transformers#41427, huggingface/transformers#39408, huggingface/transformers#40163",
        delete_when="the oldest supported transformers is 4.55",
        seams=(Seam(f"{_UTILS}:_flash_attention_forward", FORWARD_PARAMETERS),),
        replace=_replace_forward,
    ),
    Shim(
        name="tf4_54_loader",
        distribution="transformers",
        versions="==4.54.*",
        reason="if flash_attn does not import, the loader prompts on the terminal for permission to download, which hangs a job",
        upstream="transformers 4.54.1, modeling_flash_attention_utils._lazy_imports",
        delete_when="the oldest supported transformers is 4.55",
        seams=(Seam(f"{_UTILS}:_lazy_imports", ("impl",)),),
        replace=_replace_loader,
    ),
    Shim(
        name="tf4_54_generate",
        distribution="transformers",
        versions="==4.54.*",
        reason=(
            "generate makes up cu_seq_lens_* for every name with flash in it, and counts wrong for a batch: queries of "
            "one sequence attend to another's keys"
        ),
        upstream="huggingface/transformers#40424",
        delete_when="the oldest supported transformers is 4.55",
        seams=(
            Seam(
                "transformers.generation.utils:GenerationMixin.prepare_inputs_for_generation",
                ("self", "input_ids", "past_key_values", "attention_mask", "inputs_embeds", "cache_position"),
            ),
        ),
        replace=_replace_generate,
    ),
)
