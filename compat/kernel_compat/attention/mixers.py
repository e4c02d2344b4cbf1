"""Packed sequences through layers that mix tokens without attention: linear attention, SSMs, recurrences and convolutions.

Upstream hands such a layer the whole row, and a state runs on from one sequence into the next. Here each sequence becomes a
row of its own, padded on the right: a layer that looks to the left alone computes it as if it were alone, whatever kernels
it runs on. Rows of about the same length go together, so that padding at most doubles what is computed.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UnsupportedFeatureError
from .boundaries import Forward, Sequences, arguments_of, current, suspended
from .defaults import resolve
from .padding import fixed_shapes, on_host, once

__all__ = ["MixerPatches", "is_mixer"]

#: Parameters, buffers and submodules of layers that carry a state along the tokens.
_STATES = frozenset(
    {
        "A_log",
        "dt_bias",
        "fgate_preact",
        "recurrent_param",
        "rg_lru",
        "slope_rate",
        "time_decay",
        "time_shift",
    }
)
#: Arguments that carry a state over from earlier calls.
_CACHES = frozenset({"cache", "cache_params", "past_key_value", "past_key_values", "state"})
#: Arguments about the packed row, which the rows made of it don't have.
_OF_THE_ROW = frozenset(
    {"cache_position", "seq_idx", *(f"{n}_{s}" for n in ("cu_seq_lens", "max_length") for s in "qk")}
)


def is_mixer(module: nn.Module) -> bool:
    """Whether a module itself carries a state along the tokens, or convolves them channel by channel."""
    if not _STATES.isdisjoint((*module._parameters, *module._buffers, *module._modules)):
        return True
    return any(isinstance(child, nn.Conv1d) and 1 < child.groups == child.in_channels for child in module.children())


def is_attention(module: nn.Module) -> bool:
    """Whether a module looks like attention, which keeps sequences apart by a mask, if at all."""
    return "Attention" in type(module).__name__ and any("k" in n or "qkv" in n for n in _projections(module))


def _projections(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_children() if isinstance(child, nn.Linear)]


class Rows(NamedTuple):
    """Packed sequences as padded rows.

    Attributes:
        sources: for each group of rows (rows, length) int64, the place that each of its tokens has in the flattened batch.
            Behind the last token of a sequence there are others, which nobody asks for.
        lengths: for each group (rows, 1) int64, how many tokens are the sequence's own.
        targets: (tokens,) int64, where each token of a sequence is in the groups' rows, flattened and joined.
        places: as in `Sequences`.
    """

    sources: tuple[Tensor, ...]
    lengths: tuple[Tensor, ...]
    targets: Tensor
    places: Tensor | None


def rows_of(sequences: Sequences, tokens: int) -> Rows:
    """The rows of packed sequences, grouped by their lengths. Synchronises once with the device.

    Args:
        tokens: how many there are in the flattened batch; those behind the last offset are a sequence of their own.
    """
    device = sequences.cu_seqlens.device
    offsets = on_host(sequences.cu_seqlens)
    if offsets[-1] > tokens:
        raise ValueError(f"cu_seq_lens_q ends at {offsets[-1]}, and there are {tokens} tokens in the batch")
    if sequences.places is None and offsets[-1] < tokens:
        offsets = [*offsets, tokens]
    spans = [(start, stop - start) for start, stop in itertools.pairwise(offsets) if stop > start]
    groups: dict[int, list[int]] = {}
    for number, (_, length) in enumerate(spans):
        groups.setdefault((length - 1).bit_length(), []).append(number)
    moved, sources, lengths, base = [0] * len(spans), [], [], 0
    for members in groups.values():
        longest = max(spans[number][1] for number in members)
        for row, number in enumerate(members):
            moved[number] = base + row * longest - spans[number][0]
        base += len(members) * longest
        starts = _on(device, [spans[number] for number in members])
        within = torch.arange(longest, device=device)
        lengths.append(starts[:, 1:])
        source = starts[:, :1] + torch.minimum(within, starts[:, 1:] - 1)
        sources.append(source if sequences.places is None else sequences.places[source])
    count = sum(length for _, length in spans)
    shift = _on(device, [(by, length) for by, (_, length) in zip(moved, spans, strict=True)])
    targets = torch.arange(count, device=device)
    targets = targets + torch.repeat_interleave(shift[:, 0], shift[:, 1], output_size=count)
    return Rows(tuple(sources), tuple(lengths), targets, sequences.places)


def _on(device: torch.device, pairs: list[tuple[int, int]]) -> Tensor:
    """Numbers of the host on a device, without waiting for it."""
    return torch.tensor(pairs, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _rows_in_a_graph(cu_seqlens: Tensor, longest: int, tokens: int) -> Rows:
    """As `rows_of`, all in one group, in shapes that don't depend on values."""
    starts, stops = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    within = torch.arange(longest, device=cu_seqlens.device)
    source = (starts[:, None] + within).clamp(max=tokens - 1)
    place = torch.arange(tokens, device=cu_seqlens.device)
    number = torch.searchsorted(stops, place, right=True).clamp(max=stops.shape[0] - 1)
    lengths = (stops - starts)[:, None]
    return Rows((source,), (lengths,), number * longest + (place - starts[number]).clamp(0, longest - 1), None)


