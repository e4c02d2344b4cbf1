"""Packed sequences as padded rows, in which a layer that mixes tokens without attention computes each by itself.

Rows of about the same length are computed together, so that padding at most doubles the tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedFeatureError
from ..kernels.indices import sequence_numbers, true_first
from ..kernels.memo import fixed_shapes
from .boundaries import Rows, Sequences, offsets_on_host
from .forward_context import ForwardContext, within
from .roles import CACHE_POSITIONS, LENGTHS, SEQUENCES, USE_CACHE, is_layer_cache, layer_cache_of

__all__ = ["PACKED_ARGUMENTS", "RowCall", "grouped_rows", "packed_rows", "padded_rows"]

#: Arguments about the whole packed row, which its sequences must not get.
PACKED_ARGUMENTS = frozenset(s for role in (CACHE_POSITIONS, SEQUENCES, *LENGTHS) for s in role.spellings)


def packed_rows(context: ForwardContext, padded: bool = True) -> Rows | None:
    """The rows of a forward's packed sequences, found once a forward; None if none are packed.

    Args:
        padded: whether rows of about the same length are padded and computed together; otherwise only rows of one length are.

    Raises:
        UnsupportedFeatureError: shapes are fixed, as in a graph, and rows may not be padded.
    """
    arguments = context.arguments
    if arguments.length < 2:
        return None
    offsets, tokens = arguments.offsets, arguments.batch * arguments.length
    if offsets is not None and fixed_shapes(offsets):
        if not padded:
            raise UnsupportedFeatureError(
                "packed sequences in a graph",
                "a layer that lets padding change earlier tokens",
                "Use transformers 5.17 or later, or don't compile.",
            )
        longest = arguments.lengths.longest_q  # type: ignore[union-attr]
        return _fixed_rows(offsets, longest if isinstance(longest, int) else tokens, tokens)
    if padded not in context.rows:
        context.check_offsets()
        sequences = context.sequences(True) if offsets is None else Sequences(None, offsets, 0, False)
        context.rows[padded] = None if sequences is None else _grouped_rows(sequences, tokens, padded)
    return context.rows[padded]


def padded_rows(context: ForwardContext) -> Rows:
    """The rows of a padded batch, whose padding comes last; a single row without its padding. Found once a forward."""
    if context.padded_rows is None:
        context.padded_rows = _padded_rows(context)
    return context.padded_rows


def _padded_rows(context: ForwardContext) -> Rows:
    mask, (batch, length) = context.arguments.mask, (context.arguments.batch, context.arguments.length)
    assert mask is not None
    order, place = true_first(mask != 0)
    if batch == 1:
        tokens = context.tokens_after_padding
        order = order[:, :tokens]
        return Rows((order,), (order.new_full((1, 1), tokens),), torch.arange(tokens, device=order.device), order[0])
    first = torch.arange(batch, device=order.device)[:, None] * length
    lengths = (mask != 0).sum(1, keepdim=True)
    return Rows((order + first,), (lengths,), (place + first).flatten(), None)


def _grouped_rows(sequences: Sequences, tokens: int, padded: bool) -> Rows:
    """The rows of packed sequences, grouped by length, or by about the same length and padded. Synchronises once.

    Args:
        tokens: how many there are in the flattened batch. The ones after the last offset are a sequence of their own.
    """
    offsets = offsets_on_host(sequences.cu_seqlens)
    if offsets[-1] > tokens:
        raise ValueError(f"cu_seq_lens_q ends at {offsets[-1]}, and there are {tokens} tokens in the batch")
    if sequences.indices is None and offsets[-1] < tokens:
        offsets = [*offsets, tokens]
    device = sequences.cu_seqlens.device
    return grouped_rows(itertools.pairwise(offsets), padded, device, sequences.indices)


def grouped_rows(
    sequences: Iterable[tuple[int, int]], padded: bool, device: torch.device, indices: Tensor | None = None
) -> Rows:
    """The rows of sequences that follow each other, given by their first token and the one behind the last.

    Args:
        padded: whether those of about the same length are one group.
        indices: those of the tokens in the batch; None for all.
    """
    groups: dict[int, list[tuple[int, int]]] = {}
    for start, stop in sequences:
        if stop > start:
            length = stop - start
            groups.setdefault((length - 1).bit_length() if padded else length, []).append((start, length))
    sources, lengths, used = [], [], []
    for members in groups.values():
        starts, sizes = torch.tensor(members, device="cpu").split(1, 1)
        within = torch.arange(int(sizes.max()), device="cpu")
        sources.append(starts + torch.minimum(within, sizes - 1))
        lengths.append(sizes)
        used.append((within < sizes).flatten())
    place = torch.cat(used).nonzero()[:, 0]
    targets = torch.empty_like(place)
    targets[torch.cat([source.flatten() for source in sources])[place]] = place

    def to_device(x: Tensor) -> Tensor:  # without waiting for it
        return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)

    sources = [to_device(source) for source in sources]
    if indices is not None:
        sources = [indices[source] for source in sources]
    return Rows(tuple(sources), tuple(map(to_device, lengths)), to_device(targets), indices)


def _fixed_rows(cu_seqlens: Tensor, longest: int, tokens: int) -> Rows:
    """The rows of packed sequences in shapes that don't depend on values: one group."""
    starts, stops = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    within = torch.arange(longest, device=cu_seqlens.device)
    source = (starts[:, None] + within).clamp(max=tokens - 1)
    index = torch.arange(tokens, device=cu_seqlens.device)
    number = sequence_numbers(cu_seqlens, tokens).clamp(max=stops.shape[0] - 1)
    lengths = (stops - starts)[:, None]
    return Rows((source,), (lengths,), number * longest + (index - starts[number]).clamp(0, longest - 1), None)


