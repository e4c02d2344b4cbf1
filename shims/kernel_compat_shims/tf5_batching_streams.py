"""transformers 5.3 and later: continuous batching fills its inputs on the current stream and reads them on another.

Neither waits for the other. On a GPU that is busy, the model reads tokens and cache indices that are not there yet: the tokens of a
request are wrong, or an index is out of bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim

_INPUTS = "transformers.generation.continuous_batching.input_outputs:ContinuousBatchingIOs"
#: The devices of asynchronous batching, which fills these tensors at a full reset alone.
_DEVICES = ("cuda", "xpu")


def _current_stream(device: Any) -> Any:
    import torch

    return torch.get_device_module(device).current_stream(device)


def _replace(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    reset, arguments = originals["_reset_static_tensors"], originals["get_model_kwargs"]

    @wraps(reset)
    def _reset_static_tensors(self: Any, full_reset: bool = False) -> None:
        reset(self, full_reset)
        if full_reset and self.device.type in _DEVICES:
            _current_stream(self.device).synchronize()

    @wraps(arguments)
    def get_model_kwargs(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.compute_stream is not None:  # not in asynchronous batching, which fills each batch on the host
            self.compute_stream.wait_stream(_current_stream(self.device))
        return arguments(self, *args, **kwargs)

    return {"_reset_static_tensors": _reset_static_tensors, "get_model_kwargs": get_model_kwargs}


SHIM = Shim(
    name="tf5_batching_streams",
    distribution="transformers",
    versions=">=5.3,<6",
    reason="continuous batching reads its inputs on another stream than it fills them on, without waiting: tokens are wrong",
    upstream="transformers 5.23.0, ContinuousBatchingIOs and ContinuousBatchingAsyncIOs; huggingface/transformers#50395 on MPS",
    delete_when="the oldest supported transformers waits for the inputs",
    seams=(
        Seam(f"{_INPUTS}._reset_static_tensors", ("self", "full_reset")),
        Seam(f"{_INPUTS}.get_model_kwargs", ("self",)),
    ),
    replace=_replace,
)
