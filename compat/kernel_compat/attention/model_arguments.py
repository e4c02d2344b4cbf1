"""The arguments of one call of a model that its attention layers need. Models pass less on to their layers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .call import PackedLengths
from .roles import (
    COMPILEABLE,
    EMBEDDINGS,
    ENCODER_ARGUMENTS,
    ENCODER_DECODER,
    IMPLEMENTATION,
    LENGTHS,
    MASK,
    POSITIONS,
    TOKENS,
    cache_of,
)
from .tensors import constant

__all__ = ["ModelArguments", "arguments_by_name", "parameter_names", "without_lengths"]


@dataclass(frozen=True, eq=False)
class ModelArguments:
    """The arguments of one model call. Those that it did not get are the enclosing call's, if both are over the same tokens.

    Attributes:
        names: of its arguments, and of the outer calls'.
        ids, embeddings: ``input_ids`` and ``inputs_embeds``.
        batch, length: of these; 0 if the model gets neither, as a vision tower.
        implementation: the model's ``attn_implementation``.
        is_encoder_decoder: whether the model has an encoder beside its decoder.
        tokens_only: whether the tokens are the model's only input, so that every attention layer of its own is over them.
        has_encoder_states: whether the model gets the states of an encoder.
        takes_positions: whether the model's forward has a parameter ``position_ids``. Without one, positions count on along
            the whole row.
        drops_positions: whether a model around this one got ``position_ids`` and passed none on to it, which takes some.
        mask: the 2D ``attention_mask``.
        has_4d_mask: whether ``attention_mask`` is 4D. Position ids don't add packed sequences to such a mask.
        masks_by_layer_type: whether ``attention_mask`` is a dict of masks, as `generate` makes them before the call.
        positions: the ``position_ids``.
        computed_positions: whether the model around this one computed the ``position_ids`` that this one got: `positions` are those
            that the outer one got then. M-RoPE's rows, computed from images, don't separate packed sequences.
        cache: the KV cache.
        lengths: the ``cu_seq_lens_*`` and ``max_length_*``.
    """

    batch: int
    length: int
    implementation: Any
    tokens_only: bool
    takes_positions: bool
    lengths: PackedLengths | None
    names: tuple[str, ...] = ()
    ids: Any = None
    embeddings: Any = None
    is_encoder_decoder: bool = False
    has_encoder_states: bool = False
    drops_positions: bool = False
    mask: Tensor | None = None
    has_4d_mask: bool = False
    masks_by_layer_type: bool = False
    positions: Tensor | None = None
    computed_positions: bool = False
    cache: Any = None

    @classmethod
    def of(cls, model: Any, arguments: Mapping[str, Any], outer: ModelArguments | None) -> ModelArguments:
        """The arguments of a call.

        Args:
            arguments: by name.
            outer: those of the call around it.
        """
        ids, embeddings = TOKENS.of(arguments), EMBEDDINGS.of(arguments)
        tokens = embeddings if ids is None else ids
        sized = isinstance(tokens, Tensor) and tokens.ndim == (2 if ids is not None else 3)
        batch, length = (tokens.shape[0], tokens.shape[1]) if sized else (0, 0)
        config = getattr(model, "config", None)
        tokens_only, has_encoder_states = sized, False
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.is_floating_point() and name not in EMBEDDINGS.spellings:
                if name.startswith(ENCODER_ARGUMENTS):
                    has_encoder_states = True
                elif value.ndim > 2 and name not in MASK.spellings:
                    tokens_only = False
        masks = MASK.of(arguments)
        if by_type := isinstance(masks, dict):
            masks = min((m for m in masks.values() if isinstance(m, Tensor)), key=lambda m: m.ndim, default=None)
        mask: Tensor | None = masks if isinstance(masks, Tensor) and masks.ndim == 2 else None
        has_4d_mask = isinstance(masks, Tensor) and masks.ndim == 4
        positions = POSITIONS.of(arguments)
        positions = positions if isinstance(positions, Tensor) else None
        takes_positions = POSITIONS.spelled(parameter_names(type(model))) is not None
        cache, lengths = cache_of(arguments), PackedLengths.of(arguments)
        computed_positions = drops_positions = False
        if outer is not None and _same_tokens(ids, embeddings, (batch, length), outer):
            mask = outer.mask if mask is None else mask
            if positions is not None and positions.ndim == 3:
                computed_positions = outer.positions is None and outer.takes_positions
            drops = takes_positions and positions is None and outer.positions is not None
            drops_positions = drops or outer.drops_positions
            positions = outer.positions if positions is None or computed_positions else positions
            lengths = lengths or outer.lengths
            cache = outer.cache if cache is None else cache
            tokens_only = tokens_only and (outer.tokens_only or ids is None)
            takes_positions = takes_positions or outer.takes_positions
            has_4d_mask = has_4d_mask and outer.has_4d_mask  # if not, the outer model made it
        return cls(
            batch=batch,
            length=length,
            implementation=IMPLEMENTATION.attribute_of(config),
            tokens_only=tokens_only,
            takes_positions=takes_positions,
            lengths=lengths,
            names=(*arguments, *(() if outer is None else outer.names)),
            ids=ids,
            embeddings=embeddings,
            is_encoder_decoder=bool(ENCODER_DECODER.attribute_of(config)),
            has_encoder_states=has_encoder_states,
            drops_positions=drops_positions,
            mask=mask,
            has_4d_mask=has_4d_mask,
            masks_by_layer_type=by_type,
            positions=positions,
            computed_positions=computed_positions,
            cache=cache,
        )

    def has_tokens_of(self, outer: ModelArguments) -> bool:
        """Whether the tokens are the outer call's, as in a language model within its head."""
        return _same_tokens(self.ids, self.embeddings, (self.batch, self.length), outer)

    @property
    def static_without_mask(self) -> bool:
        """Whether the cache is static and the call has no dict of masks, which would say where the keys end."""
        return not self.masks_by_layer_type and bool(COMPILEABLE.attribute_of(self.cache))

    @property
    def offsets(self) -> Tensor | None:
        """The ``cu_seq_lens_q``."""
        return None if self.lengths is None else self.lengths.offsets_q


def _same_tokens(ids: Any, embeddings: Any, sizes: tuple[int, int], outer: ModelArguments) -> bool:
    if not sizes[1] or sizes != (outer.batch, outer.length):
        return False
    if ids is not None:
        return ids is outer.ids
    return embeddings is outer.embeddings or not outer.is_encoder_decoder


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


def without_lengths(module: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a module's forward, without the lengths of packed sequences where it takes none: Whisper's decoder up to 4.57."""
    if _takes_any(type(module)):
        return arguments
    names = {spelling for role in LENGTHS for spelling in role.spellings}.difference(parameter_names(type(module)))
    return {name: value for name, value in arguments.items() if name not in names}


@constant
def _takes_any(module: type) -> bool:
    """Whether a module's forward takes keywords of any name."""
    parameters = inspect.signature(module.forward).parameters.values()  # type: ignore[attr-defined]
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
