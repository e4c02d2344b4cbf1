"""The arguments of the model's forward in progress, and the masks made in it, for its layers.

Models pass to their layers what those layers need upstream, which is less than a flash kernel or a linear attention needs.
A `ForwardContext` lasts as long as the model's forward, and while one of its layers is computed again in the backward pass
of a checkpoint.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from ..errors import UnprotectedError
from ..kernels.memo import Memo, scope
from ..patching.pass_through import described, wrapped_by
from ..patching.wrapping import functions_beneath
from .boundaries import Packing, Sequences, find_packing, require_agreement, restarts_of
from .call import PackedLengths
from .roles import (
    COMPILEABLE,
    EMBEDDINGS,
    ENCODER_DECODER,
    IMPLEMENTATION,
    MASK,
    POSITIONS,
    TOKENS,
    cache_of,
    cache_returned,
)
from .tensors import constant, same_storage

__all__ = [
    "ForwardContext",
    "MaskRecord",
    "all_open",
    "arguments_by_name",
    "current_context",
    "in_current_context",
    "parameter_names",
    "record_mask",
    "require_open",
    "set_context",
    "with_context",
    "within",
]

#: The attribute of KV caches that packed sequences were put in.
_IS_PACKED = "_kernel_compat_packed"

#: Of this thread: `context`, that of the forward in progress, and `records`, of masks made outside of any forward.
_local = threading.local()


#: Models' ``__call__``s that open a context, and whether the calls of all models should.
_opening = SimpleNamespace(calls=WeakSet(), expected=False)


class MaskRecord(NamedTuple):
    """A mask that the library's mask function made, and the pattern behind it.

    Attributes:
        causal: whether a query sees no later key.
        window: how many keys to the left and to the right of its own a query sees; -1 for no limit.
        padding: (batch, kv_length or less) bool, False for padding; None for a batch without padding.
        q_length, kv_length: the sizes that it was made for.
        mask: the tensor that was returned for it, or None if None was returned.
        all_queries: whether no query is padding: the mask hides unused room of a static cache alone.
    """

    causal: bool
    window: tuple[int, int]
    padding: Tensor | None
    q_length: int
    kv_length: int
    mask: Tensor | None
    all_queries: bool = False


class ForwardContext:
    """One call of a model's forward, with its arguments by name, inside the call of another context or of none.

    Attributes:
        batch, length: of ``input_ids`` or ``inputs_embeds``; 0 if the model gets neither, as a vision tower.
        given: the names of its arguments, and of the outer calls'.
        implementation: the model's ``attn_implementation``.
        cache: the KV cache.
        masks_by_layer_type: whether ``attention_mask`` is a dict of masks, as `generate` makes them before the call.
        tokens_only: whether the tokens are the model's only input, so that every attention layer of its own is over them.
        has_encoder_states: whether the model gets the states of an encoder.
        takes_positions: whether the model's forward has a parameter ``position_ids``. Without one, positions count on along
            the whole row.
        mask: the 2D ``attention_mask``.
        has_4d_mask: whether ``attention_mask`` is 4D. Position ids don't add packed sequences to such a mask.
        positions: the ``position_ids``; the outer call's if the model around this one computed M-RoPE's.
        lengths: the ``cu_seq_lens_*`` and ``max_length_*``.
        records: the masks that the library's mask function made.
        full_masks: masks of other patterns, which it made in full, each with whether it separates packed sequences.
        rows: the `Rows` of packed sequences, padded or not, as far as they were found; None for none.
        padded_rows: the `Rows` of the padded batch; None if not found yet.
        packing: what `sequences` found; None before it, and where the forward has neither mask nor positions.
        unpadding: the `Unpadding` of the batch, if its layers run on the real tokens alone.
        packs: whether the mask is the one that `unpadding` was made of.
        packed: of a context that stands for the real tokens alone, what it belongs to.
        memo: what is found of tensors in this call, and in no other one.
    """

    def __init__(self, model: Any, arguments: dict[str, Any], outer: ForwardContext | None) -> None:
        self.given: tuple[str, ...] = (*arguments, *(() if outer is None else outer.given))
        self._ids, self._embeddings = TOKENS.of(arguments), EMBEDDINGS.of(arguments)
        tokens = self._embeddings if self._ids is None else self._ids
        sized = isinstance(tokens, Tensor) and tokens.ndim == (2 if self._ids is not None else 3)
        self.batch: int = tokens.shape[0] if sized else 0
        self.length: int = tokens.shape[1] if sized else 0
        config = getattr(model, "config", None)
        self.implementation = IMPLEMENTATION.attribute_of(config)
        self._encoder_decoder = bool(ENCODER_DECODER.attribute_of(config))
        self.tokens_only, self.has_encoder_states = sized, False
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.is_floating_point() and name not in EMBEDDINGS.spellings:
                if name.startswith(("encoder_", "cross_")):
                    self.has_encoder_states = True
                elif value.ndim > 2 and name not in MASK.spellings:
                    self.tokens_only = False
        mask = MASK.of(arguments)
        self.records: list[MaskRecord] = []
        self.full_masks: list[tuple[Tensor, bool]] = []
        self.masks_by_layer_type = isinstance(mask, dict)
        if isinstance(mask, dict):
            if not torch.compiler.is_compiling():
                made = outer.records if outer is not None else getattr(_local, "records", ())
                self.records += [record._replace(padding=record.mask) for record in made]  # as they are now
            mask = min((m for m in mask.values() if isinstance(m, Tensor)), key=lambda m: m.ndim, default=None)
        self.mask: Tensor | None = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        self.has_4d_mask = isinstance(mask, Tensor) and mask.ndim == 4
        positions = POSITIONS.of(arguments)
        self.positions: Tensor | None = positions if isinstance(positions, Tensor) else None
        past = self.cache = cache_of(arguments)
        if past is not None and getattr(_identity_of(past), _IS_PACKED, False):
            raise ValueError("a cache of packed sequences can't be continued: it doesn't say which of them goes on")
        self.lengths = PackedLengths.of(arguments)
        self.takes_positions = POSITIONS.spelled(parameter_names(type(model))) is not None
        self.rows: dict[bool, Any] = {}
        self.padded_rows: Any = None
        self.packing: Packing | None = None
        self.unpadding: Any = None
        self.packed: Any = None
        self.packs = True
        self.memo = Memo()
        self.layouts: dict[Any, Any] = {}
        self._outer_made_positions = False
        self._segment_ids: Tensor | None = None
        self._sequences: dict[bool, Sequences | None] = {}
        self._offsets_agree = False
        self._bool_mask: Tensor | None = None
        if outer is not None and self._has_tokens_of(outer):
            self._inherit(outer)

    def _has_tokens_of(self, outer: ForwardContext) -> bool:
        """Whether the tokens are the outer call's, as in a language model within its head."""
        if not self.length or (self.batch, self.length) != (outer.batch, outer.length):
            return False
        if self._ids is not None:
            return self._ids is outer._ids
        return self._embeddings is outer._embeddings or not outer._encoder_decoder

    def _inherit(self, outer: ForwardContext) -> None:
        """Take over the arguments that the outer call didn't pass on."""
        self.unpadding = outer.unpadding
        if self.unpadding is not None:
            derived = (outer.mask, outer._bool_mask, *(mask for r in outer.records for mask in (r.mask, r.padding)))
            self.packs = outer.packs and (self.mask is None or any(same_storage(self.mask, mask) for mask in derived))
        self.mask = outer.mask if self.mask is None else self.mask
        # M-RoPE's rows that the outer model computed, from its images, don't separate packed sequences.
        computed = self.positions is not None and self.positions.ndim == 3
        self._outer_made_positions = computed and outer.positions is None and outer.takes_positions
        if self.positions is None or self._outer_made_positions:
            self.positions = outer.positions
        if self.mask is outer.mask and self.positions is outer.positions:
            self.packing, self._sequences = outer.packing, dict(outer._sequences)
        self.lengths = self.lengths or outer.lengths
        self.cache = outer.cache if self.cache is None else self.cache
        self.tokens_only = self.tokens_only and (outer.tokens_only or self._ids is None)
        self.takes_positions = self.takes_positions or outer.takes_positions
        self.has_4d_mask = self.has_4d_mask and outer.has_4d_mask  # if not, the outer model made it

    def of_packed(self, layer: Any, lengths: PackedLengths, tokens: int) -> ForwardContext:
        """A context for the tokens of this one as sequences packed in one row, with no masks yet.

        Args:
            layer: the first one that runs in it.
        """
        packed = ForwardContext(layer, {}, None)
        packed.batch, packed.length, packed.lengths = 1, tokens, lengths
        packed.implementation, packed.tokens_only = self.implementation, self.tokens_only
        packed.takes_positions, packed.memo = True, self.memo  # positions were those of the rows
        return packed

    def close(self, outputs: Any) -> None:
        """Mark the caches of the forward, its argument and the one that it returned, if packed sequences were put in them."""
        if any(self.rows.values()) or self.lengths or any(self._sequences.values()):
            for past in (_identity_of(self.cache), _identity_of(cache_returned(outputs))):
                if hasattr(past, "__dict__") and not _is_paged(type(past)):
                    setattr(past, _IS_PACKED, True)  # on itself, which a graph does, too

    def covers(self, batch: int, q_len: int, kv_len: int, causal: bool) -> bool:
        """Whether attention of these sizes is over the tokens of this call and no others."""
        if not self.length or (batch, q_len, kv_len) != (self.batch, self.length, self.length):
            return False
        return causal or not self._has_other_keys

    @property
    def _has_other_keys(self) -> bool:
        """Whether attention that isn't causal has other keys than these tokens: an encoder's states."""
        return self.has_encoder_states or any(record.causal for record in self.records)

    @property
    def static_without_mask(self) -> bool:
        """Whether the cache is static and the call has no dict of masks, which would say where the keys end."""
        return not self.masks_by_layer_type and bool(COMPILEABLE.attribute_of(self.cache))

    @property
    def tokens_after_padding(self) -> int:
        """The number of tokens, if one of them comes after padding; else 0."""
        return 0 if self.packing is None else self.packing.tokens_after_padding

    @property
    def offsets(self) -> Tensor | None:
        """The ``cu_seq_lens_q``."""
        return None if self.lengths is None else self.lengths.offsets_q

    def has_record(self, q_len: int, kv_len: int) -> bool:
        """Whether a mask of these sizes was made."""
        return any((record.q_length, record.kv_length) == (q_len, kv_len) for record in self.records)

    def set_segment_ids(self, segment_ids: Tensor) -> None:
        """Keep the packed sequences that transformers found, unless there are positions or a mask to find them in."""
        known = self.positions is not None or self.mask is not None or self._outer_made_positions
        if not known and segment_ids.shape == (self.batch, self.length):
            self._segment_ids = segment_ids

    def padding(self, mask: Tensor, causal: bool) -> Tensor | None:
        """A mask that a mask function gets, as one tensor for all types of layers; None if there is no padding.

        Args:
            mask: (batch, kv_len) bool.
            causal: a decoder's mask that isn't causal may be that of an encoder's states.
        """
        same_size = self.mask is not None and self.mask.shape == mask.shape == (self.batch, self.length)
        if same_size and (causal or not self._has_other_keys):
            if self.unpadding is not None:
                self._bool_mask = mask if self._bool_mask is None else self._bool_mask
                return self._bool_mask
            if not self._sequences:
                self._bool_mask = mask
                self.sequences(True)
            if self.packing is not None and self.packing.without_padding is not None:
                return None if self.packing.without_padding else self._bool_mask
        return None if bool(mask.all()) else mask  # not the mask that the model got

    def find_record(
        self, mask: Tensor | None, q_len: int, kv_len: int, causal: bool, window: int | None
    ) -> MaskRecord | None:
        """The record of a mask; None if no mask function of the library made it.

        Args:
            mask: the mask of a layer. A copy, as on another device, is recognised by its shape.
            causal, window: the layer's own, which decide if several records are possible.

        Raises:
            ValueError: several are possible, and the layer's arguments fit none.
        """
        record: MaskRecord | None
        for record in reversed(self.records if mask is not None else ()):
            if same_storage(mask, record.mask):
                return record
        if (self.has_encoder_states and not causal) or (mask is not None and (mask.ndim != 2 or mask is self.mask)):
            return None
        if mask is None:
            sizes = (q_len, kv_len)
            possible = [r for r in self.records if r.mask is None and (r.q_length, r.kv_length) == sizes]
        else:
            possible = [r for r in self.records if r.mask is not None and r.mask.shape == mask.shape]
            possible = [r._replace(padding=mask) for r in possible]
        patterns = {(r.causal, r.window): r for r in possible}
        if len(patterns) < 2:
            return possible[-1] if possible else None
        left = window - 1 if window else -1
        fitting = [r for r in patterns.values() if r.causal == causal and r.window[0] == left]
        record = fitting[-1] if fitting else patterns.get((causal, (-1, -1)))
        if record is not None:
            return record
        raise ValueError(
            "an attention layer got a mask that several patterns of its model may have made: "
            f"{sorted(patterns)}, and the layer says causal={causal}, sliding_window={window}"
        )

    def check_offsets(self) -> None:
        """Check, once, that the model's mask and positions agree with its offsets; raises ValueError if not."""
        if self._offsets_agree or self.offsets is None:
            return
        if self.mask is not None or self.positions is not None:
            require_agreement(self.offsets, self.mask, self.positions, self.batch, self.length)
        self._offsets_agree = True

    def sequences(self, causal: bool) -> Sequences | None:
        """The packed sequences of positions, an indexed mask and a padding mask together; None if none are packed.

        Synchronises once a forward. Where shapes are fixed, packed sequences fail an assertion of the device.

        Raises:
            ValueError: the mask holds other values than 0 and positive integers.
        """
        if causal not in self._sequences:
            self._sequences[causal] = self._find_sequences(causal)
        return self._sequences[causal]

    def _find_sequences(self, causal: bool) -> Sequences | None:
        mask, positions = self.mask, self.positions
        if self.length < 2 or (mask is not None and mask.shape != (self.batch, self.length)):  # of cached keys as well
            return None
        restarts = None if positions is None else restarts_of(positions, self.batch, self.length, causal)
        if mask is None and restarts is not None:
            mask = torch.ones(1, dtype=torch.bool, device=restarts[0].device).expand(self.batch, self.length)
        elif mask is None and self._segment_ids is not None:
            mask = self._segment_ids + 1
        if mask is None:
            return None
        self.packing = find_packing(mask, restarts, self._bool_mask)
        return self.packing.sequences


