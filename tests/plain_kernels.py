"""Kernels in plain torch for every op, registered under the name `PLAIN`: the reference formulas for modules."""

from __future__ import annotations

from typing import Any

from torch.nn.functional import layer_norm, silu

import kernel_compat_ops as ops
from kernel_compat_ops.recognisers import balancing, norms, rotary

PLAIN = "plain_torch"


@ops.register_kernel("rms_norm", "standard", PLAIN)
def _rms_norm() -> Any:
    return lambda x, weight, eps, *, casting: norms.reference(x, weight, eps, False, casting)


@ops.register_kernel("rms_norm", "offset", PLAIN)
def _rms_norm_offset() -> Any:
    return lambda x, weight, eps, *, casting: norms.reference(x, weight, eps, True, casting)


@ops.register_kernel("swiglu_mlp", "standard", PLAIN)
def _swiglu() -> Any:
    return lambda gate, up: silu(gate) * up


@ops.register_kernel("rotary_pos_emb", "full", PLAIN)
@ops.register_kernel("rotary_pos_emb", "partial", PLAIN)
def _rotary() -> Any:
    return rotary.reference


@ops.register_kernel("rotary_pos_emb", "multimodal", PLAIN)
def _multimodal() -> Any:
    def kernel(q: Any, k: Any, cos: Any, sin: Any, sections: Any) -> Any:
        return rotary.reference(q, k, rotary.sectioned(cos, sections), rotary.sectioned(sin, sections))

    return kernel


@ops.register_kernel("rms_norm_gated", "standard", PLAIN)
def _rms_norm_gated() -> Any:
    return norms.gated_reference


@ops.register_kernel("load_balancing_loss", "standard", PLAIN)
def _load_balancing() -> Any:
    return balancing.reference


@ops.register_kernel("layer_norm", "standard", PLAIN)
def _layer_norm() -> Any:
    return lambda x, weight, bias, eps: layer_norm(x, weight.shape, weight, bias, eps)
