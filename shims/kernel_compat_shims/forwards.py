"""All releases: a model's layers know the arguments of its forward, in the backward pass of a checkpoint too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from inspect import signature
from typing import Any
from weakref import WeakSet

from kernel_compat.attention.registry import resolve
from kernel_compat.errors import SeamError, UnsupportedFeatureError
from kernel_compat.patching.seam import Seam, Shim

_CHECKPOINT = "torch.utils.checkpoint"
_FRAME = ("self", "recompute_fn", "early_stop", "unpack_error_cb", "metadata_fn")


def _replace_call(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    from kernel_compat.attention.forward_context import with_context

    met: WeakSet[Any] = WeakSet()

    def before(model: Any, given: Mapping[str, Any]) -> None:
        if model not in met:
            met.add(model)
            _look_at_checkpoints(model)
        _mixers().patch(model)
        _refuse_weights(model, given.get("output_attentions"))

    return {"__call__": with_context(originals["__call__"], before)}


def _look_at_checkpoints(model: Any) -> None:
    """Those that were enabled before the installation."""
    for module in model.modules():
        checkpoint = vars(module).get("_gradient_checkpointing_func")
        if checkpoint is not None and getattr(checkpoint, "func", None) is not _of_forward:
            module._gradient_checkpointing_func = partial(_of_forward, checkpoint)


def _of_forward(checkpoint: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """A checkpoint of a function that is computed again within the forward in progress now."""
    import torch

    from kernel_compat.attention.forward_context import in_current_context

    return checkpoint(function if torch.compiler.is_compiling() else in_current_context(function), *args, **kwargs)


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
        _mixers().patch(self)  # before its first call, which torch.compile may be tracing
        return original(self, *args, **kwargs)

    return {"post_init": post_init}


@cache
def _mixers() -> Any:
    from kernel_compat.attention.mixers import MixerPatches

    return MixerPatches()


def _replace_checkpoint(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    from kernel_compat.attention.forward_context import in_current_context

    init = originals["__init__"]
    reentrant = originals["forward"].__func__

    def __init__(self: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
        init(self, in_current_context(recompute_fn), *args, **kwargs)

    def forward(ctx: Any, run_function: Any, preserve_rng_state: Any, *args: Any) -> Any:
        return reentrant(ctx, in_current_context(run_function), preserve_rng_state, *args)

    return {"__init__": __init__, "forward": staticmethod(forward)}


def _prove_checkpoint() -> Callable[[], None]:
    """A release of torch that computes layers again by another way than the one patched is an error, not a wrong gradient."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from kernel_compat.attention.forward_context import current_context, with_context

    seen: list[Any] = []

    def layer(x: Any) -> Any:
        seen.append(current_context())
        return x * x

    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, use_reentrant: bool) -> Any:
            return checkpoint(layer, torch.ones((), requires_grad=True), use_reentrant=use_reentrant)

    for use_reentrant in (False, True):
        with torch.enable_grad():
            with_context(Model.forward, lambda *_: None)(Model(), use_reentrant).backward()
        first, again = seen[-2:]
        if first is None or again is not first:
            raise SeamError(
                f"{_CHECKPOINT}:checkpoint",
                f"a layer that is computed again through the attributes patched (use_reentrant={use_reentrant})",
                "another way",
                torch.__version__,
            )
    return lambda: None  # nothing to undo


def _replace_enabling(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    original = originals["_set_gradient_checkpointing"]

    @wraps(original)
    def _set_gradient_checkpointing(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature(original).bind(self, *args, **kwargs)
        checkpoint = given.arguments.get("gradient_checkpointing_func")
        if checkpoint is not None:
            given.arguments["gradient_checkpointing_func"] = partial(_of_forward, checkpoint)
        return original(*given.args, **given.kwargs)

    return {"_set_gradient_checkpointing": _set_gradient_checkpointing}


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
            Seam(f"{_CHECKPOINT}:_CheckpointFrame.__init__", _FRAME),
            Seam(f"{_CHECKPOINT}:CheckpointFunction.forward", ("ctx", "run_function", "preserve_rng_state")),
        ),
        replace=_replace_checkpoint,
        complete=_prove_checkpoint,
    ),
    Shim(
        name="gradient_checkpointing",
        distribution="transformers",
        versions=">=4.54,<6",
        reason="DeepSpeed, Unsloth and LLaMA-Factory give models a checkpoint function of their own in place of torch's",
        seams=(
            Seam(
                "transformers.modeling_utils:PreTrainedModel._set_gradient_checkpointing",
                ("self", "enable", "gradient_checkpointing_func"),
            ),
        ),
        replace=_replace_enabling,
    ),
)
