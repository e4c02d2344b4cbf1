"""One padded batch without its padding: tensors of the real tokens as one packed row, and back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...errors import UnsupportedFeatureError
from ..boundaries import Sequences
from ..call import PackedLengths
from ..forward_context import ForwardContext, UnpaddingState, set_context
from ..model_arguments import ModelArguments
from ..padding import runs
from ..roles import is_layer_cache
from ..tensors import require, same_storage
from .token_rows import put_rows, take_rows

__all__ = ["PackedContext", "PaddingFreeSetting", "Unpadding"]

#: The outputs of an inner model that a head gets.
_MAIN = ("logits", "last_hidden_state")


@dataclass(eq=False)
class PaddingFreeSetting:
    """How the calls of a model that `kernel_compat.models.padding_free` was called for are computed.

    Attributes:
        handles: how many handles of `kernel_compat.models.padding_free` are active.
        packed: the number of calls whose layers got real tokens alone, without those of a graph.
        tokens: the number of tokens that every call is computed for; None for that of its real tokens.
    """

    handles: int = 1
    packed: int = 0
    tokens: int | None = None


class Unpadding(UnpaddingState):
    """The real tokens of one padded batch.

    Attributes:
        batch, length: of the padded batch.
        mask: (batch, length) bool, True for real tokens.
        sequences: the rows without their padding. `indices` are those of the real tokens in the flattened batch.
        real: (tokens,) bool, False for the padding that fills up a fixed number of tokens; None if the number isn't fixed.
        packs_head: whether the model's head gets the packed tokens.
        active: whether the layers get the packed tokens; None before the first one.
        each_layer: whether each layer's output is scattered, because the model changes the padded batch between its layers.
        scattered: whether the last layer's output was.
        kept: the number of last columns that there are logits for; 0 for all.
        setting: counts the calls; None for a model whose name wants it.
    """

    def __init__(
        self,
        context: ForwardContext,
        sequences: Sequences,
        order: Tensor,
        real: Tensor | None,
        *,
        packs_head: bool,
        active: bool | None,
        kept: int,
    ) -> None:
        assert context.arguments.mask is not None
        assert sequences.indices is not None
        self.batch, self.length, self.mask = (
            context.arguments.batch,
            context.arguments.length,
            context.arguments.mask.bool(),
        )
        self.sequences, self.tokens, self.real, self._order = sequences, sequences.indices.shape[0], real, order
        self.packs_head, self.active, self.kept = packs_head, active, kept
        self.each_layer = self.scattered = False
        self.setting: PaddingFreeSetting | None = None
        self._gathered: dict[tuple[int, int | None], tuple[Tensor, Tensor]] = {}
        self._contexts: dict[int, PackedContext] = {}

    # Tensors.

    def gather(self, x: Tensor) -> Tensor:
        """(batch or 1, length, ...) to (1, tokens, ...)."""
        if x.shape[0] == self.batch:
            return take_rows(x.flatten(0, 1), self._order.to(x.device), self.tokens)[None]
        return x[0].index_select(0, self._order[: self.tokens].to(x.device) % self.length)[None]

    def scatter(self, x: Tensor) -> Tensor:
        """(1, tokens, ...) to (batch, length, ...), with zeros for padding."""
        if self.real is not None:
            x = x.masked_fill(~self.real.to(x.device).view(1, -1, *(1 for _ in x.shape[2:])), 0)
        return put_rows(x[0], self._order.to(x.device), self.tokens).unflatten(0, (self.batch, self.length))

    def is_packed(self, x: Any) -> bool:
        """Whether a tensor has the shape of the packed tokens."""
        return isinstance(x, Tensor) and x.ndim > 1 and x.shape[:2] == (1, self.tokens)

    def is_padded(self, x: Any) -> bool:
        """Whether a tensor has the shape of the padded batch."""
        return isinstance(x, Tensor) and x.ndim > 1 and x.shape[:2] == (self.batch, self.length)

    def forget(self) -> None:
        """Drop what the layers of a forward have shared. A checkpoint makes it again."""
        self._gathered.clear()
        self._contexts.clear()

    # Layers.

    def enter(
        self, layer: nn.Module, context: ForwardContext, tokens: str, arguments: dict[str, Any]
    ) -> dict[str, Any] | None:
        """A layer's arguments for the packed tokens; None for a layer that doesn't get the tokens of the batch.

        Args:
            tokens: the name of the argument with the hidden states.
        """
        if not context.mask_matches_unpadding:
            return None
        first = arguments.get(tokens)
        if not (self.is_padded(first) or self.is_packed(first)):
            if self.active:
                self._refuse(layer, "A layer before it gets the tokens of the batch, and it gets others.")
            return None
        if self.active is None:
            self.active = self._may_pack(context, arguments)
            if self.setting is not None and not torch.compiler.is_compiling():
                self.setting.packed += self.active
        if not self.active:
            return None
        packed = self._packed(context)
        packed_arguments = {
            name: self._argument(layer, packed, name, value, name == tokens) for name, value in arguments.items()
        }
        packed.layer = layer
        set_context(packed)
        return packed_arguments

    def keep_padded(self, layer: nn.Module) -> None:
        """Have the layers get the padded batch, because a wrapper of a layer doesn't say what its arguments are."""
        if self.active:
            self._refuse(layer, "It takes any positional arguments. Wrap the layers after the call of padding_free.")
        self.active = False

    def _refuse(self, layer: nn.Module, why: str) -> NoReturn:
        raise UnsupportedFeatureError("padding_free", type(layer).__name__, why)

    def _packed(self, context: ForwardContext) -> PackedContext:
        if torch.compiler.is_compiling():  # the graph computes equal values once
            return PackedContext(context, self.sequences, self.tokens)
        packed = self._contexts.get(id(context))
        if packed is None or not packed.belongs_to(context):
            packed = self._contexts[id(context)] = PackedContext(context, self.sequences, self.tokens)
        return packed

    def _may_pack(self, context: ForwardContext, arguments: dict[str, Any]) -> bool:
        """Whether masks are nothing but causality, windows and padding, and a cache takes keys and values by ``update``."""
        if context.full_masks or any(
            "mask" in k and isinstance(v, Tensor) and v.ndim > 2 for k, v in arguments.items()
        ):
            return False
        if any(
            value is not None and is_layer_cache(name, value) and not hasattr(value, "update")
            for name, value in arguments.items()
        ):
            return False
        # Distances over padding between tokens shrink, which a window would see.
        without_windows = len(context.records) > 0 and all(record.window == (-1, -1) for record in context.records)
        if self.real is not None and not without_windows:
            message = "a window over padding between tokens, in a model that is padding-free with a number of tokens"
            require((runs(self.mask) <= 1).all(), message)
        return without_windows or not self.sequences.interior_padding

    def _argument(self, layer: nn.Module, packed: PackedContext, name: str, value: Any, is_first: bool) -> Any:
        if is_layer_cache(name, value):
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
        key = (id(x), None if x.is_inference() else x._version)
        if key not in self._gathered:
            self._gathered[key] = (x, gather(x))
        return self._gathered[key][1]

    # Outputs.

    def finish(self, outputs: Any, is_root: bool) -> Any:
        """A model's outputs as its caller expects them.

        Args:
            is_root: whether that is the caller of the outermost model, and not a head.
        """
        main_output = self._for_caller if is_root else self._for_head
        if isinstance(outputs, Tensor):
            return main_output(outputs)
        if isinstance(outputs, tuple):
            main = next((i for i, x in enumerate(outputs) if _is_of_tokens(x)), -1)
            values = [main_output(x) if i == main else self._other("", x) for i, x in enumerate(outputs)]
            return type(outputs)(*values) if hasattr(outputs, "_fields") else tuple(values)
        if not hasattr(outputs, "items"):
            return outputs
        name_of_main = next((name for name in _MAIN if outputs.get(name) is not None), None)
        for name, value in list(outputs.items()):
            outputs[name] = main_output(value) if name == name_of_main else self._other(name, value)
        return outputs

    def _for_head(self, hidden: Any) -> Any:
        """The hidden states of an inner model for its head: packed, if the head gets packed tokens."""
        if not self.packs_head or not isinstance(hidden, Tensor):
            return self._for_caller(hidden)
        return self.gather(hidden) if self.is_padded(hidden) else hidden

    def _for_caller(self, value: Any) -> Any:
        """Logits or hidden states of the padded batch, zero for padding."""
        if not isinstance(value, Tensor):  # `LazyLogits`
            if hasattr(type(value), "compute"):
                value.layout = self.scatter if self.packs_head else self._zeroed
            return value
        # Packed because the head was, or because the last layer of a list isn't the last one that ran.
        is_packed = self.packs_head or (self.active and not self.scattered)
        return self.scatter(value) if is_packed and self.is_packed(value) else self._zeroed(value)

    def _zeroed(self, x: Tensor) -> Tensor:
        """Hidden states or logits with zeros for padding: of all columns, or of the last that there are logits for."""
        columns = (self.length, min(self.kept, self.length) or self.length)
        if not _is_of_tokens(x) or x.shape[0] != self.batch or x.shape[1] not in columns:
            return x
        return x.masked_fill(~self.mask[:, -x.shape[1] :, None].to(x.device), 0)

    def _other(self, name: str, value: Any) -> Any:
        if isinstance(value, _PaddedCache):
            return value.cache
        if isinstance(value, (tuple, list)):
            return type(value)(self._other(name, part) for part in value)
        if "router" in name and isinstance(value, Tensor) and value.ndim == 2 and value.shape[0] == self.tokens:
            return self.scatter(value[None]).flatten(0, 1)
        if not _is_of_tokens(value) or name not in ("", "hidden_states", *_MAIN):
            return value
        return self.scatter(value) if self.active and self.is_packed(value) else self._zeroed(value)


