"""All releases: the layers of a model can read the arguments of its forward, also when a checkpoint recomputes them.

Many models don't pass packed positions, lengths and masks on to their layers (huggingface/transformers#32937), above all
to linear attention, SSMs and short convolutions, which then run on from one packed sequence into the next (#44717, #46588).
`torch.utils.checkpoint` recomputes a layer in the backward pass, outside the model's forward; the shims `checkpoint` and
`gradient_checkpointing` restore the arguments there. They answer no defect of upstream.
Delete `model_forward` and `packed_mixers` when every model passes these arguments on, and the other two with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from inspect import signature
from typing import Any
from weakref import WeakSet

from kernel_compat.attention.defaults import resolve
from kernel_compat.errors import SeamError, UnsupportedFeatureError
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim

_CHECKPOINT = "torch.utils.checkpoint"
_FRAME = ("self", "recompute_fn", "early_stop", "unpack_error_cb", "metadata_fn")


def _replace_call(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    from kernel_compat.attention.forward_context import with_context

    called: WeakSet[Any] = WeakSet()

    def before(model: Any, arguments: Mapping[str, Any]) -> None:
        if model not in called:
            called.add(model)
            _replace_enabled_checkpoints(model)
        _mixers().patch(model)
        _refuse_attention_weights(model, arguments.get("output_attentions"))

    return {"__call__": with_context(originals["__call__"], before)}


def _replace_enabled_checkpoints(model: Any) -> None:
    """Do for checkpoint functions that were set before the installation as `_set_gradient_checkpointing` does from then on."""
    for module in model.modules():
        checkpoint = vars(module).get("_gradient_checkpointing_func")
        if checkpoint is not None and getattr(checkpoint, "func", None) is not _checkpointed:
            module._gradient_checkpointing_func = partial(_checkpointed, checkpoint)


def _checkpointed(checkpoint: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a checkpoint function so that it recomputes `function` with the arguments of the current forward."""
    import torch

    from kernel_compat.attention.forward_context import in_current_context

    return checkpoint(function if torch.compiler.is_compiling() else in_current_context(function), *args, **kwargs)


def _refuse_attention_weights(model: Any, requested: bool | None) -> None:
    """Refuse ``output_attentions``, which many models don't pass on to the attention function that would refuse it."""
    config = getattr(model, "config", None)
    entry = resolve(getattr(config, "_attn_implementation", None))
    if requested is None:
        requested = getattr(config, "output_attentions", False)
    if requested and entry is not None and entry.forward is None:
        raise UnsupportedFeatureError(
            "output_attentions=True", entry.name, "No flash kernel computes them: use attn_implementation='eager'."
        )


def _replace_post_init(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    original = originals["post_init"]

    @wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        _mixers().patch(self)  # before the first call, which torch.compile may be tracing
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
    """Check on a tiny model that the replaced attributes are the way in which torch recomputes layers.

    Raises:
        SeamError: a recomputed layer doesn't get the arguments of the forward; its gradients could be wrong.
    """
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
        first, recomputed = seen[-2:]
        if first is None or recomputed is not first:
            raise SeamError(
                f"{_CHECKPOINT}:checkpoint",
                f"a layer that is recomputed through the replaced attributes (use_reentrant={use_reentrant})",
                "another way",
                torch.__version__,
            )
    return lambda: None  # nothing to undo


def _replace_enabling(originals: Mapping[str, Any]) -> Mapping[str, Any]:
    original = originals["_set_gradient_checkpointing"]

    @wraps(original)
    def _set_gradient_checkpointing(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature(original).bind(self, *args, **kwargs)
        checkpoint = bound.arguments.get("gradient_checkpointing_func")
        if checkpoint is not None:
            bound.arguments["gradient_checkpointing_func"] = partial(_checkpointed, checkpoint)
        return original(*bound.args, **bound.kwargs)

    return {"_set_gradient_checkpointing": _set_gradient_checkpointing}


SHIMS = (
    Shim(
        name="model_forward",
        distribution="transformers",
        versions=">=4.54,<6",
        reason=(
            "models don't pass packed positions, lengths and masks to layers that don't read them upstream: gpt2, opt and "
            "whisper to their attention, most hybrid models to their linear attention"
        ),
        upstream="huggingface/transformers#32937, huggingface/transformers#44717",
        delete_when="every model passes these arguments to its layers",
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
        upstream="huggingface/transformers#44717, huggingface/transformers#46588",
        delete_when="every model separates packed sequences in these layers",
        seams=(Seam("transformers.modeling_utils:PreTrainedModel.post_init", ("self",)),),
        replace=_replace_post_init,
        complete=lambda: _mixers().activate(),
    ),
    Shim(
        name="checkpoint",
        distribution="torch",
        versions=">=2.10,<3",
        reason="a layer that is recomputed in the backward pass needs the arguments of its model's forward",
        upstream="torch.utils.checkpoint by its design: it recomputes outside the forward",
        delete_when="model_forward is deleted",
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
        reason="DeepSpeed, Unsloth and LLaMA-Factory give models checkpoint functions of their own instead of torch's",
        upstream="PreTrainedModel._set_gradient_checkpointing by its design: it takes any function",
        delete_when="model_forward is deleted",
        seams=(
            Seam(
                "transformers.modeling_utils:PreTrainedModel._set_gradient_checkpointing",
                ("self", "enable", "gradient_checkpointing_func"),
            ),
        ),
        replace=_replace_enabling,
    ),
)
