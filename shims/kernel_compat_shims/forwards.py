"""All releases: a model's layers know the arguments of its forward, in the backward pass of a checkpoint too."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, wraps
from typing import Any

from kernel_compat.errors import UnsupportedFeatureError
from kernel_compat.names import resolve
from kernel_compat.seams import Seam, Shim

_CHECKPOINT = "torch.utils.checkpoint"


def _replace_call(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    from kernel_compat.boundaries import calling

    def before(model: Any, given: Mapping[str, Any]) -> None:
        _mixers().look_at(model)
        _refuse_weights(model, given.get("output_attentions"))

    return {"__call__": calling(originals["__call__"], before)}


def _refuse_weights(model: Any, asked: bool | None) -> None:
    """Many models don't hand ``output_attentions`` on to an attention function, which could refuse it."""
    config = getattr(model, "config", None)
    entry = resolve(getattr(config, "_attn_implementation", None))
    if (
        entry is not None
        and entry.forward is None
        and (getattr(config, "output_attentions", False) if asked is None else asked)
    ):
        raise UnsupportedFeatureError(
            "output_attentions=True", entry.name, "No flash kernel computes them: use attn_implementation='eager'."
        )


def _replace_post_init(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    original = originals["post_init"]

    @wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        _mixers().look_at(self)  # before its first call, which torch.compile may be tracing
        return original(self, *args, **kwargs)

    return {"post_init": post_init}


@cache
def _mixers() -> Any:
    from kernel_compat.mixers import MixerPatches

    return MixerPatches()


def _replace_checkpoint(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    from kernel_compat.boundaries import resuming

    generator = originals["_checkpoint_without_reentrant_generator"]
    reentrant = originals["forward"].__func__

    def _checkpoint_without_reentrant_generator(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return generator(resuming(fn), *args, **kwargs)

    def forward(ctx: Any, run_function: Any, preserve_rng_state: Any, *args: Any) -> Any:
        return reentrant(ctx, resuming(run_function), preserve_rng_state, *args)

    return {
        "_checkpoint_without_reentrant_generator": _checkpoint_without_reentrant_generator,
        "forward": staticmethod(forward),
    }


SHIMS = (
    Shim(
        name="model_forward",
        distribution="transformers",
        versions=">=4.54,<6",
        reason=(
            "models keep packed positions, lengths and masks from the layers that don't need them upstream: gpt2, opt and "
            "whisper from their attention, most hybrid models from their linear attention"
        ),
        seams=(Seam("transformers.modeling_utils:PreTrainedModel.__call__", ("self",), inherited=True),),
        replace=_replace_call,
    ),
    Shim(
        name="packed_mixers",
        distribution="transformers",
        versions=">=4.54,<6",
        reason=(
            "linear attention, SSMs, recurrences and short convolutions run on from one packed sequence into the next, under "
            "every attn_implementation"
        ),
        seams=(Seam("transformers.modeling_utils:PreTrainedModel.post_init", ("self",)),),
        replace=_replace_post_init,
        complete=lambda: _mixers().activate(),
    ),
    Shim(
        name="checkpoint",
        distribution="torch",
        versions=">=2.10,<3",
        reason="a layer that is computed again in the backward pass needs the arguments of its model's forward",
        seams=(
            Seam(f"{_CHECKPOINT}:_checkpoint_without_reentrant_generator", ("fn",)),
            Seam(f"{_CHECKPOINT}:CheckpointFunction.forward", ("ctx", "run_function", "preserve_rng_state")),
        ),
        replace=_replace_checkpoint,
    ),
)
