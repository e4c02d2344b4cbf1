"""A model's call that computes padded batches without their padding, where that is wanted and right."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.memo import fixed_shapes
from ..boundaries import Sequences, find_packing, restarts_of
from ..defaults import resolve
from ..forward_context import ForwardContext, arguments_by_name, current_context, parameter_names
from ..tensors import constant, offsets_of, require, true_indices
from .batch import Unpadding
from .layers import structure_of

__all__ = ["FLAG", "head_of", "unpadded"]

#: The attribute of a model whose calls are computed without padding: its `Request`.
FLAG = "_kernel_compat_padding_free"
#: Classes with a head that computes each token by itself, and whose loss predicts the next token, or each token.
_NEXT_TOKEN = re.compile(r"For(Causal(LM|Image)|ConditionalGeneration)|LMHeadModel")
_EACH_TOKEN = re.compile(r"For(MaskedLM|TokenClassification)")


def unpadded(original: Callable[..., Any]) -> Callable[..., Any]:
    """A model's ``__call__``, within its `ForwardContext`, that computes padded batches without their padding where that is wanted."""

    @wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is None:
            return original(self, *args, **kwargs)
        is_root = context.unpadding is None
        if is_root:
            request = getattr(self, FLAG, None)
            if request is None and (torch.compiler.is_compiling() or not _is_named(context)):
                return original(self, *args, **kwargs)
            arguments = arguments_by_name(self, args, kwargs)
            context.unpadding = _unpadding(self, context, arguments, None if request is None else request.tokens)
            if context.unpadding is None:
                return original(self, *args, **kwargs)
            context.unpadding.request = request
            if context.unpadding.packs_head:
                changed = context.unpadding.head_arguments(arguments, head_of(type(self)).predicts_next)
                args, kwargs = (), {**arguments, **changed}
        elif _adds_between_layers(arguments_by_name(self, args, kwargs)):
            context.unpadding.each_layer = True
        outputs = original(self, *args, **kwargs)
        if context.packs or context.unpadding.packs_head:  # padding of another mask isn't this batch's
            outputs = context.unpadding.finish(outputs, is_root)
        if is_root and not torch.compiler.is_compiling():
            context.unpadding.forget()
        return outputs

    return __call__


def _adds_between_layers(arguments: dict[str, Any]) -> bool:
    """Whether a model adds features of images to the tokens between its layers, as Qwen3-VL does."""
    return any("deepstack" in name and value is not None for name, value in arguments.items())


def _is_named(context: ForwardContext) -> bool:
    entry = resolve(context.implementation)
    return entry is not None and entry.padding_free


def _unpadding(model: Any, context: ForwardContext, arguments: dict[str, Any], fixed: int | None) -> Unpadding | None:
    """The real tokens of a call; None for a call without padding, or with masks of another kind. Synchronises at most once.

    Args:
        fixed: the number of tokens to compute; None for that of the real ones.
    """
    mask, length = context.mask, context.length
    if mask is None or length < 2 or mask.shape != (context.batch, length):
        return None
    if fixed is None and (fixed_shapes(mask) or getattr(model, "_compiled_call_impl", None) is not None):
        return None
    if (
        context.lengths
        or context.has_4d_mask
        or context.has_encoder_states
        or getattr(model.config, "is_encoder_decoder", False)
    ):
        return None
    entry = resolve(getattr(model.config.get_text_config(), "_attn_implementation", None))
    if entry is None or entry.forward is not None or entry.spreads:
        return None
    if context.cache is not None and _tokens_in(context.cache):
        return None
    real = None
    if fixed is None:
        rows = _rows(context, mask)
        if rows is None:
            return None
    elif fixed < mask.numel():
        rows, real = _in_fixed_shapes(context, mask, fixed)
    else:
        every = torch.arange(mask.numel(), device=mask.device)
        rows = Sequences(every, every, length)
    nothing_saved = rows.indices is not None and len(rows.indices) == mask.numel()
    padded = nothing_saved or _runs_padded(model, context, arguments)
    packs_head = not padded and _packs_head(model, context, arguments)
    kept = _kept(arguments)
    kept = kept if isinstance(kept, int) else 0
    return Unpadding(context, rows, real, packs_head=packs_head, active=False if padded else None, kept=kept)