def _identity_of(past: Any) -> Any:
    """The object by which a KV cache is recognised: itself, or the first tensor of the tuples that models up to 4.55 return."""
    while isinstance(past, (tuple, list)) and past:
        past = past[0]
    return past


@constant
def _is_paged(kind: type) -> bool:
    """Whether a class is that of continuous batching's cache, which keeps its packed sequences apart."""
    return any(one.__name__ == "PagedAttentionCache" for one in kind.__mro__)


def record_mask(record: MaskRecord) -> None:
    """Keep a mask's record in the forward in progress, or for the next one."""
    if (context := current_context()) is not None:
        context.records.append(record)
    else:  # the last few: a model has no more types of layers
        _local.records = [*getattr(_local, "records", ()), record][-4:]


def current_context() -> ForwardContext | None:
    """The context of the innermost forward that this thread is in."""
    return getattr(_local, "context", None)


def set_context(context: ForwardContext | None) -> None:
    """Make a context the current one of this thread, for hooks, which can't be a block."""
    _local.context = context
    scope.memo = None if context is None else context.memo


@contextmanager
def within(context: ForwardContext | None) -> Iterator[None]:
    """Run a block in a context; None for layers whose tokens aren't those of the forward in progress."""
    outer = current_context()
    set_context(context)
    try:
        yield
    finally:
        set_context(outer)


