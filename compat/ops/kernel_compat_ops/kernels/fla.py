"""flash-linear-attention's gated RMSNorm."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .backward import first_derivative_only


def rms_norm_gated() -> Callable[..., Tensor]:
    """The kernel of ``rms_norm_gated``: hidden states and gate (..., hidden), weight (hidden,)."""
    from fla.modules import FusedRMSNormGated

    # The function in the class's module, which differs between releases.
    function: Callable[..., Any] = vars(sys.modules[FusedRMSNormGated.__module__])["rms_norm_gated"]

    @first_derivative_only("rms_norm_gated_implementation='fla'", traced=False)
    def kernel(hidden_states: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Any:
        return function(hidden_states, gate, weight, None, activation="swish", eps=eps)

    return kernel