@dataclass(frozen=True, eq=False)
class RowCall:
    """One call of a layer's forward, computed in rows.

    Attributes:
        original: the layer's forward, called as ``original(layer, **arguments)``.
        layer: the layer.
        arguments: by name; the first is the tokens, of shape (batch, length, ...).
        context: that of the model's forward.
        rows: of its tokens.
        returns_weights: whether the second output is attention weights, which rows can't give: None is returned for it.
        keeps_cache: whether the layer gets its cache, which it does for the tokens of a single sequence.
    """

    original: Callable[..., Any]
    layer: nn.Module
    arguments: dict[str, Any]
    context: ForwardContext
    rows: Rows
    returns_weights: bool = False
    keeps_cache: bool = False

    def has_tokens(self) -> bool:
        """Whether the layer's first argument is the tokens of the model's forward; an error if the model gets only tokens."""
        first = next(iter(self.arguments.values()), None)
        arguments = self.context.arguments
        if isinstance(first, Tensor) and first.shape[:2] == (arguments.batch, arguments.length):
            return True
        if not arguments.tokens_only:
            return False
        raise UnsupportedFeatureError(
            "packed sequences",
            type(self.layer).__name__,
            "It doesn't get the tokens of its model's forward. Pass the sequences as rows of a padded batch.",
        )

    def __call__(self) -> Any:
        """Run the layer on each group of rows, and join the outputs to those of the batch."""
        with within(None):
            outputs = [
                self.original(
                    self.layer, **{name: self._in_rows(name, value, *group) for name, value in self.arguments.items()}
                )
                for group in zip(self.rows.sources, self.rows.lengths, strict=True)
            ]
        return self._joined(outputs)

    def _in_rows(self, name: str, value: Any, source: Tensor, lengths: Tensor) -> Any:
        """An argument for one group of rows."""
        batch, length = self.context.arguments.batch, self.context.arguments.length
        is_cache = is_layer_cache(name, value)
        if self.keeps_cache and (is_cache or name in USE_CACHE.spellings):
            return value
        if self.keeps_cache and name in CACHE_POSITIONS.spellings and isinstance(value, Tensor):
            return value[: source.shape[1]]
        if is_cache or name in PACKED_ARGUMENTS:
            return None
        if "mask" in name:
            return _mask_in_rows(value, source, lengths, (batch, length))
        if name in USE_CACHE.spellings:
            return False
        if isinstance(value, (tuple, list)):
            return type(value)(self._in_rows("", part, source, lengths) for part in value)
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != length:
            return value
        if value.shape[0] not in (1, batch):
            return value
        source = source.to(value.device)
        value = value.expand(batch, *value.shape[1:]).flatten(0, 1)[source]
        # Padding is zero, as upstream's: some layers see tokens to the right.
        if name == next(iter(self.arguments)) and self.context.padded_rows is self.rows:
            padding = torch.arange(source.shape[1], device=source.device) >= lengths.to(source.device)
            value = value.masked_fill(padding.unflatten(1, (-1, *(1 for _ in value.shape[2:]))), 0)
        return value

    def _joined(self, parts: list[Any], secondary: bool = False) -> Any:
        """One output of the layer for the batch; `secondary` ones are attention weights, a state, or more tokens."""
        if self.returns_weights and secondary:
            return None
        if isinstance(parts[0], (tuple, list)):
            if secondary:
                return self._cache()
            each = zip(*parts, strict=True)
            return type(parts[0])(self._joined(list(part), number > 0) for number, part in enumerate(each))
        if not isinstance(parts[0], Tensor):
            return parts[0]
        sizes = [source.shape for source in self.rows.sources]
        if all(part.shape[:2] == size for part, size in zip(parts, sizes, strict=True)):
            heads_first = False
        elif all((part.shape[0], *part.shape[2:3]) == size for part, size in zip(parts, sizes, strict=True)):
            heads_first, parts = True, [part.transpose(1, 2) for part in parts]
        elif secondary:  # a state, from which packed sequences can't be continued
            return self._cache()
        else:
            raise UnsupportedFeatureError(
                "packed sequences",
                type(self.layer).__name__,
                f"It returns the shape {tuple(parts[0].shape)}. Pass the sequences as rows of a padded batch.",
            )
        batch, length = self.context.arguments.batch, self.context.arguments.length
        tokens = torch.cat([part.flatten(0, 1) for part in parts])[self.rows.targets.to(parts[0].device)]
        if self.rows.indices is not None:
            indices = self.rows.indices.to(tokens.device)
            tokens = tokens.new_zeros(batch * length, *tokens.shape[1:]).index_copy(0, indices, tokens)
        result = tokens.unflatten(0, (batch, length))
        return result.transpose(1, 2) if heads_first else result

    def _cache(self) -> Any:
        return layer_cache_of(self.arguments)


