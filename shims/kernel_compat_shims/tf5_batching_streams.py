"""transformers 5.3 and later: continuous batching fills its inputs on the current stream and reads them on another.

Neither waits for the other. On a GPU that is busy, the model reads tokens and cache indices that are not there yet: the tokens of a
request are wrong, or an index is out of bounds.

Up to 5.12, the offsets of the padding are written on the GPU, on the current stream. In asynchronous batching the copy of the inputs from
the host may overwrite them: the padding's sequences then have negative lengths, with which FlashAttention-4 computes the real ones wrong.

Up to 5.16, asynchronous batching ends with an error if no request is there when its thread begins: `generate_batch` may return nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import wraps
from typing import Any

from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each

_PACKAGE = "transformers.generation.continuous_batching"
_MODULE = f"{_PACKAGE}.input_outputs"
#: The devices of asynchronous batching, which fills these tensors at a full reset alone.
_DEVICES = ("cuda", "xpu")
#: Seconds between two looks for the first request.
_PAUSE = 0.005


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
        model_kwargs = arguments(self, *args, **kwargs)
        if self.compute_stream is not None:  # not in asynchronous batching, which fills each batch on the host
            self.compute_stream.wait_stream(_current_stream(self.device))
        return model_kwargs

    return {"_reset_static_tensors": _reset_static_tensors, "get_model_kwargs": get_model_kwargs}


def _on_compute_stream(arguments: Any) -> Any:
    @wraps(arguments)
    def get_model_kwargs(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        with torch.cuda.stream(
            self.compute_stream
        ):  # it waits for the copy; up to 5.12 there is asynchronous batching on CUDA alone
            return arguments(self, *args, **kwargs)

    return get_model_kwargs


def _is_asynchronous(manager: Any) -> bool:
    own = getattr(manager, "use_async_batching", None)
    return bool(manager.continuous_batching_config.use_async_batching if own is None else own)


def _with_a_request(run: Any) -> Any:
    @wraps(run)
    def _run_generation_loop(self: Any) -> None:
        status = getattr(self, "background_thread_status", None)  # from 5.11 on
        # The processes of a tensor-parallel group begin together: for them upstream's error remains.
        alone = getattr(getattr(self, "distributed_helper", None), "tp_size", 1) == 1
        waits = alone and _is_asynchronous(self)
        while waits and self.input_queue.empty():
            if self.stop_event.is_set() if status is None else status.local_status:
                if status is not None:
                    status.mark_as_stopped()
                return
            time.sleep(_PAUSE)
        run(self)

    return _run_generation_loop


SHIMS = (
    Shim(
        name="tf5_batching_streams",
        protects="continuous batching",
        distribution="transformers",
        versions=">=5.3,<6",
        reason="continuous batching reads its inputs on another stream than it fills them on, without waiting: tokens are wrong",
        upstream="transformers 5.23.0, ContinuousBatchingIOs and ContinuousBatchingAsyncIOs; huggingface/transformers#50395 on MPS",
        delete_when="the oldest supported transformers waits for the inputs",
        seams=(
            Seam(f"{_MODULE}:ContinuousBatchingIOs._reset_static_tensors", ("self", "full_reset")),
            Seam(f"{_MODULE}:ContinuousBatchingIOs.get_model_kwargs", ("self",)),
        ),
        replace=_replace,
    ),
    Shim(
        name="tf5_batching_offsets",
        protects="continuous batching",
        distribution="transformers",
        versions=">=5.3,<5.13",
        reason="asynchronous continuous batching completes offsets on a GPU before they are copied there: tokens are wrong with FlashAttention-4",
        upstream="transformers 5.12.0, ContinuousBatchingAsyncIOs.get_model_kwargs; 5.13.0 completes them on the host",
        delete_when="the oldest supported transformers is 5.13",
        seams=(Seam(f"{_MODULE}:ContinuousBatchingAsyncIOs.get_model_kwargs", ("self",)),),
        replace=each(_on_compute_stream),
    ),
    Shim(
        name="tf5_batching_start",
        distribution="transformers",
        versions=">=5.3,<5.17",
        reason="asynchronous continuous batching ends with an error if it starts before its first request, and generate_batch returns nothing",
        upstream="huggingface/transformers#48303",
        delete_when="the oldest supported transformers is 5.17",
        seams=(Seam(f"{_PACKAGE}.continuous_api:ContinuousBatchingManager._run_generation_loop", ("self",)),),
        replace=each(_with_a_request),
    ),
)