def _rows(forward: Forward) -> Rows | None:
    """The rows of a forward's packed sequences, found once a forward; None where none are packed."""
    if forward.length < 2:
        return None
    offsets, tokens = forward.lengths.get("cu_seq_lens_q"), forward.batch * forward.length
    if offsets is not None and fixed_shapes(offsets):
        longest = forward.lengths.get("max_length_q")
        return _rows_in_a_graph(offsets, longest if isinstance(longest, int) else tokens, tokens)
    if forward.rows is None:
        forward.agree()
        sequences = forward.sequences(True) if offsets is None else Sequences(None, offsets, 0, False)
        forward.rows = False if sequences is None else rows_of(sequences, tokens)
    return forward.rows or None


def _padded_rows(forward: Forward) -> Rows:
    """Each row's tokens, and behind them its padding; of a batch of one the tokens alone."""
    order = torch.argsort(forward.mask == 0, dim=1, stable=True)
    if forward.batch == 1:
        order = order[:, : forward.tokens]
        place = torch.arange(forward.tokens, device=order.device)
        return Rows((order,), (order.new_full((1, 1), forward.tokens),), place, order[0])
    first = torch.arange(forward.batch, device=order.device)[:, None] * forward.length
    lengths = (forward.mask != 0).sum(1, keepdim=True)  # type: ignore[union-attr]
    return Rows((order + first,), (lengths,), (order.argsort(1) + first).flatten(), None)


def _within(mask: Any, source: Tensor, lengths: Tensor, row: tuple[int, int]) -> Tensor | None:
    """Of a 4D mask what it says of the tokens of each row, and that none sees what is behind its sequence."""
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[2] != row[1]:
        return None
    source = source.to(mask.device)
    of_batch, token = source[:, :1] // row[1], source % row[1]
    mask = mask.expand(row[0], *mask.shape[1:])
    mask = mask.transpose(0, 1)[:, of_batch[:, :, None], token[:, :, None], token[:, None, :]].transpose(0, 1)
    place = torch.arange(source.shape[1], device=mask.device)
    # What is behind sees itself: a softmax over nothing would have no gradient.
    hidden = ((place >= lengths.to(mask.device))[:, None, :] & (place[None, :] > place[:, None]))[:, None]
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min if mask.is_floating_point() else 0)


