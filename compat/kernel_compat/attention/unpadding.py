"""A padded batch without its padding: a model's layers and its head run on the real tokens, as one packed row.

A model computes embeddings, positions and masks for the padded batch. Hooks of its layers gather the real tokens before the first layer
and scatter them after the last one. The head of a language model gets the real tokens too.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UnsupportedFeatureError
from ..kernels.memo import fixed_shapes
from .boundaries import Sequences, find_packing, restarts_of
from .call import PackedLengths
from .defaults import resolve
from .forward_context import ForwardContext, arguments_by_name, current_context, parameter_names, set_context
from .mixers import is_mixer
from .padding import runs
from .rows import CACHE_ARGUMENTS
from .tensors import constant, offsets_of, require, same_storage, true_indices

__all__ = ["FLAG", "Request", "head_of", "remove_hooks", "structure_of", "unpadded"]

#: The attribute of a model whose calls are computed without padding: its `Request`.
FLAG = "_kernel_compat_padding_free"

#: Labels that are no target.
_IGNORED = -100
#: Classes with a head that computes each token by itself, and whose loss predicts the next token, or each token.
_NEXT_TOKEN = re.compile(r"For(Causal(LM|Image)|ConditionalGeneration)|LMHeadModel")
_EACH_TOKEN = re.compile(r"For(MaskedLM|TokenClassification)")


@dataclass(eq=False)
class Request:
    """That a model's calls are computed without padding.

    Attributes:
        handles: how many handles of `kernel_compat.models.padding_free` are active.
        packed: the number of calls whose layers got real tokens alone, without those of a graph.
        tokens: the number of tokens that every call is computed for; None for that of its real tokens.
    """

    handles: int = 1
    packed: int = 0
    tokens: int | None = None


class Unpadding:
    """The real tokens of one padded batch.

    Attributes:
        batch, length: of the padded batch.
        mask: (batch, length) bool, True for real tokens.
        sequences: the rows without their padding. `indices` are those of the real tokens in the flattened batch.
        real: (tokens,) bool, False for padding among the packed tokens, whose number is fixed then; None if there is none.
        packs_head: whether the model's head gets the packed tokens.
        active: whether the layers get the packed tokens; None before the first one.
        each_layer: whether each layer's output is scattered, because the model changes the padded batch between its layers.
    """

    def __init__(
        self,
        context: ForwardContext,
        sequences: Sequences,
        packs_head: bool,
        active: bool | None,
        request: Request | None,
        real: Tensor | None = None,
    ) -> None:
        assert sequences.indices is not None
        assert context.mask is not None
        self.batch, self.length, self.mask = context.batch, context.length, context.mask.bool()
        self.real = real
        self.sequences, self.indices = sequences, sequences.indices
        self.tokens = self.indices.shape[0]
        self.packs_head, self.each_layer = packs_head, False
        self.active, self._request = active, request
        self._gathered: dict[int, tuple[Tensor, Tensor]] = {}
        self._contexts: dict[int, _Packed] = {}

    # Tensors.

    def gather(self, x: Tensor) -> Tensor:
        """(batch or 1, length, ...) to (1, tokens, ...)."""
        if x.shape[0] == self.batch:
            return x.flatten(0, 1).index_select(0, self.indices.to(x.device))[None]
        return x[0].index_select(0, self.indices.to(x.device) % self.length)[None]

    def scatter(self, x: Tensor) -> Tensor:
        """(1, tokens, ...) to (batch, length, ...), with zeros for padding."""
        if self.real is not None:
            x = x.masked_fill(~self.real.to(x.device).view(1, -1, *(1 for _ in x.shape[2:])), 0)
        padded = x.new_zeros(self.batch * self.length, *x.shape[2:])
        return padded.index_copy_(0, self.indices.to(x.device), x[0]).unflatten(0, (self.batch, self.length))

    def is_packed(self, x: Any) -> bool:
        """Whether a tensor has the shape of the packed tokens."""
        return isinstance(x, Tensor) and x.ndim > 1 and x.shape[:2] == (1, self.tokens)

    def is_padded(self, x: Any) -> bool:
        """Whether a tensor has the shape of the padded batch."""
        return isinstance(x, Tensor) and x.ndim > 1 and x.shape[:2] == (self.batch, self.length)

    # The head's arguments.

    def head_arguments(self, arguments: dict[str, Any], next_token: bool) -> dict[str, Any]:
        """The arguments of a model with a head that change where the head gets the packed tokens.

        The target of a token is the label after it in its row, also where that is padding; labels after padding are no target.
        """
        changed: dict[str, Any] = {}
        labels, shifted = arguments.get("labels"), arguments.get("shift_labels")
        if isinstance(shifted, Tensor):
            changed["shift_labels"] = self._targets(shifted)
        elif isinstance(labels, Tensor) and next_token:
            changed["shift_labels"] = self._targets(nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED))
        if isinstance(labels, Tensor):
            changed["labels"] = self._targets(labels)
        return changed

    def _targets(self, labels: Tensor) -> Tensor:
        labels = self.gather(labels)
        return labels if self.real is None else labels.masked_fill(~self.real.to(labels.device), _IGNORED)

    def forget(self) -> None:
        """Drop what the layers of a forward have shared. A checkpoint makes it again."""
        self._gathered.clear()
        self._contexts.clear()

    # Layers.

    def enter(self, layer: nn.Module, context: ForwardContext, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """A layer's arguments for the packed tokens; None for a layer that doesn't get the tokens of the batch."""
        tokens = parameter_names(type(layer))[0]
        first = arguments.get(tokens)
        if not (self.is_padded(first) or self.is_packed(first)):
            if self.active:
                raise UnsupportedFeatureError(
                    "padding_free",
                    type(layer).__name__,
                    "A layer before it gets the tokens of the batch, and it gets others.",
                )
            return None
        if self.active is None:
            self.active = self._may_pack(context, arguments)
            if self._request is not None and not torch.compiler.is_compiling():
                self._request.packed += self.active
        if not self.active:
            return None
        packed = self._packed(layer, context)
        found = {name: self._argument(layer, packed, name, value, name == tokens) for name, value in arguments.items()}
        packed.layer = layer
        set_context(packed.context)
        return found

    def _packed(self, layer: nn.Module, context: ForwardContext) -> _Packed:
        if torch.compiler.is_compiling():  # the graph computes equal values once
            return _Packed(layer, context, self.sequences, self.tokens)
        packed = self._contexts.get(id(context))
        if packed is None or not packed.belongs_to(context):
            packed = self._contexts[id(context)] = _Packed(layer, context, self.sequences, self.tokens)
        return packed

    def _may_pack(self, context: ForwardContext, arguments: dict[str, Any]) -> bool:
        """Whether masks are nothing but causality, windows and padding, and a cache takes keys and values by ``update``."""
        if context.full_masks or any(
            "mask" in k and isinstance(v, Tensor) and v.ndim > 2 for k, v in arguments.items()
        ):
            return False
        if any(
            name in _CACHES and value is not None and not hasattr(value, "update") for name, value in arguments.items()
        ):
            return False
        # Distances over padding between tokens shrink, which a window would see.
        without_windows = len(context.records) > 0 and all(record.window == (-1, -1) for record in context.records)
        if self.real is not None and not without_windows:
            message = "a window over padding between tokens, in a model that is padding-free with a number of tokens"
            require((runs(self.mask) <= 1).all(), message)
        return without_windows or not self.sequences.interior_padding

    def _argument(self, layer: nn.Module, packed: _Packed, name: str, value: Any, is_first: bool) -> Any:
        if name in _CACHES:
            return None if value is None else _PaddedCache(value, self)
        if isinstance(value, (tuple, list)) and all(isinstance(part, Tensor) for part in value):
            return type(value)(self._tensor(part, False) for part in value)
        if not isinstance(value, Tensor):
            return value
        if "mask" not in name:
            return self._tensor(value, is_first)
        if value.ndim > 2:
            raise UnsupportedFeatureError("a 4D mask", f"a padding-free {type(layer).__name__}", "Undo padding_free.")
        return packed.mask_of(value) if self.is_padded(value) else value

    def _tensor(self, x: Tensor, is_first: bool) -> Tensor:
        """A tensor with a value for each token, of the packed ones: its first dimensions are the batch, or the second and third."""
        sizes = (self.batch,) if is_first else (1, self.batch)
        if x.ndim > 1 and x.shape[0] in sizes and x.shape[1] == self.length:
            return self._known(x, self.gather)
        if not is_first and x.ndim > 2 and x.shape[0] == 3 and x.shape[1] in sizes and x.shape[2] == self.length:
            return self._known(x, lambda y: torch.stack([self.gather(part)[0] for part in y])[:, None])
        return x

    def _known(self, x: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """Gathered once for all layers, except for what has gradients, which a checkpoint may compute again."""
        if x.requires_grad or torch.compiler.is_compiling():
            return gather(x)
        if id(x) not in self._gathered:
            self._gathered[id(x)] = (x, gather(x))
        return self._gathered[id(x)][1]

    # Outputs.

    def finish(self, outputs: Any, is_root: bool) -> Any:
        """A model's outputs as its caller expects them: the first of an inner model is packed if the head is."""
        if isinstance(outputs, Tensor):
            return self._output("", outputs, self.packs_head and not is_root)
        if isinstance(outputs, tuple):
            number = next((i for i, x in enumerate(outputs) if isinstance(x, Tensor) and x.ndim > 2), -1)
            made = [self._output("", x, i == number and self.packs_head and not is_root) for i, x in enumerate(outputs)]
            return type(outputs)(*made) if hasattr(outputs, "_fields") else tuple(made)
        if not hasattr(outputs, "items"):
            return outputs
        main = next((name for name in _MAIN if outputs.get(name) is not None), None)
        for name, value in list(outputs.items()):
            outputs[name] = self._output(name, value, name == main and self.packs_head and not is_root)
        return outputs

    def _output(self, name: str, value: Any, packed: bool) -> Any:
        if isinstance(value, _PaddedCache):
            return value.cache
        if isinstance(value, (tuple, list)):
            return type(value)(self._output(name, part, False) for part in value)
        if hasattr(type(value), "compute") and not isinstance(value, Tensor):
            value.layout = self.scatter  # `LazyLogits`
            return value
        if "router" in name and isinstance(value, Tensor) and value.ndim == 2 and value.shape[0] == self.tokens:
            return self.scatter(value[None]).flatten(0, 1)
        if packed:
            return self.gather(value) if self.is_padded(value) else value
        if self.is_packed(value):
            return self.scatter(value)
        if self.is_padded(value) and value.ndim == 3 and value.is_floating_point():
            return value.masked_fill(~self.mask.to(value.device)[..., None], 0)
        return value


