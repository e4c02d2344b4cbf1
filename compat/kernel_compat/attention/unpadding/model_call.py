"""A model's call that computes padded batches without their padding, where that is wanted and right."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.indices import true_first
from ...kernels.memo import fixed_shapes
from ...patching.wrapping import functions_beneath
from ..boundaries import Sequences, find_packing, restarts_of
from ..defaults import resolve
from ..forward_context import ForwardContext, current_context
from ..heads import head_of
from ..model_arguments import arguments_by_name, parameter_names
from ..roles import ENCODER_DECODER, IMPLEMENTATION, LABELS, TARGETS, USE_CACHE
from ..tensors import offsets_of, require
from .batch import Unpadding
from .hooks import structure_of

__all__ = ["FLAG", "unpadded"]

#: The attribute of a model whose calls are computed without padding: its `PaddingFreeSetting`.
FLAG = "_kernel_compat_padding_free"
#: Packages whose forwards of an instance take labels and return outputs as the class's does.
_KEEP_OUTPUTS = ("accelerate", "kernel_compat", "kernel_compat_ops", "liger_kernel", "torch")


def unpadded(original: Callable[..., Any]) -> Callable[..., Any]:
    """A model's ``__call__``, within its `ForwardContext`, that computes padded batches without their padding where that is wanted."""

    @wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is None:
            return original(self, *args, **kwargs)
        unpadding, is_root = context.unpadding, context.unpadding is None
        if not isinstance(unpadding, Unpadding):
            setting = getattr(self, FLAG, None)
            if setting is None and (torch.compiler.is_compiling() or not _is_named(context)):
                return original(self, *args, **kwargs)
            arguments = arguments_by_name(self, args, kwargs)
            tokens = None if setting is None else setting.tokens
            unpadding, targets = _unpadding(self, context, arguments, tokens)
            context.unpadding = unpadding
            if unpadding is None:
                return original(self, *args, **kwargs)
            unpadding.setting = setting
            if unpadding.packs_head:
                args, kwargs = (), {**arguments, **targets}
        elif _adds_between_layers(arguments_by_name(self, args, kwargs)):
            unpadding.each_layer = True
        outputs = original(self, *args, **kwargs)
        if context.mask_matches_unpadding or unpadding.packs_head:  # padding of another mask isn't this batch's
            outputs = unpadding.finish(outputs, is_root)
        if is_root and not torch.compiler.is_compiling():
            unpadding.forget()
        return outputs

    return __call__


def _adds_between_layers(arguments: dict[str, Any]) -> bool:
    """Whether a model adds features of images to the tokens between its layers, as Qwen3-VL does."""
    return any("deepstack" in name and value is not None for name, value in arguments.items())


def _is_named(context: ForwardContext) -> bool:
    entry = resolve(context.arguments.implementation)
    return entry is not None and entry.padding_free


def _unpadding(
    model: Any, context: ForwardContext, arguments: dict[str, Any], fixed: int | None
) -> tuple[Unpadding | None, dict[str, Tensor]]:
    """The real tokens of a call, and what a head that gets them takes as its labels. Synchronises at most once.

    Args:
        fixed: the number of tokens to compute; None for that of the real ones.

    Returns:
        None instead of the tokens for a call without padding, or with masks of another kind.
    """
    mask, length = context.arguments.mask, context.arguments.length
    if mask is None or length < 2 or mask.shape != (context.arguments.batch, length):
        return None, {}
    if fixed is None and (fixed_shapes(mask) or getattr(model, "_compiled_call_impl", None) is not None):
        return None, {}
    if (
        context.arguments.lengths
        or context.arguments.has_4d_mask
        or context.arguments.has_encoder_states
        or ENCODER_DECODER.attribute_of(model.config)
    ):
        return None, {}
    entry = resolve(IMPLEMENTATION.attribute_of(model.config.get_text_config()))
    if entry is None or entry.forward is not None or entry.is_spread():
        return None, {}
    if context.arguments.cache is not None and _tokens_in(context.arguments.cache):
        return None, {}
    # All that doesn't depend on the mask's values comes before the host waits for them: the device is idle from then on.
    padded = _runs_padded(model, context, arguments)
    packs_head = not padded and _packs_head(model, context, arguments)
    kept = _kept(arguments)
    kept = kept if isinstance(kept, int) else 0
    if fixed is not None and fixed >= mask.numel():
        every = torch.arange(mask.numel(), device=mask.device)
        rows = Sequences(every, every, length)
        return Unpadding(context, rows, every, None, packs_head=False, active=False, kept=kept), {}
    order, offsets = true_first(mask.flatten() != 0)[0], offsets_of((mask != 0).sum(1, dtype=torch.int32))
    targets = _targets(model, arguments, mask, order) if packs_head else {}
    if fixed is None:
        real_rows, real = _rows(context, mask, order, offsets), None
        if real_rows is None:
            return None, {}
        rows = real_rows
    else:
        rows, real = _in_fixed_shapes(context, mask, order, offsets, fixed)
    unpadding = Unpadding(
        context, rows, order, real, packs_head=packs_head, active=False if padded else None, kept=kept
    )
    return unpadding, {name: x[:, : unpadding.tokens] for name, x in targets.items()}


