"""torch_npu's fused functions, as its documentation has them. Never run on hardware."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def rms_norm(offset: bool) -> Callable[..., Tensor]:
    import torch_npu

    def kernel(hidden_states: Tensor, weight: Tensor, eps: float, *, casting: str) -> Tensor:
        scale = 1.0 + weight if offset else weight
        wide = torch.promote_types(hidden_states.dtype, scale.dtype)
        normed: Tensor = torch_npu.npu_rms_norm(hidden_states.to(wide), scale.to(wide), epsilon=eps)[0]
        return normed.to(hidden_states.dtype) if casting == "gemma" else normed

    return kernel


def rotary_pos_emb() -> Callable[..., tuple[Tensor, Tensor]]:
    import torch_npu

    def kernel(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        one: Any = torch_npu.npu_rotary_mul(query, cos, sin)
        return one, torch_npu.npu_rotary_mul(key, cos, sin)

    return kernel


def cross_entropy() -> Callable[..., Tensor]:
    import torch_npu  # noqa: F401 - which makes torch know the device

    from .chunk_loss import chunk_loss

    return chunk_loss