def with_context(original: Callable[..., Any], before: Callable[[Any, dict[str, Any]], None]) -> Callable[..., Any]:
    """A model's ``__call__`` that opens a `ForwardContext`.

    Args:
        before: called with the model and its arguments by name, except under torch.compile.
    """
    before = torch.compiler.disable(before)  # where a graph breaks, torch.compile may trace it by itself

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        arguments = arguments_by_name(self, args, kwargs)
        if not compiling:
            before(self, arguments)
        context = ForwardContext(self, arguments, current_context())
        with within(context):
            outputs = original(self, *args, **kwargs)
        context.close(outputs)
        return outputs

    _opening.calls.add(__call__)
    return __call__


def all_open() -> Callable[[], None]:
    """Take it that the calls of all models open a context from now on. Returns the function that undoes this."""
    _opening.expected = True
    return lambda: setattr(_opening, "expected", False)


def require_open() -> None:
    """Check that a layer is outside of any forward, rather than in one whose arguments can't be seen.

    Raises:
        UnprotectedError: other code has overwritten the ``__call__`` of models since the installation.
    """
    module = sys.modules.get("transformers.modeling_utils")
    if not _opening.expected or module is None or torch.compiler.is_compiling():
        return
    found = called = module.PreTrainedModel.__call__
    while called is not None:
        if any(function in _opening.calls for function in functions_beneath(called)):
            return
        called = wrapped_by(called)
    raise UnprotectedError(
        "model_forward",
        "packed sequences and padding",
        f"PreTrainedModel.__call__ has been overwritten by {described(found)} since the installation",
    )


def in_current_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs in the context that is current now, whenever and in whichever thread it is called."""
    context = current_context()
    if context is None:
        return function

    def in_context(*args: Any, **kwargs: Any) -> Any:
        with within(context):
            return function(*args, **kwargs)

    return in_context


@constant
def parameter_names(module: type) -> tuple[str, ...]:
    """The names of the parameters of a module's forward, without `self`."""
    return _names(module.forward)  # type: ignore[attr-defined]


def _names(forward: Any) -> tuple[str, ...]:
    """Those of a forward. One that takes any arguments passes them on to the function that it closes over.

    Mamba's forwards in transformers 5.13 to 5.15 are decorated so, without functools.wraps.
    """
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    function = inspect.unwrap(forward)
    takes_any = parameters and all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    if takes_any and inspect.isfunction(function):
        beneath = [f for f in inspect.getclosurevars(function).nonlocals.values() if inspect.isfunction(f)]
        if len(beneath) == 1:
            return _names(beneath[0])
    return tuple(p.name for p in parameters)


def arguments_by_name(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a module's forward, by name."""
    return {**dict(zip(parameter_names(type(module)), args, strict=False)), **kwargs} if args else kwargs
