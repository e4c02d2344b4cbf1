"""torch 2.11: its FlashAttention-4 backend fails with flash-attn-4 4.0.0b19 and later, and has no backward for varlen.

It unpacks two results of a forward that returns four (pytorch/pytorch#190212, Dao-AILab/flash-attention#2674): after
`activate_flash_attention_impl("FA4")` every attention call of the process raises, SDPA's included.
`_fa4_flash_attention_backward_impl` of 2.11.0 refuses the window that varlen attention always passes, and
`_fa4_flash_attention_forward_impl` passes no maximum lengths. Gradients are wrong as in `torch2_12`.
Delete this module when the oldest supported torch is 2.12.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim

from ._torch_fa4 import IMPORT, MODULE, adding_keywords, deactivate_when_undone, not_installed, replace_import

_INPUTS = ("query", "key", "value")
_LENGTHS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal")
_FORWARD = (*_INPUTS, *_LENGTHS, "return_debug_mask")
_BACKWARD = ("grad_out", *_INPUTS, "out", "logsumexp", *_LENGTHS, "rng_state", "unused")


def _with_lengths(original: Callable[..., Any], parameters: tuple[str, ...], backward: bool) -> Callable[..., Any]:
    """Pass flash-attn-4 the maximum lengths, without which it plans for one sequence of all tokens, and a backward's window."""
    offsets, max_q, max_k = (parameters.index(name) for name in ("cum_seq_q", "max_q", "max_k"))

    @wraps(original)
    def implementation(
        *args: Any, window_size_left: int | None = None, window_size_right: int | None = None, **kwargs: Any
    ) -> Any:
        keywords: dict[str, Any] = {}
        if args[offsets] is not None:
            keywords = {"max_seqlen_q": args[max_q], "max_seqlen_k": args[max_k]}
        window = {"window_size_left": window_size_left, "window_size_right": window_size_right}
        if backward:  # torch refuses a window here, even -1 for none; flash-attn-4 takes it
            keywords.update(window)
        else:
            kwargs.update(window)
        with adding_keywords(keywords):
            return original(*args, **kwargs)

    return implementation


def _replace(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    forward, backward = "_fa4_flash_attention_forward_impl", "_fa4_flash_attention_backward_impl"
    return {
        "_fa4_import_module": replace_import(originals["_fa4_import_module"]),
        forward: _with_lengths(originals[forward], _FORWARD, backward=False),
        backward: _with_lengths(originals[backward], _BACKWARD, backward=True),
    }


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
    reason=(
        "torch's FA4 backend unpacks two results of flash-attn-4's forward, which returns more since 4.0.0b19: once it is "
        "active every attention call of the process raises, SDPA's included; its varlen backward refuses every call"
    ),
    upstream="pytorch/pytorch#190212, Dao-AILab/flash-attention#2674",
    delete_when="the oldest supported torch is 2.12",
    seams=(
        IMPORT,
        Seam(f"{MODULE}:_fa4_flash_attention_forward_impl", _FORWARD),
        Seam(f"{MODULE}:_fa4_flash_attention_backward_impl", _BACKWARD),
    ),
    replace=_replace,
    unneeded_because=not_installed,
    complete=_register_again,
)
