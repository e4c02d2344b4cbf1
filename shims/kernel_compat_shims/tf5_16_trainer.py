"""transformers 5.16 and later: the Trainer refuses every name but sdpa under accelerate's context parallelism.

Batches are split by `ContextParallel.shard` for a name that was registered with one. Up to 5.15 evaluation isn't split.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

from kernel_compat.attention.parallel.sharding import ContextParallel
from kernel_compat.errors import UnsupportedFeatureError
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim

from .accelerate1_12 import context_parallel_of


def _over(trainer: Any) -> ContextParallel | None:
    """What spreads the batches of a Trainer; None where accelerate does, or nothing."""
    config = getattr(trainer.accelerator, "parallelism_config", None)
    return context_parallel_of(trainer.model) if config is not None and config.cp_enabled else None


def _prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _prepare_context_parallel_inputs(self: Any, model: Any, inputs: Any) -> Any:
        over = _over(self)
        if over is None:
            return original(self, model, inputs)
        _require_loss_of_the_model(self)
        return nullcontext, over.shard(inputs, reduction="mean")

    return _prepare_context_parallel_inputs


def _require_loss_of_the_model(trainer: Any) -> None:
    """Check that the loss is one over targets that were moved before they were split, and that all its tokens are counted."""
    for feature, used in {
        "label_smoothing_factor": trainer.label_smoother is not None,
        "compute_loss_func": trainer.compute_loss_func is not None,
        "average_tokens_across_devices=False": not trainer.args.average_tokens_across_devices,
    }.items():
        if used:
            instead = "Leave it out: the model's own loss gets labels that were moved before the batch was split."
            raise UnsupportedFeatureError(feature, "a Trainer under ContextParallel", instead)


def _prediction(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def prediction_step(
        self: Any, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        over = _over(self)
        group = None if over is None else over.source()
        if group is None:
            return original(self, model, inputs, prediction_loss_only, *args, **kwargs)
        if not prediction_loss_only:
            instead = "Set prediction_loss_only=True, and leave out compute_metrics."
            raise UnsupportedFeatureError("logits of an evaluation", "a Trainer under ContextParallel", instead)
        import torch.distributed as dist

        loss, logits, labels = original(self, model, inputs, prediction_loss_only, *args, **kwargs)
        if loss is not None:  # the Trainer may leave out those of some ranks
            dist.all_reduce(loss, group=group)
            loss /= dist.get_world_size(group)
        return loss, logits, labels

    return prediction_step


SHIM = Shim(
    name="tf5_16_trainer",
    distribution="transformers",
    versions=">=5.16,<6",
    reason="the Trainer refuses every attention name but sdpa under accelerate's context parallelism",
    upstream="transformers 5.24.0, Trainer._prepare_context_parallel_inputs",
    delete_when="the oldest supported transformers lets an attention name split the batches of a Trainer",
    seams=(
        Seam("transformers.trainer:Trainer._prepare_context_parallel_inputs", ("self", "model", "inputs")),
        Seam("transformers.trainer:Trainer.prediction_step", ("self", "model", "inputs", "prediction_loss_only")),
    ),
    replace=lambda originals: {
        "_prepare_context_parallel_inputs": _prepare(originals["_prepare_context_parallel_inputs"]),
        "prediction_step": _prediction(originals["prediction_step"]),
    },
    on_import=True,
)
