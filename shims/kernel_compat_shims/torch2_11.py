"""torch 2.11: its FlashAttention-4 backend is written for flash-attn-4 before 4.0.0b19, and for no varlen backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim

from ._torch_fa4 import IMPORT, MODULE, deactivate_when_undone, not_installed, replace_import, told

_INPUTS = ("query", "key", "value")
_LENGTHS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal")
_FORWARD = (*_INPUTS, *_LENGTHS, "return_debug_mask")
_BACKWARD = ("grad_out", *_INPUTS, "out", "logsumexp", *_LENGTHS, "rng_state", "unused")


def _telling(original: Callable[..., Any], parameters: tuple[str, ...], backward: bool) -> Callable[..., Any]:
    """Hands on the maximum lengths, without which flash-attn-4 plans for one sequence of all tokens, and a backward's window."""
    offsets, max_q, max_k = (parameters.index(name) for name in ("cum_seq_q", "max_q", "max_k"))

    @wraps(original)
    def implementation(
        *args: Any, window_size_left: int | None = None, window_size_right: int | None = None, **kwargs: Any
    ) -> Any:
        keywords: dict[str, Any] = {}
        if args[offsets] is not None:
            keywords = {"max_seqlen_q": args[max_q], "max_seqlen_k": args[max_k]}
        window = {"window_size_left": window_size_left, "window_size_right": window_size_right}
        if backward:  # which refuses one, -1 for none included; flash-attn-4 has it
            keywords.update(window)
        else:
            kwargs.update(window)
        with told(keywords):
            return original(*args, **kwargs)

    return implementation


def _replace(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    forward, backward = "_fa4_flash_attention_forward_impl", "_fa4_flash_attention_backward_impl"
    return {
        "_fa4_import_module": replace_import(originals["_fa4_import_module"]),
        forward: _telling(originals[forward], _FORWARD, backward=False),
        backward: _telling(originals[backward], _BACKWARD, backward=True),
    }


def _register_again() -> Callable[[], None]:
    """Where the backend is active already, the dispatcher holds the originals."""
    from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

    if current_flash_attention_impl() == "FA4":
        activate_flash_attention_impl("FA4")
    return deactivate_when_undone()


SHIM = Shim(
    name="torch2_11_fa4",
    distribution="torch",
    versions=">=2.11,<2.12",
    reason=(
        "torch's FA4 backend takes two results of flash-attn-4's forward, which returns more since 4.0.0b19: once it is "
        "active every attention call of the process dies, SDPA's included; its varlen backward refuses every call"
    ),
    seams=(
        IMPORT,
        Seam(f"{MODULE}:_fa4_flash_attention_forward_impl", _FORWARD),
        Seam(f"{MODULE}:_fa4_flash_attention_backward_impl", _BACKWARD),
    ),
    replace=_replace,
    unneeded_because=not_installed,
    complete=_register_again,
)
