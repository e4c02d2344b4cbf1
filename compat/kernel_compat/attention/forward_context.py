"""The arguments of the model's forward in progress, and the masks made in it, for its layers.

Models pass to their layers what those layers need upstream, which is less than a flash kernel or a linear attention needs.
A `ForwardContext` lasts as long as the model's forward, and while one of its layers is computed again in the backward pass
of a checkpoint.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import wrapt
from torch import Tensor

from ..errors import UnprotectedError
from ..kernels.memo import Memo, scope
from ..patching.pass_through import described, wrapped_by
from ..patching.wrapping import functions_beneath
from .boundaries import Packing, Rows, Sequences, find_packing, require_agreement, restarts_of
from .layout import SequenceLayout
from .model_arguments import ModelArguments, arguments_by_name, without_lengths
from .roles import UNSPLIT, cache_of, cache_returned
from .tensors import constant, same_storage

__all__ = [
    "BatchState",
    "ChunkRecord",
    "ForwardContext",
    "MaskRecord",
    "UnpaddingState",
    "all_open",
    "current_context",
    "in_current_context",
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


class ChunkRecord(NamedTuple):
    """Causal chunks of the tokens of all ranks, counted from the first token of each sequence.

    Attributes:
        mask: the tensor that was returned for them, of a shape that no layer takes for another mask.
        padding: (batch, tokens) bool, of the ranks' slices one after the other; None without padding.
        size: of a chunk.
    """

    mask: Tensor
    padding: Tensor | None
    size: int


class UnpaddingState:
    """The base of what `unpadding` keeps in a context, which is passed on from call to call here and read there alone."""


class BatchState:
    """The base of what `parallel.text_model` keeps in a context, which is passed on from call to call here.

    Attributes:
        is_whole: whether calls have the tokens of the whole batch on every rank.
    """

    is_whole = True

    def close(self, model: Any) -> None:
        """Called at the end of the call that it began with."""


class ForwardContext:
    """One call of a model's forward, inside the call of another context or of none.

    Args:
        arguments: of the call.
        outer: the context of the call around it.

    Attributes:
        records: the masks that the library's mask function made.
        full_masks: masks of other patterns, which it made in full, each with whether it separates packed sequences.
        chunks: those of layers whose tokens are spread over ranks.
        layouts: the layouts of layers so far, each with the arguments that it was found in: see `resolution.layout_of`.
        rows: the `Rows` of packed sequences so far, by whether sequences of about the same length are padded to a common one; None
            if nothing is packed.
        padded_rows: the `Rows` of the padded batch; None if they weren't found yet.
        packing: what `sequences` found; None before it, and where the forward has neither mask nor positions.
        unpadding: the real tokens of the batch, if its layers run on these alone.
        mask_matches_unpadding: whether the mask is the one that `unpadding` was made of.
        memo: what is found of tensors in this call, and in no other one.
        batch_state: the whole batch that this call or one around it got, or the states of an encoder beside a slice of it. None in other
            calls.
        has_given_offsets: whether offsets in `arguments` are the user's, which may be wrong.
    """

    has_given_offsets = True

    def __init__(self, arguments: ModelArguments, outer: ForwardContext | None = None) -> None:
        self.arguments = arguments
        self.records: list[MaskRecord] = []
        self.full_masks: list[tuple[Tensor, bool]] = []
        self.chunks: list[ChunkRecord] = []
        self.layouts: dict[tuple[Any, ...], tuple[SequenceLayout, tuple[Any, ...]]] = {}
        self.rows: dict[bool, Rows | None] = {}
        self.padded_rows: Rows | None = None
        self.packing: Packing | None = None
        self.unpadding: UnpaddingState | None = None
        self.mask_matches_unpadding = True
        self.memo = Memo()
        self.batch_state: BatchState | None = None
        self._segment_ids: Tensor | None = None
        self._sequences: dict[bool, Sequences | None] = {}
        self._offsets_agree = False
        self._bool_mask: Tensor | None = None
        if arguments.masks_by_layer_type and not torch.compiler.is_compiling():
            records = outer.records if outer is not None else getattr(_local, "records", ())
            self.records += [record._replace(padding=record.mask) for record in records]  # as they are now
        if outer is not None and arguments.has_tokens_of(outer.arguments):
            self._inherit(outer)

    def _inherit(self, outer: ForwardContext) -> None:
        """Take over what was found in the outer call, which is over the same tokens."""
        self.unpadding, mask = outer.unpadding, self.arguments.mask
        if self.unpadding is not None:
            derived = (outer.arguments.mask, outer._bool_mask, *(m for r in outer.records for m in (r.mask, r.padding)))
            matches = mask is None or any(same_storage(mask, m) for m in derived)
            self.mask_matches_unpadding = outer.mask_matches_unpadding and matches
        if mask is outer.arguments.mask and self.arguments.positions is outer.arguments.positions:
            self.packing, self._sequences = outer.packing, dict(outer._sequences)

    def close(self, outputs: Any) -> None:
        """Mark the caches of the forward, its argument and the one that it returned, if packed sequences were put in them."""
        if any(self.rows.values()) or self.arguments.lengths or any(self._sequences.values()):
            for past in (_identity_of(self.arguments.cache), _identity_of(cache_returned(outputs))):
                if hasattr(past, "__dict__") and not _is_paged(type(past)):
                    setattr(past, _IS_PACKED, True)  # on itself, which a graph does, too

    def covers(self, batch: int, q_len: int, kv_len: int, causal: bool) -> bool:
        """Whether attention of these sizes is from the tokens of this call to the same tokens."""
        length = self.arguments.length
        if not length or (batch, q_len, kv_len) != (self.arguments.batch, length, length):
            return False
        return causal or not self._has_other_keys

    @property
    def _has_other_keys(self) -> bool:
        """Whether attention that isn't causal has other keys than these tokens: an encoder's states."""
        return self.arguments.has_encoder_states or any(record.causal for record in self.records)

    @property
    def tokens_after_padding(self) -> int:
        """The number of tokens, if one of them comes after padding; else 0."""
        return 0 if self.packing is None else self.packing.tokens_after_padding

    def has_record(self, q_len: int, kv_len: int) -> bool:
        """Whether a mask of these sizes was made."""
        return any((record.q_length, record.kv_length) == (q_len, kv_len) for record in self.records)

    def set_segment_ids(self, segment_ids: Tensor) -> None:
        """Keep the packed sequences that transformers found, unless there are positions or a mask to find them in."""
        arguments = self.arguments
        known = arguments.positions is not None or arguments.mask is not None or arguments.computed_positions
        if not known and segment_ids.shape == (arguments.batch, arguments.length):
            self._segment_ids = segment_ids

    def padding(self, mask: Tensor, causal: bool) -> Tensor | None:
        """The mask to return for a mask that a mask function gets; None if nothing is padding.

        All types of layers share the first one of a forward, because layers are matched to masks by storage.

        Args:
            mask: (batch, kv_len) bool.
            causal: a decoder's mask that isn't causal may be that of an encoder's states.
        """
        own, sizes = self.arguments.mask, (self.arguments.batch, self.arguments.length)
        same_size = own is not None and own.shape == mask.shape == sizes
        if same_size and (causal or not self._has_other_keys):
            if self.unpadding is not None:
                self._bool_mask = mask if self._bool_mask is None else self._bool_mask
                return self._bool_mask
            if not self._sequences:
                self._bool_mask = mask
                self.sequences(True)
            if self.packing is not None and self.packing.without_padding is not None:
                if self.packing.without_padding:
                    return None
                # None so far if the sequences were found before there was a mask.
                self._bool_mask = mask if self._bool_mask is None else self._bool_mask
                return self._bool_mask
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
        if self.arguments.has_encoder_states and not causal:
            return None
        if mask is not None and (mask.ndim != 2 or mask is self.arguments.mask):
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
        arguments = self.arguments
        if self._offsets_agree or arguments.offsets is None:
            return
        if arguments.mask is not None or arguments.positions is not None:
            require_agreement(arguments.offsets, arguments.mask, arguments.positions, arguments.batch, arguments.length)
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
        mask, positions = self.arguments.mask, self.arguments.positions
        batch, length = self.arguments.batch, self.arguments.length
        if length < 2 or (mask is not None and mask.shape != (batch, length)):  # of cached keys as well
            return None
        restarts = None if positions is None else restarts_of(positions, batch, length, causal)
        if mask is None and restarts is not None:
            mask = torch.ones(1, dtype=torch.bool, device=restarts[0].device).expand(batch, length)
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


def _is_empty(past: Any) -> bool:
    """Whether a KV cache has been emptied, as by ``crop``: it has no tokens, and its layers no states of recurrences."""
    for layer in getattr(past, "layers", ()):
        state = getattr(layer, "has_previous_state", False)  # by state from 5.15 on
        if any(state.values()) if isinstance(state, dict) else state is True:
            return False
    return hasattr(past, "get_seq_length") and not past.get_seq_length()


@constant
def _is_paged(kind: type) -> bool:
    """Whether a class is that of continuous batching's cache, which keeps its packed sequences apart."""
    return any(base.__name__ == "PagedAttentionCache" for base in kind.__mro__)


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