def _targets(model: Any, arguments: dict[str, Any], mask: Tensor, order: Tensor) -> dict[str, Tensor]:
    """The labels of a batch as one row, (1, batch * length), those of real tokens first.

    The target of a token is the label after it in its row, also where that is padding; labels after padding are no target.
    """
    labels, shifted = LABELS.of(arguments), TARGETS.of(arguments)
    ignored = arguments.get("ignore_index", -100)

    def in_order(x: Tensor) -> Tensor:
        x = x.masked_fill((mask == 0).to(x.device), ignored)
        return x.flatten().index_select(0, order.to(x.device))[None]

    targets: dict[str, Tensor] = {}
    if isinstance(shifted, Tensor):
        targets[TARGETS.named(arguments)] = in_order(shifted)
    elif isinstance(labels, Tensor) and head_of(type(model)).predicts_next:
        targets[TARGETS.named(arguments)] = in_order(nn.functional.pad(labels[:, 1:], (0, 1), value=ignored))
    if isinstance(labels, Tensor):
        targets[LABELS.named(arguments)] = in_order(labels)
    return targets


def _rows(context: ForwardContext, mask: Tensor, order: Tensor, offsets: Tensor) -> Sequences | None:
    """The rows of a padded batch, as sequences. Synchronises once.

    Args:
        order: the indices of the real tokens in the flattened batch, then those of padding.
        offsets: of the rows' tokens.

    Returns:
        None for a batch without padding, without a token, or of packed sequences.
    """
    if context.sequences(True) is not None:
        return None
    packing = context.packing
    if packing is None or not 0 < packing.tokens < mask.numel():
        return None
    return Sequences(order[: packing.tokens], offsets, packing.longest, packing.interior_padding)


def _in_fixed_shapes(
    context: ForwardContext, mask: Tensor, order: Tensor, offsets: Tensor, tokens: int
) -> tuple[Sequences, Tensor]:
    """The rows as sequences of so many tokens in all, of which the last are padding, and which of them are real.

    Raises:
        ValueError: there are more real tokens, or packed sequences. On a GPU and in graphs, an assertion of the device fails.
    """
    positions, (batch, length) = context.arguments.positions, mask.shape
    find_packing(mask, None if positions is None else restarts_of(positions, batch, length, True), fixed=True)
    require(offsets[-1] <= tokens, f"a batch with more real tokens than padding_free(tokens={tokens}) says")
    # Padding is in sequences of its own, none longer than a row.
    ends = offsets[-1] + length * torch.arange(1, -(-tokens // length) + 1, dtype=torch.int32, device=mask.device)
    sequences = torch.cat([offsets, ends]).clamp(max=tokens)
    real = torch.arange(tokens, device=mask.device) < offsets[-1]
    return Sequences(order[:tokens], sequences, length), real


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
    uses_cache = USE_CACHE.of(arguments)
    if uses_cache is None:
        uses_cache = USE_CACHE.attribute_of(model.config.get_text_config())
    return bool(context.arguments.cache is not None or uses_cache)


def _kept(arguments: dict[str, Any]) -> Any:
    """The last columns that there are logits for, or a tensor of columns; None or 0 for all."""
    return arguments.get("logits_to_keep", arguments.get("num_logits_to_keep"))


def _cuts_layers(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether layers, and not the head alone, compute the last columns alone: Gemma 4's that share keys and values."""
    kept = _kept(arguments)
    some = isinstance(kept, Tensor) or bool(kept)
    return some and "logits_to_keep" in parameter_names(type(model.base_model))


def _is_replaced(model: Any) -> bool:
    """Whether other code has set a forward on a model, as TRL's with its per-token outputs: its labels are the padded batch's."""
    for function in functions_beneath(model.__dict__.get("forward")):
        if function is type(model).forward:
            return False
        code = getattr(function, "func", function)  # of a partial
        # Not ``__module__``, which functools.wraps copies.
        where = getattr(code, "__globals__", {}).get("__name__") or type(code).__module__
        if where.partition(".")[0] not in _KEEP_OUTPUTS:
            return True
    return False


def _packs_head(model: Any, context: ForwardContext, arguments: dict[str, Any]) -> bool:
    """Whether a model's head gets the packed tokens: it computes each by itself, and its loss takes their targets."""
    head, kept = head_of(type(model)), _kept(arguments)
    if not head.of_tokens or isinstance(kept, Tensor) or kept:  # columns of the padded batch
        return False
    if _is_replaced(model):
        return False
    labels = [x for role in (LABELS, TARGETS) if (x := role.of(arguments)) is not None]
    if any(not isinstance(x, Tensor) or x.shape != (context.arguments.batch, context.arguments.length) for x in labels):
        return False  # the loss refuses them
    return not labels or head.takes_targets
