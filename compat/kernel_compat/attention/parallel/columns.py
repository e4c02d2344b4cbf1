"""Layers that multiply queries by factors of their columns, which they count from 0 on every rank: Llama 4's without rotary embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..roles import ROTARY, TEMPERATURE, TEMPERATURE_GROWTH, TEMPERATURE_STEP

__all__ = ["counts_columns", "of_columns"]


def counts_columns(layer: Any) -> bool:
    """Whether a layer is one of them."""
    return bool(TEMPERATURE.attribute_of(layer)) and not ROTARY.attribute_of(layer)


def of_columns(layer: Any, query: Tensor, columns: Tensor) -> Tensor:
    """A layer's query (batch, length, heads, head_dim), with the factors of columns (length,) in place of those counted from 0."""
    step, growth = TEMPERATURE_STEP.attribute_of(layer), TEMPERATURE_GROWTH.attribute_of(layer)

    def factors(at: Tensor) -> Tensor:  # rounded as upstream's
        return torch.log1p(torch.floor((at.float() + 1.0) / step)) * growth + 1.0

    own, counted = factors(columns), factors(torch.arange(len(columns), device=columns.device))
    wide = torch.promote_types(query.dtype, torch.float32)
    return (query * (own.to(wide) / counted.to(wide))[:, None, None]).to(query.dtype)
