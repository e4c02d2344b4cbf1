"""torch 2.11: its FlashAttention-4 backend fails with flash-attn-4 4.0.0b19 and later, and has no backward for varlen.

It unpacks two results of a forward that returns four. `_fa4_flash_attention_backward_impl` refuses the window that varlen
attention always passes, and `_fa4_flash_attention_forward_impl` passes no maximum lengths. Gradients are wrong as in `torch2_12`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each

from ._torch_fa4 import IMPORT, MODULE, added, deactivate_when_undone, not_installed, replace_import

_INPUTS = ("query", "key", "value")
_LENGTHS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal")
_FORWARD = (*_INPUTS, *_LENGTHS, "return_debug_mask")
_BACKWARD = ("grad_out", *_INPUTS, "out", "logsumexp", *_LENGTHS, "rng_state", "unused")


def _replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    if original.__name__ == IMPORT.name:
        return replace_import(original)
    backward = "backward" in original.__name__
    parameters = _BACKWARD if backward else _FORWARD
    offsets, max_q, max_k = (parameters.index(name) for name in ("cum_seq_q", "max_q", "max_k"))

    @wraps(original)
    def implementation(
        *args: Any, window_size_left: int | None = None, window_size_right: int | None = None, **kwargs: Any
    ) -> Any:
        keywords: dict[str, Any] = {}
        if args[offsets] is not None:  # without them flash-attn-4 schedules one sequence of all tokens
            keywords = {"max_seqlen_q": args[max_q], "max_seqlen_k": args[max_k]}
        # torch's backward refuses a window, even -1 for none; flash-attn-4's takes it.
        (keywords if backward else kwargs).update(
            window_size_left=window_size_left, window_size_right=window_size_right
        )
        token = added.set(keywords)
        try:
            return original(*args, **kwargs)
        finally:
            added.reset(token)

    return implementation


def _register_again() -> Callable[[], None]:
    """Activate the backend again if it is active: the dispatcher holds the originals."""
    from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

    if current_flash_attention_impl() == "FA4":
        activate_flash_attention_impl("FA4")
    return deactivate_when_undone()


SHIM = Shim(
    name="torch2_11_fa4",
    distribution="torch",
    versions=">=2.11,<2.12",
    reason="with torch's FA4 backend active every attention call raises, SDPA's included; its varlen backward always does",
    upstream="pytorch/pytorch#190212, Dao-AILab/flash-attention#2674",
    delete_when="the oldest supported torch is 2.12",
    seams=(
        IMPORT,
        Seam(f"{MODULE}:_fa4_flash_attention_forward_impl", _FORWARD),
        Seam(f"{MODULE}:_fa4_flash_attention_backward_impl", _BACKWARD),
    ),
    replace=each(_replacement),
    unneeded_because=not_installed,
    complete=_register_again,
)
