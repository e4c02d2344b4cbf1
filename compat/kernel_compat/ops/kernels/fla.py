"""flash-linear-attention's gated RMSNorm."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .backward import refuse_second_derivative, untraced


def rms_norm_gated() -> Callable[..., Tensor]:
    """The kernel of ``rms_norm_gated``."""
    from fla.modules import FusedRMSNormGated

    # The function in the class's module, which differs between releases.
    function: Callable[..., Any] = vars(sys.modules[FusedRMSNormGated.__module__])["rms_norm_gated"]

    def kernel(hidden_states: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed: Tensor = function(hidden_states, gate, weight, None, activation="swish", eps=eps)
        refuse_second_derivative(normed, "rms_norm_gated_implementation='fla'")
        return normed

    return untraced(kernel)
