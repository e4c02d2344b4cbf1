"""Where the sequences of a model's forward begin, and what its masks say: found once a forward, known to every layer.

Models pass on to their layers what those layers need upstream, which is less than a flash kernel or a linear attention
needs. A `Forward` keeps the arguments of the model's own call for as long as the call lasts, and while one of its layers is
computed again in the backward pass of a checkpoint.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .padding import fixed_shapes, places_before, require

__all__ = [
    "Forward",
    "Pattern",
    "Sequences",
    "arguments_of",
    "calling",
    "current",
    "note",
    "packed_sequences",
    "parameters_of",
    "require_agreement",
    "restarts_of",
    "resuming",
    "same_tensor",
    "suspended",
]

#: Lengths of packed sequences, as transformers' models take them.
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Sequences(NamedTuple):
    """Packed sequences of a batch, whose tokens are counted along its flattened (batch, length).

    Attributes:
        places: (tokens,) int64, the places of the tokens that belong to a sequence, in order; None where all do.
        cu_seqlens: (sequences + 1,) int32, offsets into these tokens.
        max_seqlen: the length of the longest sequence.
        holes: whether there is padding between the tokens of a sequence.
    """

    places: Tensor | None
    cu_seqlens: Tensor
    max_seqlen: int
    holes: bool


class Pattern(NamedTuple):
    """What a mask function of transformers says, apart from padding.

    Attributes:
        causal: whether a query sees no later key.
        window: how many keys to the left and to the right a query sees besides its own; -1 for no limit.
        padding: (batch, kv_length or less) bool, False for padding; None where no key is.
        q_length, kv_length: the sizes it was made for.
        mask: the tensor it was returned as; None where it was returned as None.
    """

    causal: bool
    window: tuple[int, int]
    padding: Tensor | None
    q_length: int
    kv_length: int
    mask: Tensor | None


class Forward:
    """One call of a model's forward.

    Attributes:
        batch, length: of the tokens in ``input_ids`` or ``inputs_embeds``; 0 where the model is given neither, as a
            vision tower.
        implementation: the model's ``attn_implementation``.
        cache: the ``past_key_values`` that the model is given.
        given_masks: whether the model is given masks that a mask function has made, for each type of layer.
        alone: whether the tokens are all that the model is given, so that every attention layer of its own is over them.
        crosses: whether the model is given the states of an encoder.
        takes_positions: whether the model has a parameter for position ids; one without counts on along the whole row.
        decided: whether the model is given a 4D mask, which decides by itself which token sees which.
        lengths: the ``cu_seq_lens_*`` and ``max_length_*`` that it is given.
        made_positions: whether the positions are M-RoPE's, made by the model around this one, which was given none.
        agreed: the offsets that mask and positions were compared with.
        rows, padded_rows: what `mixers` makes of its sequences, False for none, and of its padding.
        tokens: how many tokens are no padding, where some of them stand behind padding; 0 where none does, or nothing was read.
    """

    def __init__(self, model: Any, given: dict[str, Any], outer: Forward | None) -> None:
        ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
        tokens = embeddings if ids is None else ids
        sized = isinstance(tokens, Tensor) and tokens.ndim == (2 if ids is not None else 3)
        self.batch: int = tokens.shape[0] if sized else 0  # type: ignore[union-attr]
        self.length: int = tokens.shape[1] if sized else 0  # type: ignore[union-attr]
        self.ids, self.embeddings = ids, embeddings
        config = getattr(model, "config", None)
        self.implementation = getattr(config, "_attn_implementation", None)
        self.encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self.alone, self.crosses = sized, False
        for name, value in given.items():
            if isinstance(value, Tensor) and value.is_floating_point() and name != "inputs_embeds":
                if name.startswith(("encoder_", "cross_")):
                    self.crosses = True
                elif value.ndim > 2 and name != "attention_mask":
                    self.alone = False
        mask = given.get("attention_mask")
        self.patterns: list[Pattern] = []
        self.given_masks = isinstance(mask, dict)  # by layer type, as generate makes them before the call
        if isinstance(mask, dict):
            if not torch.compiler.is_compiling():
                self.patterns += outer.patterns if outer is not None else getattr(_here, "patterns", ())
            masks = sorted((m for m in mask.values() if isinstance(m, Tensor)), key=lambda m: m.ndim)
            mask = masks[0] if masks else None
        self.mask: Tensor | None = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        self.decided = isinstance(mask, Tensor) and mask.ndim == 4
        positions = given.get("position_ids")
        self.positions: Tensor | None = positions if isinstance(positions, Tensor) else None
        cache = self.cache = given.get("past_key_values")
        if cache is not None and not torch.compiler.is_compiling() and _is_packed(cache):
            raise ValueError("a cache of packed sequences can't be continued: which of them is meant can't be told")
        self.lengths: dict[str, Any] = {name: given[name] for name in _LENGTHS if given.get(name) is not None}
        self.takes_positions = "position_ids" in parameters_of(type(model))
        self.made_positions = False
        self._numbers: Tensor | None = None
        self._found: dict[bool, Sequences | None] = {}
        self.agreed: Tensor | None = None
        self.rows: Any = None
        self.padded_rows: Any = None
        self.tokens = 0
        self._bool_mask: Tensor | None = None
        self._full: bool | None = None
        if outer is not None and self._is_part_of(outer):
            self.mask = outer.mask if self.mask is None else self.mask
            # Rows of M-RoPE that the model made itself, of its images, never tell of packing.
            made = self.positions is not None and self.positions.ndim == 3
            self.made_positions = made and outer.positions is None and outer.takes_positions
            if self.positions is None or self.made_positions:
                self.positions = outer.positions
            self.lengths = self.lengths or outer.lengths
            self.cache = outer.cache if self.cache is None else self.cache
            self.alone = self.alone and (outer.alone or ids is None)
            self.takes_positions = self.takes_positions or outer.takes_positions
            self.decided = self.decided and outer.decided  # or else the model has made it

    def _is_part_of(self, outer: Forward) -> bool:
        """Whether these are the tokens of the call around this one: a language model's within its head's, say."""
        if not self.length or (self.batch, self.length) != (outer.batch, outer.length):
            return False
        if self.ids is not None:
            return self.ids is outer.ids
        if outer.embeddings is not None:
            return self.embeddings is outer.embeddings or not outer.encoder_decoder
        return not outer.encoder_decoder

    def describes(self, batch: int, q_len: int, kv_len: int) -> bool:
        """Whether attention of these sizes is over the tokens of this call and no others."""
        return bool(self.length) and (batch, q_len, kv_len) == (self.batch, self.length, self.length)

    def close(self, outputs: Any) -> None:
        """Remember a cache that packed sequences were put in."""
        if self.rows or self.lengths or any(self._found.values()):
            _remember_packed(getattr(outputs, "past_key_values", None))

    @property
    def has_others(self) -> bool:
        """Whether attention that isn't causal is to something else than these tokens: an encoder's states."""
        return self.crosses or any(pattern.causal for pattern in self.patterns)

    def note(self, pattern: Pattern) -> None:
        """Remember what a mask function said."""
        self.patterns.append(pattern)

    def has_pattern(self, q_len: int, kv_len: int) -> bool:
        """Whether a mask function spoke of these sizes."""
        return any((p.q_length, p.kv_length) == (q_len, kv_len) for p in self.patterns)

    def number(self, numbers: Tensor) -> None:
        """Remember which sequence a mask function takes each token for: (batch, length)."""
        known = self.positions is not None or self.mask is not None or self.made_positions
        if not known and numbers.shape == (self.batch, self.length):
            self._numbers = numbers

    def padding(self, mask: Tensor, causal: bool) -> Tensor | None:
        """The padding of the model's mask as transformers hands it to a mask function: one tensor for all of them; None where
        there is none.

        Args:
            mask: (batch, kv_len) bool.
            causal: a decoder's mask that isn't may be that of an encoder's states.
        """
        own = self.mask is not None and self.mask.shape == mask.shape == (self.batch, self.length)
        if not own or (self.has_others and not causal):
            return None if bool(mask.all()) else mask
        if self._full is None and not self._found:
            self._bool_mask = mask
            self.sequences(True)
        if self._full is None:  # the model's mask isn't the one that it was given
            return None if bool(mask.all()) else mask
        return None if self._full else self._bool_mask

    def pattern(self, mask: Tensor | None, q_len: int, kv_len: int, causal: bool, window: int | None) -> Pattern | None:
        """What the mask function said that made `mask`; None where none did.

        Args:
            mask: what a layer is given. A copy of a mask, as on another device, is recognised by its sizes.
            causal, window: what the layer says itself. It decides where several patterns are possible.

        Raises:
            ValueError: several are possible, and the layer's own words fit none.
        """
        crossing = self.crosses and not causal  # attends to the encoder's states
        if mask is None:
            if crossing:
                return None
            possible = [p for p in self.patterns if p.mask is None and (p.q_length, p.kv_length) == (q_len, kv_len)]
        else:
            for pattern in reversed(self.patterns):
                if same_tensor(mask, pattern.mask):
                    same: Pattern = pattern
                    return same
            if mask.ndim != 2 or mask is self.mask or crossing:
                return None
            possible = [p for p in self.patterns if p.mask is not None and p.mask.shape == mask.shape]
            possible = [p._replace(padding=mask) for p in possible]
        said = {(p.causal, p.window): p for p in possible}
        if len(said) < 2:
            return possible[-1] if possible else None
        left = window - 1 if window else -1
        if fitting := [p for p in said.values() if p.causal == causal and p.window[0] == left]:
            return fitting[-1]
        if causal_alike := {p.causal: p for p in said.values() if p.window == (-1, -1) and p.causal == causal}:
            found: Pattern = causal_alike[causal]
            return found
        raise ValueError(
            "an attention layer got a mask that several patterns of its model may have made: "
            f"{sorted(said)}, and the layer says causal={causal}, sliding_window={window}"
        )

    def agree(self) -> None:
        """Check, once, that the mask and the positions agree with the given lengths.

        Raises:
            ValueError: they don't.
        """
        offsets = self.lengths.get("cu_seq_lens_q")
        if offsets is None or self.agreed is offsets:
            return
        self.agreed = offsets
        if self.mask is not None or self.positions is not None:
            require_agreement(offsets, self.mask, self.positions, self.batch, self.length)

    def sequences(self, causal: bool) -> Sequences | None:
        """The packed sequences that positions, an indexed mask and a padding mask tell of together; None where none are packed.

        Synchronises once a forward. Where shapes are fixed it can't: packing is an error of the device there.

        Raises:
            ValueError: a mask holds something else than tokens, padding and the numbers of sequences.
        """
        if causal not in self._found:
            self._found[causal] = self._sequences(causal)
        return self._found[causal]

    def _sequences(self, causal: bool) -> Sequences | None:
        mask, positions = self.mask, self.positions
        if self.length < 2:
            return None
        if mask is not None and mask.shape != (self.batch, self.length):
            return None  # over a cache: what is packed there can't be told
        restarts = None if positions is None else restarts_of(positions, self.batch, self.length, causal)
        if mask is None:
            if restarts is None and self._numbers is None:
                return None
            if restarts is None:
                mask = self._numbers + 1  # type: ignore[operator]
            else:
                mask = torch.ones(1, dtype=torch.bool, device=restarts.order.device).expand(self.batch, self.length)
        found = packed_sequences(mask, restarts, self._bool_mask)
        if found is None:
            return None
        self._full, self.tokens = found.full, found.behind_padding
        return found.sequences


class Found(NamedTuple):
    """What was read off the device in one go.

    Attributes:
        sequences: None where every row has one at most.
        full: whether no token is padding; None where the bool mask differs from the mask.
        behind_padding: how many tokens there are, if one of them stands behind padding in its row; else 0.
    """

    sequences: Sequences | None
    full: bool | None
    behind_padding: int = 0


def same_tensor(tensor: Tensor, other: Tensor | None) -> bool:
    """Whether one is the other, or a view or a detached copy of it. In a graph views count as others."""
    if tensor is other:
        return True
    if other is None or torch.compiler.is_compiling() or tensor.device != other.device or not tensor.numel():
        return False
    return bool(tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())


class Restarts(NamedTuple):
    """Position ids as what tells sequences apart: a token whose order is 0 or falls begins one."""

    order: Tensor
    zero: Tensor
    falls: bool


def restarts_of(positions: Tensor, batch: int, length: int, causal: bool) -> Restarts | None:
    """Position ids in any form transformers makes: None where they can't tell sequences apart.

    Args:
        positions: (length,), (batch or 1, length), or (3 or more, batch or 1, length): M-RoPE's time, height and width, with
            the position in the text before them where there are more than three. For a single row that isn't causal also
            (length, 2): the row and column of each patch of several images, as Pixtral's.
        causal: of bidirectional attention only positions of a single row count, and only where they return to 0: vision
            encoders number their patches as they like.
    """
    if positions.ndim == 1:
        positions = positions[None]
    if not causal and batch == 1 and length > 2 and positions.shape == (length, 2):
        return Restarts(positions.sum(-1)[None], (positions == 0).all(-1)[None], False)
    if positions.ndim == 3 and positions.shape[0] > 3:
        positions = positions[0]
    if positions.ndim not in (2, 3) or positions.shape[-1] != length or positions.shape[-2] not in (1, batch):
        return None
    if not causal and (batch > 1 or positions.ndim == 3):
        return None
    if positions.ndim == 2:
        order, zero = positions, positions == 0
    elif positions.shape[0] == 3:  # an image at the beginning has the time 0 all over
        order, zero = positions[0], (positions == 0).all(0)
    else:
        return None
    # The time of one image may come before that of another, so that of three rows only a return to 0 counts.
    falls = causal and positions.ndim == 2
    return Restarts(order.expand(batch, -1), zero.expand(batch, -1), falls)


def packed_sequences(mask: Tensor, restarts: Restarts | None, same: Tensor | None = None) -> Found | None:
    """The sequences of a mask and positions; None where shapes are fixed. Synchronises once.

    Args:
        mask: (batch, length): 0 for padding, and 1 for tokens or the number of the sequence that a token belongs to.
        restarts: (batch, length) each.
        same: (batch, length) bool, compared with the mask.

    Raises:
        ValueError: the mask holds negative numbers or fractions.
    """
    batch, length = mask.shape
    real = mask != 0
    place = torch.arange(length, device=mask.device).expand(batch, -1)
    before = places_before(real)
    follows = real & (before >= 0)  # another token of the row
    earlier = before.clamp(min=0)
    begins = follows & (mask != mask.gather(1, earlier))
    if restarts is not None:
        # Positions that are 0 throughout, as Decision Transformer's, tell nothing.
        anew = restarts.zero & (restarts.order.amax(1, keepdim=True) > 0)
        if restarts.falls:
            anew = anew | (restarts.order < restarts.order.gather(1, earlier))
        begins = begins | (follows & anew)
    if fixed_shapes(mask):
        # How many sequences there are is a value, and values can't decide anything here.
        torch._assert_async(
            ~begins.any(),
            "packed sequences under torch.compile or in a CUDA graph: pass cu_seq_lens_q, cu_seq_lens_k, "
            "max_length_q and max_length_k",
        )
        return None
    first = ((real & (before < 0)) | begins).flatten()
    rank = real.flatten().cumsum(0) - 1
    start = torch.where(first, rank, 0).cummax(0).values
    facts = [
        begins.any(),
        first.sum(),
        real.sum(),
        (rank - start).max() + 1,
        (follows & ~begins & (before < place - 1)).any(),
        ((mask.long() != mask) | (mask < 0)).any(),
        (real == (real if same is None else same)).all(),
        (real[:, 1:] > real[:, :-1]).any(),
    ]
    packed, count, tokens, longest, holes, strange, is_same, behind = torch.stack(facts).tolist()
    if strange:
        raise ValueError(
            "a 2D attention mask must hold 1 for tokens and 0 for padding, or number the packed sequences, and this one "
            "holds other values"
        )
    flat = real.flatten()
    full = tokens == flat.numel() if is_same else None
    if not packed:
        return Found(None, full, tokens if behind else 0)
    offsets = torch.nn.functional.pad(rank[_places(first, count)], (0, 1), value=tokens)
    index = None if tokens == flat.numel() else _places(flat, tokens)
    return Found(Sequences(index, offsets.to(torch.int32), longest, bool(holes)), full)


def _places(mask: Tensor, count: int) -> Tensor:
    """The indices of the True ones in order; unlike ``nonzero``, without asking the device how many they are."""
    return torch.argsort(~mask, stable=True)[:count]


def require_agreement(
    cu_seqlens: Tensor, mask: Tensor | None, positions: Tensor | None, batch: int, length: int
) -> None:
    """Given lengths decide; positions and a mask beside them must not say otherwise. Never waits for a GPU.

    A position that restarts within a sequence, and padding between the tokens of one, are contradictions. Positions that
    go on where a sequence begins are not: a model without a rotation may have them.

    Args:
        cu_seqlens: (sequences + 1,), offsets into the flattened (batch, length).
        mask: (batch, length) with 0 for padding, of any number; other shapes say nothing here.
        positions: as `restarts_of` takes them.

    Raises:
        ValueError: they contradict each other; on a GPU and under torch.compile the device's assertion fails instead.
    """
    tokens = batch * length
    begins = torch.zeros(tokens + 1, dtype=torch.bool, device=cu_seqlens.device)
    begins = begins.index_fill(0, cu_seqlens.clamp(0, tokens).long(), True)[:-1].view(batch, length)[:, 1:]
    if mask is not None and mask.shape != (batch, length):
        mask = None
    if mask is not None:
        # Padding has sequences of its own, and the numbers of sequences change where one begins.
        constant = (mask[:, 1:] == mask[:, :-1]) | begins
        require(
            constant.all(), "an attention mask with padding or several sequences within one of those of cu_seq_lens_q"
        )
    restarts = None if positions is None else restarts_of(positions, batch, length, True)
    if restarts is not None:
        again = restarts.zero[:, 1:]
        if restarts.falls:
            again = again | (restarts.order[:, 1:] < restarts.order[:, :-1])
        if mask is not None:
            again = again & (mask[:, 1:] != 0)
        require((~again | begins).all(), "position_ids that restart within one of the sequences of cu_seq_lens_q")


#: Caches that a forward put packed sequences in, by identity: tensors of old ones can't be told apart by equality.
_packed_caches: dict[int, weakref.ref[Any]] = {}


def _kept(cache: Any) -> Any:
    """What stands for a cache: itself, or the first tensor of the tuples that models up to 4.55 return."""
    while isinstance(cache, (tuple, list)) and cache:
        cache = cache[0]
    return cache


def _is_packed(cache: Any) -> bool:
    kept = _kept(cache)
    known = _packed_caches.get(id(kept))
    return known is not None and known() is kept


def _remember_packed(cache: Any) -> None:
    kept = _kept(cache)
    if getattr(type(kept), "__weakref__", None) is not None:
        key = id(kept)
        _packed_caches[key] = weakref.ref(kept, lambda _: _packed_caches.pop(key, None))


# the call in progress, of this thread

_here = threading.local()


def note(pattern: Pattern) -> None:
    """Remember what a mask function said, for the forward in progress or for the next one."""
    forward = current()
    if forward is not None:
        forward.note(pattern)
    else:  # of the last few calls: a model has no more types of layers
        _here.patterns = [*getattr(_here, "patterns", ()), pattern][-4:]


def current() -> Forward | None:
    """The innermost forward of a model that this thread is in."""
    return getattr(_here, "forward", None)


def calling(original: Callable[..., Any], before: Callable[[Any, dict[str, Any]], None]) -> Callable[..., Any]:
    """A model's ``__call__`` that keeps its arguments for its layers.

    Args:
        before: called with the model and its arguments by name, but not where it is traced.
    """

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracing = torch.compiler.is_compiling()
        given = arguments_of(self, args, kwargs)
        if not tracing:
            before(self, given)
        outer = current()
        forward = _here.forward = Forward(self, given, outer)
        try:
            outputs = original(self, *args, **kwargs)
        finally:
            _here.forward = outer
        if not tracing:
            forward.close(outputs)
        return outputs

    return __call__


def resuming(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, within the forward that is in progress now, whenever and in whichever thread it is called."""
    forward = current()
    if forward is None:
        return function

    def resumed(*args: Any, **kwargs: Any) -> Any:
        outer = current()
        _here.forward = forward
        try:
            return function(*args, **kwargs)
        finally:
            _here.forward = outer

    return resumed


@contextmanager
def suspended() -> Iterator[None]:
    """For layers that are given other tokens than those of the forward in progress."""
    outer = current()
    _here.forward = None
    try:
        yield
    finally:
        _here.forward = outer


_parameter_names: dict[type, tuple[str, ...]] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def parameters_of(model: type) -> tuple[str, ...]:
    """The names of a forward's parameters after `self`."""
    names = _parameter_names.get(model)
    if names is None:
        names = _parameter_names[model] = tuple(inspect.signature(model.forward).parameters)[1:]  # type: ignore[attr-defined]
    return names


def arguments_of(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a module's forward, by name."""
    return {**dict(zip(parameters_of(type(module)), args, strict=False)), **kwargs} if args else kwargs