def _in_rows(
    original: Callable[..., Any],
    module: nn.Module,
    forward: Forward,
    rows: Rows,
    args: Any,
    kwargs: dict[str, Any],
    attention: bool,
    keep_state: bool = False,
) -> Any:
    """A mixer's forward for each group of rows, put together again; of attention the output, and no weights.

    Args:
        keep_state: whether the layer is given its cache: for the tokens of a single sequence.
    """
    given = arguments_of(module, args, kwargs)
    row = (forward.batch, forward.length)
    first_name, first = next(iter(given.items()), ("", None))
    if not isinstance(first, Tensor) or first.shape[:2] != row:
        if not forward.alone:  # not about the tokens of the text
            return original(module, *args, **kwargs)
        raise UnsupportedFeatureError(
            "packed sequences",
            type(module).__name__,
            "It isn't given the tokens of its model's forward. Pass the sequences as rows of a padded batch.",
        )

    def of_rows(name: str, value: Any, source: Tensor, lengths: Tensor) -> Any:
        if keep_state and (name in _CACHES or name == "use_cache"):
            return value
        if keep_state and name == "cache_position" and isinstance(value, Tensor):
            return value[: source.shape[1]]
        if name in _CACHES or name in _OF_THE_ROW:
            return None
        if "mask" in name:
            return _within(value, source, lengths, row)
        if name == "use_cache":
            return False
        if isinstance(value, (tuple, list)):
            return type(value)(of_rows("", part, source, lengths) for part in value)
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == row[1] and value.shape[0] in (1, row[0]):
            source = source.to(value.device)
            value = value.expand(row[0], *value.shape[1:]).flatten(0, 1)[source]
            # Padding is zero, as upstream has it: some layers see what is behind a token.
            if name == first_name and forward.padded_rows is rows:
                place = torch.arange(source.shape[1], device=source.device)
                behind = place >= lengths.to(source.device)
                value = value.masked_fill(behind.unflatten(1, (-1, *(1 for _ in value.shape[2:]))), 0)
            return value
        return value

    with suspended():
        outputs = [
            original(module, **{name: of_rows(name, value, source, lengths) for name, value in given.items()})
            for source, lengths in zip(rows.sources, rows.lengths, strict=True)
        ]

    state = next((given[name] for name in given if name in _CACHES), None)

    def joined(parts: list[Any], besides: bool = False) -> Any:
        if attention and besides:
            return None
        if isinstance(parts[0], (tuple, list)):
            if besides:
                return state
            each = zip(*parts, strict=True)
            return type(parts[0])(joined(list(part), number > 0) for number, part in enumerate(each))
        if not isinstance(parts[0], Tensor):
            return parts[0]
        sizes = [source.shape for source in rows.sources]
        if all(part.shape[:2] == size for part, size in zip(parts, sizes, strict=True)):
            heads_first = False
        elif all((part.shape[0], *part.shape[2:3]) == size for part, size in zip(parts, sizes, strict=True)):
            heads_first, parts = True, [part.transpose(1, 2) for part in parts]
        elif besides:  # a state: nothing goes on from what packed sequences leave
            return state
        else:
            raise UnsupportedFeatureError(
                "packed sequences",
                type(module).__name__,
                f"It returns the shape {tuple(parts[0].shape)}. Pass the sequences as rows of a padded batch.",
            )
        tokens = torch.cat([part.flatten(0, 1) for part in parts])[rows.targets.to(parts[0].device)]
        if rows.places is not None:
            index = rows.places.to(tokens.device)
            tokens = tokens.new_zeros(row[0] * row[1], *tokens.shape[1:]).index_copy(0, index, tokens)
        result = tokens.unflatten(0, row)
        return result.transpose(1, 2) if heads_first else result

    return joined(outputs)


def _by_sequence(original: Callable[..., Any], attention: bool) -> Callable[..., Any]:
    """A mixer's forward that keeps packed sequences apart.

    Args:
        attention: whether it is attention beside mixers, which registered names compute right by themselves.
    """

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = current()
        entry = None if call is None else resolve(call.implementation)
        if call is None or (attention and entry is not None):
            return original(self, *args, **kwargs)
        if entry is not None and entry.spreads:
            raise UnsupportedFeatureError(
                "sequence parallelism",
                type(self).__name__,
                "Its state would have to pass from rank to rank. Use a name without sequence_parallel for this model.",
            )
        rows = _rows(call)
        if rows is None:
            return _behind_padding(original, self, call, args, kwargs, attention)
        return _in_rows(original, self, call, rows, args, kwargs, attention)

    return forward