_CACHES = CACHE_ARGUMENTS | {"layer_past"}
_MAIN = ("logits", "last_hidden_state")


class _PaddedCache:
    """A KV cache that gets the keys and values of packed tokens, and holds those of the padded batch."""

    def __init__(self, cache: Any, unpadding: Unpadding) -> None:
        self.cache, self._unpadding = cache, unpadding

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Put keys and values (1, heads, tokens, head_dim) in the cache; returns them as they are."""
        padded = (self._unpadding.scatter(x.transpose(1, 2)).transpose(1, 2) for x in (key, value))
        self.cache.update(*padded, *args, **kwargs)
        return key, value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


class _Packed:
    """What the layers of one forward see instead of the padded batch.

    Attributes:
        context: the context of the packed tokens.
        layer: the layer that is running.
    """

    def __init__(self, layer: nn.Module, context: ForwardContext, sequences: Sequences, tokens: int) -> None:
        offsets, longest = sequences.cu_seqlens, sequences.max_seqlen
        self.context = context.of_packed(layer, PackedLengths(offsets, offsets, longest, longest), tokens)
        compiling = torch.compiler.is_compiling()  # where nothing outlives the trace
        self.context.packed = self if compiling else weakref.ref(self)
        self._outer: Any = context if compiling else weakref.ref(context)
        self.layer: nn.Module | None = None
        self._ones = torch.ones(1, tokens, dtype=torch.bool, device=offsets.device)
        sizes = (context.length, context.length)
        self._records = [record for record in context.records if (record.q_length, record.kv_length) == sizes]
        #: Layers' masks are recognised by their storage.
        self.context.records = [
            record._replace(
                padding=None,
                q_length=tokens,
                kv_length=tokens,
                mask=None if record.mask is None else self._ones.clone(),
            )
            for record in self._records
        ]

    def belongs_to(self, context: ForwardContext) -> bool:
        """Whether a context is that of the padded batch: an identity is unique only as long as its object lives."""
        return self._outer() is context

    def leave(self) -> Any:
        """Make the context of the padded batch the current one; returns its `Unpadding`."""
        self.layer = None
        outer = self._outer if torch.compiler.is_compiling() else self._outer()
        set_context(outer)
        return outer.unpadding

    def mask_of(self, mask: Tensor) -> Tensor:
        """The mask that stands for one of the padded batch."""
        for record, of_packed in zip(self._records, self.context.records, strict=True):
            if of_packed.mask is not None and same_storage(mask, record.mask):
                return of_packed.mask
        return self._ones


# Hooks of the layers.


class _Structure:
    """What is found once of a model: its layers, which get hooks then, and whether it has mixers.

    Attributes:
        layers: references to them.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self.has_mixers = any(map(is_mixer, modules))
        self.layers: list[Any] = []
        for layers in modules:
            if not isinstance(layers, nn.ModuleList) or not any(map(_attends, layers)):
                continue
            for number, layer in enumerate(layers):
                self.layers.append(weakref.ref(layer))
                if _enter not in layer._forward_pre_hooks.values():
                    layer.register_forward_pre_hook(_enter, with_kwargs=True)
                    layer.register_forward_hook(_leave_last if number == len(layers) - 1 else _leave)

    def is_compiled(self) -> bool:
        """Whether a layer is compiled by itself, with the hooks that it has, which do nothing in a graph."""
        return any(getattr(layer(), "_compiled_call_impl", None) is not None for layer in self.layers)


