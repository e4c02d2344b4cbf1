"""All releases: the layers of a model can read the arguments of its forward, also when a checkpoint recomputes them.

`torch.utils.checkpoint` recomputes a layer in the backward pass, outside the model's forward; the shims `checkpoint` and
`gradient_checkpointing` restore the arguments there. They answer no defect of upstream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial, wraps
from typing import Any
from weakref import WeakSet

from kernel_compat.attention.defaults import resolve
from kernel_compat.attention.roles import ATTENTIONS, READ, implementation_of
from kernel_compat.errors import SeamError, UnsupportedFeatureError
from kernel_compat.patching.seam import Seam
from kernel_compat.patching.shim import Shim, each
from kernel_compat.policy.layers import require_declared, require_layers

from . import _own_attention
from ._dispatch import MODEL

_CHECKPOINT = "torch.utils.checkpoint"
_FRAME = ("self", "recompute_fn", "early_stop", "unpack_error_cb", "metadata_fn")


def _call(original: Callable[..., Any]) -> Callable[..., Any]:
    from kernel_compat.attention.forward_context import with_context
    from kernel_compat.attention.heads import require_labels_of_slices, require_whole_batch
    from kernel_compat.attention.parallel.text_model import split_at_text_model
    from kernel_compat.attention.tensors import require_readable
    from kernel_compat.attention.unpadding.model_call import unpadded

    called: WeakSet[Any] = WeakSet()

    def before(model: Any, arguments: dict[str, Any], state: Any) -> None:
        if model not in called:
            called.add(model)
            _wrap_checkpoints(model)  # those from before the installation
        _mixers().patch(model)
        entry = resolve(implementation_of(model))
        if entry is not None and entry.forward is None:
            _refuse_attention_weights(model, entry.name, ATTENTIONS.of(arguments))
            require_readable(READ, (role.of(arguments) for role in READ))
            if entry.is_context_parallel and entry.is_spread():
                require_whole_batch(model, arguments, state)
                require_labels_of_slices(model, arguments)

    return with_context(unpadded(_under_one_name(original)), before, split_at_text_model)


def _under_one_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """A model's ``__call__`` that refuses another attention name at its end: masks of one name are wrong for another's layers."""
    import torch

    def check(model: Any, before: Any, cause: Exception | None = None) -> None:
        now = implementation_of(model)
        if now != before and (resolve(before) or resolve(now)):
            raise ValueError(
                f"the attention of {type(model).__name__} was changed from {before!r} to {now!r} during its forward, whose masks "
                "are those of one name: call set_attn_implementation between forwards"
            ) from cause

    @wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        name = implementation_of(self)
        try:
            outputs = original(self, *args, **kwargs)
        except Exception as error:
            check(self, name, error)
            raise
        check(self, name)
        return outputs

    return __call__


def _wrap_checkpoints(model: Any) -> None:
    """Have the checkpoint functions of a model recompute with the arguments of the forward in progress."""
    for module in model.modules():
        checkpoint = vars(module).get("_gradient_checkpointing_func")
        if checkpoint is not None and getattr(checkpoint, "func", None) is not _checkpointed:
            module._gradient_checkpointing_func = partial(_checkpointed, checkpoint)


def _checkpointed(checkpoint: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    from kernel_compat.attention.forward_context import in_current_context

    return checkpoint(function if torch.compiler.is_compiling() else in_current_context(function), *args, **kwargs)


def _refuse_attention_weights(model: Any, name: str, requested: bool | None) -> None:
    """Refuse ``output_attentions``, which many models don't pass on to the attention function that would refuse it."""
    if requested is None:
        requested = ATTENTIONS.attribute_of(model.config)
    if requested:
        raise UnsupportedFeatureError(
            "output_attentions=True", name, "No flash kernel computes them: use attn_implementation='eager'."
        )


def _all_open() -> Callable[[], None]:
    from kernel_compat.attention.forward_context import all_open

    return all_open()


