"""What the rules of `tiny` don't get right, by model type: values that win over them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["constructor", "overrides"]

#: Arguments for a config class whose defaults don't make a model.
_CONSTRUCTOR: Mapping[str, Mapping[str, Any]] = {
    "autoformer": {"prediction_length": 4, "context_length": 8},
    "informer": {"prediction_length": 4, "context_length": 8},
    "time_series_transformer": {"prediction_length": 4, "context_length": 8},
    "reformer": {"is_decoder": True},
}

#: Values of the tiny config.
_OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "mamba2": {"num_heads": 8},
}


def constructor(model_type: str) -> dict[str, Any]:
    """Arguments that the config class needs."""
    return dict(_CONSTRUCTOR.get(model_type, {}))


def overrides(model_type: str) -> dict[str, Any]:
    """Values of the tiny config that its rules don't get right."""
    return dict(_OVERRIDES.get(model_type, {}))