def structure_of(model: nn.Module) -> _Structure:
    """A model's structure, whose layers have hooks."""
    structure = _structures.get(model)
    if structure is None:
        structure = _structures[model] = _Structure(model)
    return structure


_structures: weakref.WeakKeyDictionary[nn.Module, _Structure] = weakref.WeakKeyDictionary()


def remove_hooks(model: nn.Module) -> None:
    """Remove the hooks of a model's layers."""
    _structures.pop(model, None)
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number in [number for number, hook in hooks.items() if hook in (_enter, _leave, _leave_last)]:
                del hooks[number]


def _attends(layer: nn.Module) -> bool:
    """Whether a module has attention in it: by the class's name, or by the number of a layer that it has for a cache."""
    parts = (part for part in layer.modules() if part is not layer)
    return any("Attention" in type(part).__name__ or hasattr(part, "layer_idx") for part in parts)


def _enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    context = current_context()
    if context is None or context.unpadding is None:
        return None
    found = context.unpadding.enter(layer, context, arguments_by_name(layer, args, kwargs))
    if found is None:
        return None
    values = list(found.values())  # positional ones first: a reentrant checkpoint needs them so
    return tuple(values[: len(args)]), {name: found[name] for name in kwargs}


def _leave(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    unpadding = _left(layer)
    return _scattered(unpadding, output) if unpadding is not None and unpadding.each_layer else None


def _leave_last(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    unpadding = _left(layer)
    return None if unpadding is None else _scattered(unpadding, output)


def _left(layer: nn.Module) -> Unpadding | None:
    """Leave the packed tokens, if it is this layer that entered them; returns the batch that they are of."""
    context = current_context()
    packed = None if context is None else context.packed
    if packed is not None and not torch.compiler.is_compiling():
        packed = packed()
    if packed is None or packed.layer is not layer:
        return None
    unpadding: Unpadding = packed.leave()
    return unpadding


def _scattered(unpadding: Unpadding, output: Any) -> Any:
    if isinstance(output, tuple):
        return (unpadding.scatter(output[0]), *output[1:])
    return unpadding.scatter(output)


# A model's call.


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
            context.unpadding = _unpadding(self, context, arguments, request)
            if context.unpadding is None:
                return original(self, *args, **kwargs)
            if context.unpadding.packs_head:
                changed = context.unpadding.head_arguments(arguments, head_of(type(self)).predicts_next)
                args, kwargs = (), {**arguments, **changed}
        elif _adds_between_layers(arguments_by_name(self, args, kwargs)):
            context.unpadding.each_layer = True
        outputs = context.unpadding.finish(original(self, *args, **kwargs), is_root)
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


def _unpadding(
    model: Any, context: ForwardContext, arguments: dict[str, Any], request: Request | None
) -> Unpadding | None:
    """The real tokens of a call; None for a call without padding, or with masks of another kind. Synchronises at most once."""
    mask, length = context.mask, context.length
    if mask is None or length < 2 or mask.shape != (context.batch, length):
        return None
    fixed = None if request is None else request.tokens
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
    if fixed is not None:
        rows, real = _in_fixed_shapes(context, mask, min(fixed, mask.numel()))
    else:
        if context.sequences(True) is not None:  # packed already
            return None
        found = context.packing
        if found is None or not 0 < found.tokens < mask.numel():
            return None
        offsets = offsets_of(mask.bool().sum(1, dtype=torch.int32))
        rows = Sequences(true_indices(mask != 0, found.tokens), offsets, found.longest, found.interior_padding)
    if _runs_padded(model, context, arguments):
        return Unpadding(context, rows, False, False, request, real)
    return Unpadding(context, rows, _packs_head(model, arguments), None, request, real)


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


def _cuts_layers(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether layers, and not the head alone, compute the last columns alone: Gemma 4's that share keys and values."""
    return bool(arguments.get("logits_to_keep")) and "logits_to_keep" in parameter_names(type(model.base_model))


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


def _packs_head(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether a model's head gets the packed tokens: it computes each by itself, and its loss takes their targets."""
    head = head_of(type(model))
    kept = arguments.get("logits_to_keep", arguments.get("num_logits_to_keep", 0))
    if not head.of_tokens or isinstance(kept, Tensor) or kept:  # columns of the padded batch
        return False
    return arguments.get("labels") is None or head.takes_targets