#: Returns the arguments of a model's call for a rank's slice, None if they stay, and the call's `batch_state`.
Split = Callable[[Any, dict[str, Any], "ForwardContext | None"], tuple["dict[str, Any] | None", "BatchState | None"]]


def with_context(
    original: Callable[..., Any],
    before: Callable[[Any, dict[str, Any], BatchState | None], None],
    split: Split = lambda *_: (None, None),
) -> Callable[..., Any]:
    """A model's ``__call__`` that opens a `ForwardContext`.

    Args:
        before: called with the model, its arguments by name and its `batch_state`, except under torch.compile.
        split: called with the model, its arguments by name and the context of the call around it; under torch.compile only within a call
            that gets a whole batch.
    """
    before = torch.compiler.disable(before)  # where a graph breaks, torch.compile may trace it by itself
    split = torch.compiler.disable(split)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        arguments, outer, state = arguments_by_name(self, args, kwargs), current_context(), None
        if not compiling or UNSPLIT in arguments or (outer is not None and outer.batch_state is not None):
            changed, state = split(self, arguments, outer)
            if changed is not None:
                args, kwargs, arguments = (), without_lengths(self, changed), changed
        if not compiling:
            before(self, arguments, state)
        past = cache_of(arguments)
        if past is not None and getattr(_identity_of(past), _IS_PACKED, False):
            if not _is_empty(past):
                raise ValueError("a cache of packed sequences can't be continued: it doesn't say which of them goes on")
            setattr(past, _IS_PACKED, False)
        context = ForwardContext(ModelArguments.of(self, arguments, None if outer is None else outer.arguments), outer)
        context.batch_state = state
        with within(context):
            outputs = original(self, *args, **kwargs)
        context.close(outputs)
        if state is not None and (outer is None or outer.batch_state is not state):
            state.close(self)
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
    present = called = module.PreTrainedModel.__call__
    while called is not None:
        if any(function in _opening.calls for function in functions_beneath(called)):
            return
        called = wrapped_by(called)
    raise UnprotectedError(
        "model_forward",
        "packed sequences and padding",
        f"PreTrainedModel.__call__ has been overwritten by {described(present)} since the installation",
    )


def in_current_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs in the context that is current now, whenever and in whichever thread it is called.

    It has the type and the attributes of the function, which LLaMA-Factory's checkpoint function asks for its layer.
    """
    context = current_context()
    return function if context is None else _InContext(function, context)


class _InContext(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
    def __init__(self, function: Callable[..., Any], context: Any) -> None:
        super().__init__(function)
        self._self_context = context  # by its prefix the proxy's own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with within(self._self_context):
            return self.__wrapped__(*args, **kwargs)