def _is_of_tokens(x: Any) -> bool:
    """Whether an output may be numbers of tokens: (batch, length, size)."""
    return isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point()


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


class PackedContext(ForwardContext):
    """The context of a layer that runs on the real tokens of a padded batch, packed in one row.

    Attributes:
        layer: the layer that is running.
    """

    has_given_offsets = False

    def __init__(self, context: ForwardContext, sequences: Sequences, tokens: int) -> None:
        offsets, longest, padded = sequences.cu_seqlens, sequences.max_seqlen, context.arguments
        super().__init__(
            ModelArguments(
                1,
                tokens,
                padded.implementation,
                padded.tokens_only,
                True,  # positions were those of the rows
                PackedLengths(offsets, offsets, longest, longest),
                is_encoder_decoder=padded.is_encoder_decoder,
            )
        )
        self.memo = context.memo
        self.layer: nn.Module | None = None
        # Its `Unpadding` refers to this one, except where nothing outlives the trace.
        self._outer: Any = context if torch.compiler.is_compiling() else weakref.ref(context)
        self._ones = torch.ones(1, tokens, dtype=torch.bool, device=offsets.device)
        sizes = (padded.length, padded.length)
        self._padded_records = [record for record in context.records if (record.q_length, record.kv_length) == sizes]
        #: Layers' masks are recognised by their storage.
        self.records = [
            record._replace(
                padding=None,
                q_length=tokens,
                kv_length=tokens,
                mask=None if record.mask is None else self._ones.clone(),
            )
            for record in self._padded_records
        ]

    def belongs_to(self, context: ForwardContext) -> bool:
        """Whether a context is that of the padded batch: an identity is unique only as long as its object lives."""
        return self._outer() is context

    def leave(self) -> Unpadding:
        """Make the context of the padded batch the current one; returns its `Unpadding`."""
        self.layer = None
        outer = self._outer if torch.compiler.is_compiling() else self._outer()
        set_context(outer)
        unpadding: Unpadding = outer.unpadding
        return unpadding

    def mask_of(self, mask: Tensor) -> Tensor:
        """The mask that stands for one of the padded batch."""
        for record, of_packed in zip(self._padded_records, self.records, strict=True):
            if of_packed.mask is not None and same_storage(mask, record.mask):
                return of_packed.mask
        return self._ones
