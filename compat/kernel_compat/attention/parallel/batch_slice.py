"""A rank's slice of a whole batch: of the arguments of a model, or of its text model's behind the embedding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..boundaries import find_packing, restarts_of
from ..call import PackedLengths
from ..layer_kinds import is_encoder
from ..roles import (
    CACHE_POSITIONS,
    CROSS_MASKS,
    DECODER_EMBEDDINGS,
    DECODER_MASK,
    DECODER_POSITIONS,
    DECODER_TOKENS,
    EMBEDDINGS,
    ENCODER_ARGUMENTS,
    ENCODER_STATES,
    FEATURES_BETWEEN_LAYERS,
    FEATURES_MASK,
    LABELS,
    LENGTHS,
    MASK,
    POSITIONS,
    QUERY_OFFSETS,
    TARGETS,
    TOKENS,
)
from .checks import unspread
from .runs import tokens_of
from .split import Interval, rows_of, size

__all__ = ["OF_LABELS", "BatchSlice", "Decoder", "Rows", "is_in_full", "sequences_in", "targets_in", "tower_inputs"]

#: Of labels.
_IGNORED = -100
OF_LABELS = frozenset((*LABELS.spellings, *TARGETS.spellings))
#: Replaced by those of the slice: masks and lengths by the lengths of all tokens.
_REPLACED = frozenset(spelling for role in (CACHE_POSITIONS, *LENGTHS) for spelling in role.spellings)
#: The roles in a decoder's call of a model's arguments for its decoder.
_OF_DECODER = {
    TOKENS: DECODER_TOKENS,
    EMBEDDINGS: DECODER_EMBEDDINGS,
    MASK: DECODER_MASK,
    POSITIONS: DECODER_POSITIONS,
}


class Rows(NamedTuple):
    """The rows of tokens that ranks share, which may be those of the batch without their padding, as one row.

    Attributes:
        kept: (tokens,) int64, the tokens of the flattened batch in the row; None for all of them in their rows.
        sequences: intervals of the flattened rows. Tokens in none of them are padding.
        number, length: of the rows.
    """

    kept: Tensor | None
    sequences: list[Interval]
    number: int
    length: int

    @classmethod
    def of_batch(
        cls, sequences: list[Interval], batch: int, length: int, padding_free: bool, device: torch.device
    ) -> Rows:
        """The rows of a batch, of whose sequences these are the intervals."""
        tokens = size(sequences)
        if not padding_free or tokens in (0, batch * length):
            return cls(None, sequences, batch, length)
        kept = tokens_of(sequences, device)
        edges = accumulate((stop - start for start, stop in sequences), initial=0)
        return cls(kept, [*pairwise(edges)], 1, tokens)


class Decoder(NamedTuple):
    """A decoder whose layers attend to the states of an encoder, which are whole on every rank.

    Attributes:
        arguments: the batch's for it, as its forward names them.
        labels: those of which a model makes its tokens; None if the batch has these.
        gets_states: whether the batch has the states of the encoder, and not what the model makes them of.
    """

    arguments: Mapping[str, Any]
    labels: Tensor | None = None
    gets_states: bool = False

    @classmethod
    def of_batch(cls, batch: Mapping[str, Any]) -> Decoder | None:
        """The decoder of a batch; None if there is no encoder beside it."""
        if ENCODER_STATES.of(batch) is not None:
            return cls(batch, gets_states=True)
        own = {role.named(): x for role, decoder in _OF_DECODER.items() if (x := decoder.of(batch)) is not None}
        if TOKENS.of(own) is not None or EMBEDDINGS.of(own) is not None:
            return cls(own)
        labels, has_tokens = LABELS.of(batch), TOKENS.of(batch) is not None or EMBEDDINGS.of(batch) is not None
        if labels is None or (has_tokens and not own):
            return None
        return cls({**own, TOKENS.named(): labels}, labels)


@dataclass(frozen=True, eq=False)
class BatchSlice:
    """This rank's slice of a whole batch.

    Attributes:
        sizes: the number of rows and their length in the batch.
        sequences: intervals of the flattened batch.
        rows: what is split of it.
        columns: (tokens,) int64, the rank's columns of the rows, which are padded to a length that can be split.
        padded: that length.
        offsets: where sequences begin and end in the flattened rows, padding as sequences of its own; None where each row is one.
        padding: the intervals of padding among them.
        inputs: names of the batch's inputs of images, videos and sound, which have no dimension of tokens.
        decoder: whose tokens they are, if there is an encoder beside it.
    """

    sizes: tuple[int, int]
    sequences: list[Interval]
    rows: Rows
    columns: Tensor
    padded: int
    offsets: list[int] | None
    padding: frozenset[Interval]
    inputs: frozenset[str]
    decoder: Decoder | None

    def of(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a model's call for the slice, of those for the whole batch, which hold what the batch holds or is embedded to.

        Raises:
            UnsupportedFeatureError: a mask that can't be split, or a decoder's that isn't the batch's.
            ValueError: there isn't a label for each token of a decoder.
        """
        if ENCODER_STATES.of(arguments) is not None:
            self._require_rows(arguments)
        own = {name: value for name, value in arguments.items() if name not in _REPLACED | {*MASK.spellings}}
        positions, labels = POSITIONS.of(arguments), LABELS.of(arguments)
        if positions is None:
            own[POSITIONS.named()] = self._positions
        elif positions.ndim == 2 and len(positions) == 1:
            own[POSITIONS.named(arguments)] = positions.expand(self.sizes[0], -1)
        if self.has_aligned_labels and labels is not None and labels.shape[: len(self.sizes)] != self.sizes:
            raise ValueError(
                f"labels of shape {tuple(labels.shape)} for {self.sizes[0]} x {self.sizes[1]} tokens of a decoder"
            )
        moves = not self.has_aligned_labels and labels is not None and labels.shape == self.sizes
        if moves and TARGETS.of(arguments) is None:
            own[TARGETS.named()] = torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
        sliced = {name: self._sliced(name, value) for name, value in own.items() if self._has_tokens(name, value)}
        return own | sliced | self._features(arguments) | self._masks(arguments) | self.lengths()

    @property
    def has_aligned_labels(self) -> bool:
        """Whether a token predicts the label at its own place: a model makes the tokens of its decoder by moving the labels."""
        return self.decoder is not None and not self.decoder.gets_states

    def of_labels(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The slice of a batch's labels alone."""
        named = {name: value for name, value in batch.items() if name in OF_LABELS}
        return {name: value for name, value in self.of(named).items() if name in OF_LABELS}

    def covers(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a model's call is over the tokens of the whole batch, without its images, videos and sound.

        That of a decoder beside an encoder gets its states: the encoder may have as many tokens.
        """
        if self.decoder is not None and ENCODER_STATES.of(arguments) is None:
            return False
        ids, embeddings = TOKENS.of(arguments), EMBEDDINGS.of(arguments)
        tokens = embeddings if ids is None else ids
        if (
            not isinstance(tokens, Tensor)
            or tokens.shape[:2] != self.sizes
            or tokens.ndim != (2 if ids is not None else 3)
        ):
            return False
        return all(arguments.get(name) is None for name in self.inputs)

    def lengths(self) -> dict[str, Any]:
        """The ``cu_seq_lens_*`` and ``max_length_*`` of all ranks' tokens; none where each row is one sequence."""
        if self.offsets is None:
            return {}
        at = torch.tensor(self.offsets, dtype=torch.int32, device=self.columns.device)
        longest = max(stop - start for start, stop in pairwise(self.offsets))
        return {role.named(): value for role, value in zip(LENGTHS, (at, at, longest, longest), strict=True)}

    @cached_property
    def _positions(self) -> Tensor:
        """(batch, length): of tokens in their sequences, 0 for padding; of a decoder beside an encoder in their rows, as models count."""
        device = self.columns.device
        if self.decoder is not None:
            return torch.arange(self.sizes[1], device=device).expand(self.sizes)
        positions = torch.zeros(self.sizes, dtype=torch.int64, device=device)
        counts = tokens_of([(0, stop - start) for start, stop in self.sequences], device)
        positions.view(-1)[tokens_of(self.sequences, device)] = counts
        return positions

    def _has_tokens(self, name: str, value: Any) -> bool:
        """Whether an argument has a value for each token: dimensions of the batch and of the length, the last ones of positions."""
        if not isinstance(value, Tensor):
            return False
        if name in CROSS_MASKS.spellings:
            return value.ndim == 4 and value.shape[1] == 1 and (value.shape[0], value.shape[2]) == self.sizes
        if self.decoder is not None and name.startswith(ENCODER_ARGUMENTS):
            return False
        dim = _dimension(name, value)
        return value.ndim > dim > 0 and tuple(value.shape[dim - 1 : dim + 1]) == self.sizes

    def _require_rows(self, arguments: Mapping[str, Any]) -> None:
        """Check that each row is one sequence, which attends to the states of an encoder in the same row."""
        is_packed = PackedLengths.of(arguments) is not None or len(self.rows.sequences) > self.rows.number
        if self.rows.kept is not None or (self.decoder is not None and is_packed):
            raise unspread(
                "packed sequences, or rows without their padding, beside the states of an encoder",
                "Pass the sequences as rows of a padded batch, without padding_free.",
            )

    def _require_mask(self, mask: Tensor) -> None:
        """Check that the mask of a decoder is the batch's, or hides what no token sees, which comes after it."""
        assert self.decoder is not None
        own = MASK.of(self.decoder.arguments)
        if mask is own:
            return
        valid = mask != 0
        if not bool((valid[:, 1:] <= valid[:, :-1]).all() if own is None else (valid == (own != 0)).all()):
            raise unspread(
                "a mask that a model has made for its decoder, and that hides tokens before others",
                f"Pass {DECODER_MASK.named()}.",
            )

    def _sliced(self, name: str, x: Tensor) -> Tensor:
        dim = _dimension(name, x)
        if self.rows.kept is not None:
            x = x.flatten(dim - 1, dim).index_select(dim - 1, self.rows.kept.to(x.device)).unsqueeze(dim - 1)
        if count := self.padded - self.rows.length:
            value = _IGNORED if name in OF_LABELS else 0
            x = torch.nn.functional.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, count), value=value)
        if self.padding and name in POSITIONS.spellings:
            x = _counted(x, self.padding)
        return x.index_select(dim, self.columns.to(x.device))

    def _masks(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Masks of any kind, whole: each query's row is on the rank that computes it. Lengths say what those of padding do."""
        masks = MASK.of(arguments)
        parts = [*masks.values()] if isinstance(masks, dict) else [masks]
        if all(part is None or getattr(part, "shape", None) == self.sizes for part in parts):
            for part in parts:
                if self.decoder is not None and part is not None:
                    self._require_mask(part)
            return {}
        if self.decoder is not None or not is_in_full(masks, *self.sizes):
            raise unspread(
                f"masks of shapes {[tuple(getattr(part, 'shape', ())) for part in parts]}",
                "Pass masks of padding, or of every query and key of the batch without an encoder.",
            )
        rows = {start // self.sizes[1] for start, _ in self.sequences}
        if self.rows.kept is not None or len(rows) < len(self.sequences):
            raise unspread(
                "packed sequences, or padding that is left out, beside a mask of every query and key",
                "Pass the sequences as rows of a padded batch, without padding_free=True; or let a 4D attention_mask alone separate them.",
            )
        behind = self.padded - self.rows.length

        def padded(mask: Tensor) -> Tensor:
            hidden = -math.inf if mask.is_floating_point() else 0
            return torch.nn.functional.pad(mask, (0, behind, 0, behind), value=hidden) if behind else mask

        whole = {kind: padded(mask) for kind, mask in masks.items()} if isinstance(masks, dict) else padded(masks)
        return {MASK.named(arguments): whole}

    def _features(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Features that a text model adds to the tokens of images between its layers: the rows of the slice's."""
        mask, features = FEATURES_MASK.of(arguments), FEATURES_BETWEEN_LAYERS.of(arguments)
        if mask is None or features is None:
            return {}
        numbers = self._sliced("", mask.flatten().cumsum(0).view(mask.shape) * mask)  # from 1 on, 0 for other tokens
        at = numbers[numbers > 0] - 1
        own = type(features)(x.index_select(0, at.to(x.device)) for x in features)
        return {FEATURES_MASK.named(arguments): numbers > 0, FEATURES_BETWEEN_LAYERS.named(arguments): own}


def is_in_full(masks: Any, rows: int, length: int) -> bool:
    """Whether a mask, or each of those of types of layers, has every query and key of the batch."""
    parts = [*masks.values()] if isinstance(masks, dict) else [masks]
    shapes = [tuple(getattr(part, "shape", ())) for part in parts]
    return all(len(shape) == 4 and shape[0] in (1, rows) and shape[2:] == (length, length) for shape in shapes)


def _dimension(name: str, x: Tensor) -> int:
    """The dimension of an argument's tokens."""
    return x.ndim - 1 if name in POSITIONS.spellings else 2 if name in CROSS_MASKS.spellings else 1


def tower_inputs(batch: Mapping[str, Any], sizes: tuple[int, int]) -> frozenset[str]:
    """The names of a batch's inputs of images, videos and sound, such as ``pixel_values``. Inputs with a value for each token don't count."""
    return frozenset(
        name
        for name, value in batch.items()
        if isinstance(value, (Tensor, list, tuple)) and is_encoder(name) and getattr(value, "shape", ())[:2] != sizes
    )


def sequences_in(batch: Mapping[str, Any], rows: int, length: int) -> list[Interval]:
    """The sequences of a whole batch, as intervals of its flattened tokens."""
    if (lengths := PackedLengths.of(batch)) is not None:
        offsets = lengths.offsets()[0].tolist()
        if offsets[-1] > rows * length:
            raise ValueError(
                f"{QUERY_OFFSETS.named()} ends at {offsets[-1]}, and there are {rows} x {length} tokens: pass the whole batch, once"
            )
        return [(a, b) for a, b in pairwise(offsets) if a < b]
    mask, positions = MASK.of(batch), POSITIONS.of(batch)
    if is_in_full(mask, rows, length):
        return rows_of(rows, length)
    restarts = None if positions is None else restarts_of(positions, rows, length, True)
    if mask is None and restarts is not None:
        mask = torch.ones_like(restarts[1])
    if mask is None:
        return rows_of(rows, length)
    if getattr(mask, "shape", None) != (rows, length):
        raise ValueError(f"a mask of shape {tuple(getattr(mask, 'shape', ()))} doesn't fit {rows} x {length} tokens")
    packing = find_packing(mask, restarts)
    if packing.interior_padding or (packing.sequences is not None and packing.sequences.interior_padding):
        raise ValueError("padding between two tokens of a sequence, which can't be split over ranks")
    valid = (mask != 0).flatten()
    if packing.sequences is None:
        edges = torch.nn.functional.pad((mask != 0).to(torch.int8), (1, 1)).diff().cpu()
        starts, stops = (edges == 1).nonzero().tolist(), (edges == -1).nonzero().tolist()
        return [(row * length + a, row * length + b) for (row, a), (_, b) in zip(starts, stops, strict=True)]
    offsets, at = packing.sequences.cu_seqlens.tolist(), valid.nonzero()[:, 0].tolist()
    return [(at[a], at[b - 1] + 1) for a, b in pairwise(offsets)]


def targets_in(batch: Mapping[str, Any], aligned: bool) -> Tensor | None:
    """The number of targets in a whole batch, whose labels may be `aligned` with the tokens that predict them; None without labels."""
    targets, labels = TARGETS.of(batch), LABELS.of(batch)
    if targets is None and labels is not None:
        targets = labels if aligned else labels[..., 1:]
    return None if targets is None else (targets != _IGNORED).sum()


def _counted(positions: Tensor, padding: Iterable[Interval]) -> Tensor:
    """Positions (..., batch, length) in which padding counts from 0, too, as a sequence of its own."""
    positions = positions.clone()
    flat = positions.flatten(-2)
    for start, stop in padding:
        flat[..., start:stop] = torch.arange(stop - start)
    return flat.view(positions.shape)