def _rows(context: ForwardContext, mask: Tensor) -> Sequences | None:
    """The rows of a padded batch, as sequences. Synchronises once.

    Returns:
        None for a batch without padding, without a token, or of packed sequences.
    """
    if context.sequences(True) is not None:
        return None
    found = context.packing
    if found is None or not 0 < found.tokens < mask.numel():
        return None
    offsets = offsets_of((mask != 0).sum(1, dtype=torch.int32))
    return Sequences(true_indices(mask != 0, found.tokens), offsets, found.longest, found.interior_padding)


def _in_fixed_shapes(context: ForwardContext, mask: Tensor, tokens: int) -> tuple[Sequences, Tensor]:
    """The rows as sequences of so many tokens in all, of which the last are padding, and which of them are real.

    Raises:
        ValueError: there are more real tokens, or packed sequences. On a GPU and in graphs, an assertion of the device fails.
    """
    positions, (batch, length) = context.positions, mask.shape
    find_packing(mask, None if positions is None else restarts_of(positions, batch, length, True), fixed=True)
    offsets = offsets_of((mask != 0).sum(1, dtype=torch.int32))
    require(offsets[-1] <= tokens, f"a batch with more real tokens than padding_free(tokens={tokens}) says")
    # Padding is in sequences of its own, none longer than a row.
    ends = offsets[-1] + length * torch.arange(1, -(-tokens // length) + 1, dtype=torch.int32, device=mask.device)
    sequences = torch.cat([offsets, ends]).clamp(max=tokens)
    real = torch.arange(tokens, device=mask.device) < offsets[-1]
    return Sequences(true_indices(mask != 0, tokens), sequences, length), real


def _runs_padded(model: Any, context: ForwardContext, arguments: dict[str, Any]) -> bool:
    """Whether a call is computed with its padding, which gets zeros."""
    structure = structure_of(model)
    keeps_states = structure.has_mixers and _uses_cache(model, context, arguments)
    return keeps_states or structure.is_compiled() or _cuts_layers(model, arguments)


def _tokens_in(cache: Any) -> bool:
    """Whether a cache has tokens, or is of an unknown kind."""
    return not hasattr(cache, "get_seq_length") or bool(cache.get_seq_length())


def _uses_cache(model: Any, context: ForwardContext, arguments: dict[str, Any]) -> bool:
    """Whether a call fills a cache: that of mixers has states, which packed rows don't give."""
    uses_cache = arguments.get("use_cache")
    if uses_cache is None:
        uses_cache = getattr(model.config.get_text_config(), "use_cache", False)
    return bool(context.cache is not None or uses_cache)


def _kept(arguments: dict[str, Any]) -> Any:
    """The last columns that there are logits for, or a tensor of columns; None or 0 for all."""
    return arguments.get("logits_to_keep", arguments.get("num_logits_to_keep"))


def _cuts_layers(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether layers, and not the head alone, compute the last columns alone: Gemma 4's that share keys and values."""
    kept = _kept(arguments)
    some = isinstance(kept, Tensor) or bool(kept)
    return some and "logits_to_keep" in parameter_names(type(model.base_model))


class _Head(NamedTuple):
    """The head of a model's class.

    Attributes:
        of_tokens: whether it computes each token by itself.
        predicts_next: whether its labels are the tokens', and each is predicted from the token before: by transformers' causal loss.
        takes_targets: whether its loss takes a target for each packed token.
    """

    of_tokens: bool
    predicts_next: bool
    takes_targets: bool


@constant
def head_of(model_class: type) -> _Head:
    """What a class's name and forward say of its head."""
    name, signature = model_class.__name__, inspect.signature(model_class.forward)  # type: ignore[attr-defined]
    each, following = _EACH_TOKEN.search(name) is not None, _NEXT_TOKEN.search(name) is not None
    forward = inspect.unwrap(model_class.forward)  # type: ignore[attr-defined]
    predicts_next = following and "loss_function" in forward.__code__.co_names
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    return _Head(each or following, predicts_next, each or (predicts_next and takes_any))


def _packs_head(model: Any, context: ForwardContext, arguments: dict[str, Any]) -> bool:
    """Whether a model's head gets the packed tokens: it computes each by itself, and its loss takes their targets."""
    head, kept = head_of(type(model)), _kept(arguments)
    if not head.of_tokens or isinstance(kept, Tensor) or kept:  # columns of the padded batch
        return False
    labels = [arguments[name] for name in ("labels", "shift_labels") if arguments.get(name) is not None]
    if any(not isinstance(x, Tensor) or x.shape != (context.batch, context.length) for x in labels):
        return False  # the loss refuses them
    return not labels or head.takes_targets
