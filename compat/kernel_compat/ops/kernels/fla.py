"""flash-linear-attention's gated RMSNorm."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .ownership import guard_backward, untraced


def rms_norm_gated() -> Callable[..., Tensor]:
    from fla.modules import FusedRMSNormGated

    # The function beside the class, which has moved between releases.
    function: Callable[..., Any] = vars(sys.modules[FusedRMSNormGated.__module__])["rms_norm_gated"]

    def kernel(hidden_states: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed: Tensor = function(hidden_states, gate, weight, None, activation="swish", eps=eps)
        guard_backward(normed, "rms_norm_gated_implementation='fla'")
        return normed

    return untraced(kernel)