def _behind_padding(
    original: Callable[..., Any],
    module: nn.Module,
    forward: Forward,
    args: Any,
    kwargs: dict[str, Any],
    attention: bool,
) -> Any:
    """A mixer's forward over tokens that may stand behind padding, which up to 5.16 runs into those of a batch of one."""
    if forward.tokens and not attention:
        given = arguments_of(module, args, kwargs)
        cached = any(given.get(name) is not None for name in _CACHES)
        if forward.batch == 1 or not cached:
            if forward.padded_rows is None:
                forward.padded_rows = _padded_rows(forward)
            return _in_rows(original, module, forward, forward.padded_rows, args, kwargs, False, keep_state=cached)
    if "rg_lru" in module._modules and resolve(forward.implementation) is not None:
        _require_padding_behind(forward, module)
    return original(module, *args, **kwargs)


def _require_padding_behind(forward: Forward, module: nn.Module) -> None:
    """RecurrentGemma's recurrence runs over padding as over tokens, and what attention makes of padding is nobody's to say.

    Raises:
        UnsupportedFeatureError: there is padding before a token. In a graph the device's assertion fails instead.
    """
    mask = forward.mask
    if mask is None or forward.length < 2:
        return
    behind = once(mask, ("padding behind",), (mask[:, 1:] <= mask[:, :-1]).all)
    if fixed_shapes(mask):
        torch._assert_async(behind, "padding before the tokens of a recurrence that runs over it")
    elif not behind:
        raise UnsupportedFeatureError("padding before tokens", type(module).__name__, "Pad on the right.")


class MixerPatches:
    """The forwards of mixers, replaced as models with such layers appear, and put back.

    A class gets another forward, and a single layer that was given one of its own: by accelerate's hooks, say, or a kernel
    of the hub.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kinds: dict[type, bool] = {}  # whether it is attention beside mixers
        self._layers: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()  # classes and layers
        self._ours: weakref.WeakSet[Any] = weakref.WeakSet()
        self._active = False

    def activate(self) -> Callable[[], None]:
        """Returns what puts everything back."""
        self._active = True
        return self._undo

    def look_at(self, model: nn.Module) -> None:
        """Replace the forwards of a model's mixers, those of single layers anew where others have set them since."""
        if not self._active:
            return
        layers = self._layers.get(model)
        if layers is None:
            with self._lock:
                layers = self._layers[model] = self._look_at_classes(model)
        for layer in layers:
            own = vars(layer).get("forward")
            if own is not None and not self._keeps_apart(own):
                with self._lock:
                    self._replace(layer, own, self._kinds[type(layer)])

    def _look_at_classes(self, model: nn.Module) -> weakref.WeakSet[nn.Module]:
        modules = list(model.modules())
        mixers = {type(module) for module in modules if is_mixer(module)}
        beside = {type(module) for module in modules if mixers and is_attention(module)} - mixers
        for kind in (mixers | beside) - self._kinds.keys():
            self._kinds[kind] = kind in beside
            if not self._keeps_apart(kind.forward):  # inherited, as FSDP2's classes do
                self._replace(kind, kind.forward, kind in beside)
        return weakref.WeakSet(module for module in modules if type(module) in self._kinds)

    def _keeps_apart(self, forward: Any) -> bool:
        while forward is not None:
            function = getattr(forward, "__func__", forward)
            if function in self._ours:
                return True
            forward = getattr(function, "__wrapped__", None)
        return False

    def _replace(self, owner: Any, forward: Callable[..., Any], attention: bool) -> None:
        is_layer = isinstance(owner, nn.Module)
        if is_layer:  # a method, so that a copy of the layer calls its own
            forward = forward.__func__ if getattr(forward, "__self__", None) is owner else _without_self(forward)  # type: ignore[attr-defined]
        replacement = _by_sequence(forward, attention)
        replacement.before = vars(owner).get("forward")  # type: ignore[attr-defined]
        self._ours.add(replacement)
        self._owners.add(owner)
        owner.forward = MethodType(replacement, owner) if is_layer else replacement

    def _undo(self) -> None:
        with self._lock:
            self._active = False
            for owner in self._owners:
                own = vars(owner).get("forward")
                own = getattr(own, "__func__", own)
                if own not in self._ours:
                    continue
                if own.before is None:
                    del owner.forward
                else:
                    owner.forward = own.before
            for kept in (self._kinds, self._layers, self._owners, self._ours):
                kept.clear()


def _without_self(bound: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(bound)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs)

    return forward