def _post_init(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        _mixers().patch(self)  # before the first call, which torch.compile may be tracing
        entry = resolve(implementation_of(self))
        if entry is not None:
            require_declared(self, entry)
        if entry is not None and entry.forward is None:
            require_layers(self, entry.name, entry.kernel)
        return original(self, *args, **kwargs)

    return post_init


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


class _Recomputed(Exception):
    """Ends a recomputation before torch runs a backward."""


def _prove_checkpoint() -> Callable[[], None]:
    """Check that torch recomputes layers through the replaced attributes: else gradients could be wrong.

    Runs no backward: torch's engine would start its threads, and a forked child could then compute no gradient. On the meta
    device: of tensors on the CPU, torch looks for a GPU, and a forked child could then not use it.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    from kernel_compat.attention.forward_context import current_context, with_context

    seen: list[Any] = []

    def layer(x: Any) -> Any:
        seen.append(current_context())
        if len(seen) == 2:
            raise _Recomputed
        return x * x

    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, use_reentrant: bool) -> Any:
            scalar = torch.ones((), device="meta", requires_grad=True)
            return checkpoint(layer, scalar, use_reentrant=use_reentrant, preserve_rng_state=False)

    for use_reentrant in (False, True):
        seen.clear()
        with torch.inference_mode(False), torch.enable_grad():
            result = with_context(Model.forward, lambda *_: None)(Model(), use_reentrant)
            node = result.grad_fn
            # What the engine calls, without the engine. By the node: other code may choose the kind of checkpoint for all callers.
            with suppress(_Recomputed):
                if isinstance(node, torch.autograd.function.BackwardCFunction):
                    node.apply(torch.ones((), device="meta"))
                else:
                    node._saved_self  # noqa: B018, SLF001
        if len(seen) != 2 or seen[0] is None or seen[1] is not seen[0]:
            expected = f"a layer that is recomputed through the replaced attributes (use_reentrant={use_reentrant})"
            raise SeamError(f"{_CHECKPOINT}:checkpoint", expected, "another way", torch.__version__)
    return lambda: None  # nothing to undo


def _enabling(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _set_gradient_checkpointing(self: Any, *args: Any, **kwargs: Any) -> Any:
        original(self, *args, **kwargs)
        _wrap_checkpoints(self)

    return _set_gradient_checkpointing


SHIMS = (
    Shim(
        name="model_forward",
        protects="packed sequences and padding in layers that get neither positions nor lengths nor masks from their model",
        distribution="transformers",
        versions=">=4.54,<6",
        reason="models don't pass positions, lengths and masks to layers that don't read them upstream (gpt2, hybrid models)",
        upstream="huggingface/transformers#32937, huggingface/transformers#44717",
        delete_when="every model passes these arguments to its layers",
        seams=(Seam(f"{MODEL}.__call__", ("self",), inherited=True, passes_on=True),),
        replace=each(_call),
        complete=_all_open,
    ),
    Shim(
        name="packed_mixers",
        protects="packed sequences in linear attention, SSMs, recurrences and convolutions",
        distribution="transformers",
        versions=">=4.54,<6",
        reason="linear attention, SSMs, recurrences and convolutions run on from one packed sequence into the next",
        upstream="huggingface/transformers#44717, huggingface/transformers#46588",
        delete_when="every model separates packed sequences in these layers",
        seams=(Seam(f"{MODEL}.post_init", ("self",)),),
        replace=each(_post_init),
        complete=lambda: _mixers().activate(),
    ),
    Shim(
        name="checkpoint",
        protects="layers that are computed again in the backward pass",
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
        protects="layers that are computed again in the backward pass",
        distribution="transformers",
        versions=">=4.54,<6",
        reason="DeepSpeed, Unsloth and LLaMA-Factory give models checkpoint functions of their own instead of torch's",
        upstream="PreTrainedModel._set_gradient_checkpointing by its design: it takes any function",
        delete_when="model_forward is deleted",
        seams=(Seam(f"{MODEL}._set_gradient_checkpointing", ("self", "enable", "gradient_checkpointing_func")),),
        replace=each(_enabling),
    ),
    Shim(
        name="own_attention",
        distribution="transformers",
        versions=">=4.54,<6",
        reason="models with a table of attention classes of their own know no registered names",
        upstream="huggingface/transformers#38301, huggingface/transformers#43030; in remote code on every release",
        delete_when="no supported model, remote code included, has attention classes of its own",
        seams=(),
        replace=each(lambda original: original),
        complete=_own_attention.activate,
    ),
)