def _mask_in_rows(mask: Any, source: Tensor, lengths: Tensor, shape: tuple[int, int]) -> Any:
    """The part of a 4D mask for the tokens of each row, in which no token sees the padding after its sequence.

    None for a mask of padding: rows have their own.

    Raises:
        UnsupportedFeatureError: the mask is of another kind, as flex_attention's.
    """
    if mask is None or isinstance(mask, (bool, int, float, str)):
        return mask
    if isinstance(mask, dict):  # one for each kind of layer, as Zaya's
        return {kind: _mask_in_rows(part, source, lengths, shape) for kind, part in mask.items()}
    if not isinstance(mask, Tensor):
        raise UnsupportedFeatureError(
            "packed sequences",
            f"a mask of the type {type(mask).__name__}, beside layers with a state",
            "Use attn_implementation='sdpa' or a registered name.",
        )
    batch, length = shape
    if mask.ndim != 4 or mask.shape[2] != length:
        return None
    source = source.to(mask.device)
    row, token = source[:, :1] // length, source % length
    mask = mask.expand(batch, *mask.shape[1:])
    mask = mask.transpose(0, 1)[:, row[:, :, None], token[:, :, None], token[:, None, :]].transpose(0, 1)
    index = torch.arange(source.shape[1], device=mask.device)
    # Padding sees itself: a softmax over nothing would have no gradient.
    hidden = ((index >= lengths.to(mask.device))[:, None, :] & (index[None, :] > index[:, None]))[:, None]
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min if mask.is_floating_point() else 0)
