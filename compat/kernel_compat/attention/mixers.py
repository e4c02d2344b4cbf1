"""Packed sequences through mixers, layers that mix tokens without attention: linear attention, SSMs, recurrences, convolutions.

Upstream passes the whole packed row to such a layer, and its state runs on from one sequence into the next. Here each
sequence is a row of its own, padded on the right: a layer that sees tokens to the left alone computes it as if it were
alone, whichever kernels it runs on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedFeatureError
from ..kernels.memo import fixed_shapes, memoised
from ..patching.swap import Change, make, undo
from ..patching.wrapping import functions_beneath
from .defaults import resolve
from .forward_context import ForwardContext, current_context
from .layer_kinds import is_attention, is_mixer
from .model_arguments import arguments_by_name
from .parallel.mixing import MixersOverRanks, is_tokenwise
from .parallel.sharding import ContextParallel
from .parallel.text_model import is_unsplit
from .parallel.ulysses import SKIPS
from .roles import layer_cache_of
from .rows import RowCall, packed_rows, padded_rows

__all__ = ["MixerPatches"]


def _by_sequence(original: Callable[..., Any], for_attention: bool, over_ranks: MixersOverRanks) -> Callable[..., Any]:
    """A mixer's forward that computes each packed sequence by itself.

    Args:
        for_attention: whether the layer is attention in a model with mixers. Registered names separate the sequences
            themselves.
        over_ranks: computes it where the tokens of a sequence are spread over ranks.
    """

    @wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        entry = None if context is None else resolve(context.arguments.implementation)
        if context is None or (for_attention and entry is not None):
            return original(self, *args, **kwargs)
        if entry is not None and entry.is_spread() and not _is_skipped(context, kwargs, self):
            if isinstance(entry.spread_over, ContextParallel):
                return over_ranks.forward(
                    original, self, arguments_by_name(self, args, kwargs), context, entry.spread_over
                )
            raise UnsupportedFeatureError(
                "sequence parallelism",
                type(self).__name__,
                "Its state would have to pass from rank to rank. Use context_parallel for this model.",
            )
        rows, cached = packed_rows(context, padded=not _sees_later_tokens(type(self))), False
        if rows is None and context.tokens_after_padding and not for_attention:
            # Up to 5.16 padding runs into the tokens after it in a batch of one.
            by_name = arguments_by_name(self, args, kwargs)
            cached = layer_cache_of(by_name) is not None
            rows = padded_rows(context) if context.arguments.batch == 1 or not cached else None
        if rows is not None:
            arguments = arguments_by_name(self, args, kwargs)
            call = RowCall(original, self, arguments, context, rows, for_attention, keeps_cache=cached)
            if call.has_tokens():
                return call()
        elif "rg_lru" in self._modules and entry is not None:
            _require_padding_last(context, self)
        return original(self, *args, **kwargs)

    return forward


def _is_skipped(context: ForwardContext, kwargs: dict[str, Any], layer: nn.Module) -> bool:
    """Whether a call isn't spread: its caller says that every rank has all of its tokens. For a layer that sees token by token both are the same."""
    if is_unsplit():
        return True
    named = [name for name in SKIPS if name in context.arguments.names or name in kwargs]
    if named and is_tokenwise(layer):
        return True
    if any(name not in kwargs for name in named):
        raise UnsupportedFeatureError(
            f"{named[0]}=",
            type(layer).__name__,
            "Its model doesn't pass it on to it: use a name without context_parallel.",
        )
    return any(kwargs[name] for name in named)


def _sees_later_tokens(kind: type) -> bool:
    """Whether a token's output depends on later ones: Zamba2's and Nemotron-H's torch path up to 5.16 (transformers#47250)."""
    return kind.__module__.endswith((".modeling_zamba2", ".modeling_nemotron_h")) and hasattr(kind, "torch_forward")


def _require_padding_last(context: ForwardContext, module: nn.Module) -> None:
    """Refuse padding before a token, which RecurrentGemma's recurrence runs over as over tokens."""
    mask = context.arguments.mask
    if mask is None or context.arguments.length < 2:
        return
    last = memoised(mask, ("padding last",), (mask[:, 1:] <= mask[:, :-1]).all)
    if fixed_shapes(mask):
        torch._assert_async(last, "padding before the tokens of a recurrence that runs over it")
    elif not last:
        raise UnsupportedFeatureError("padding before tokens", type(module).__name__, "Pad on the right.")


class MixerPatches:
    """The forwards of mixers, replaced as models with such layers are made, and restored.

    The forward of a class is replaced, and that of a single layer that has its own: from accelerate's hooks, say, or from a
    kernel of the hub.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over_ranks = MixersOverRanks()
        self._is_attention: dict[type, bool] = {}  # of each class of layers to patch
        self._layers: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()
        #: Functions, each with its `Change` as an attribute: kept there and not here, because it refers to the layer.
        self._replacements: weakref.WeakSet[Any] = weakref.WeakSet()
        self._active = False

    def activate(self) -> Callable[[], list[Change]]:
        """Patch models from now on.

        Returns:
            The function that restores everything. It returns the changes of classes that other code has overwritten.
        """
        self._active = True
        self._over_ranks.activate()
        return self._undo

    def patch(self, model: nn.Module) -> None:
        """Replace the forwards of a model's mixers, and the forwards that other code has set on single layers since."""
        if not self._active:
            return
        layers = self._layers.get(model)
        if layers is None:
            with self._lock:
                layers = self._layers[model] = self._patch_classes(model)
        for layer in layers:
            own = vars(layer).get("forward")
            if own is not None and not self._is_patched(own):
                # A method, so that a copy of the layer calls its own.
                function = own.__func__ if getattr(own, "__self__", None) is layer else _unbound(own)
                with self._lock:
                    replacement = _by_sequence(function, self._is_attention[type(layer)], self._over_ranks)
                    self._replace(layer, replacement, MethodType(replacement, layer))

    def _patch_classes(self, model: nn.Module) -> weakref.WeakSet[nn.Module]:
        """Patch the classes of a model's mixers. Returns the layers of these classes."""
        modules = list(model.modules())
        mixers = {type(module) for module in modules if is_mixer(module)}
        attentions = {type(module) for module in modules if mixers and is_attention(module)} - mixers
        for kind in (mixers | attentions) - self._is_attention.keys():
            self._is_attention[kind] = kind in attentions
            if not self._is_patched(kind.forward):  # by inheritance, as FSDP2's classes
                replacement = _by_sequence(kind.forward, kind in attentions, self._over_ranks)
                self._replace(kind, replacement, replacement)
        return weakref.WeakSet(module for module in modules if type(module) in self._is_attention)

    def _is_patched(self, forward: Any) -> bool:
        """Whether a forward is one of the replacements, or wraps one."""
        return any(function in self._replacements for function in functions_beneath(forward))

    def _replace(self, owner: Any, replacement: Any, value: Callable[..., Any]) -> None:
        replacement.change = Change(owner, "forward", value)
        self._replacements.add(replacement)
        make([replacement.change])

    def _undo(self) -> list[Change]:
        with self._lock:
            self._active = False
            left = undo([replacement.change for replacement in self._replacements])
            # The ones that other code has overwritten: a later call restores them if they are in place again.
            self._replacements = weakref.WeakSet(r for r in self._replacements if r.change in left)
            self._is_attention.clear()
            self._layers.clear()
            left += self._over_ranks.undo()
            return [
                change for change in left if not isinstance(change.owner, nn.Module)
            ]  # a report must not keep layers alive


def _unbound(bound: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(bound)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs)

    return forward
