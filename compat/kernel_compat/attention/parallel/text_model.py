"""Models of images and sound, and with an encoder: a call with the whole batch on every rank, whose text model gets the rank's slice.

Towers and encoders run whole. The features of towers replace tokens of the whole batch, as on one rank, and a decoder attends from its
slice to all states of the encoder.
"""

from __future__ import annotations

import dis
import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from ..forward_context import BatchState, ForwardContext, current_context
from ..layer_kinds import code_names
from ..model_arguments import parameter_names
from ..roles import (
    CAUSALITY,
    CROSS_ATTENTION,
    DECODER_EMBEDDINGS,
    DECODER_MASK,
    DECODER_TOKENS,
    DEFAULT_MASK,
    EMBEDDINGS,
    ENCODER_STATES,
    MASK,
    PADDING_TOKEN,
    POSITIONS,
    SHIFT,
    START_TOKEN,
    TOKENS,
    UNSPLIT,
)
from ..tensors import constant
from .batch_slice import OF_LABELS, BatchSlice
from .checks import unspread, without_positions

__all__ = ["attends_to_encoder", "is_beside_encoder", "is_unsplit", "split_at_text_model"]


class _WholeBatch(BatchState):
    """A batch that a call got whole.

    Attributes:
        own: this rank's slice.
        is_split: whether a text model has got the slice.
    """

    def __init__(self, own: BatchSlice) -> None:
        self.own, self.is_split = own, False

    def close(self, model: Any) -> None:
        """Check that a text model has got the slice; raises UnsupportedFeatureError if not."""
        if not self.is_split:
            inputs = self.own.inputs or {DECODER_TOKENS.named()}
            raise unspread(
                f"{', '.join(sorted(inputs))} of {type(model).__name__}",
                "No model in it gets the tokens of the whole batch without them.",
            )


class _EncoderStates(BatchState):
    """States of an encoder, all of them, in a call that gets a slice of the tokens.

    Attributes:
        number: of states, those of all rows together.
    """

    is_whole = False

    def __init__(self, states: Tensor) -> None:
        self.number = states.shape[:-1].numel()


def _state() -> BatchState | None:
    context = current_context()
    return None if context is None else context.batch_state


def is_unsplit() -> bool:
    """Whether the model's call in progress has the tokens of the whole batch on every rank, or those of a tower or an encoder."""
    state = _state()
    return state is not None and state.is_whole


def is_beside_encoder() -> bool:
    """Whether the model's call in progress has a slice of the tokens, and all states of an encoder."""
    return isinstance(_state(), _EncoderStates)


def attends_to_encoder(module: Any, key: Tensor) -> bool:
    """Whether a layer's attention is to all states of an encoder: its forward takes such states, and it isn't causal.

    Args:
        key: (batch, heads, length, head_dim).

    Raises:
        UnsupportedFeatureError: it has other keys than these states, or it is causal.
    """
    state = _state()
    if not isinstance(state, _EncoderStates):
        return False
    is_causal = bool(CAUSALITY.attribute_of(module))
    if is_causal and not CROSS_ATTENTION.attribute_of(module):
        return False
    if (
        is_causal
        or ENCODER_STATES.spelled(parameter_names(type(module))) is None
        or key.shape[0] * key.shape[2] != state.number
    ):
        raise unspread(
            f"{type(module).__name__} beside the states of an encoder",
            "It attends to other keys than these states or a token's own, or it is causal: use another name for this model.",
        )
    return True


def split_at_text_model(
    model: Any, arguments: dict[str, Any], outer: ForwardContext | None
) -> tuple[dict[str, Any] | None, BatchState | None]:
    """See `forward_context.Split`: of a call with what `ContextParallel.shard` returned, and of the calls in it.

    Raises:
        UnsupportedFeatureError: its decoder can't get a slice of its tokens.
    """
    own, changed = arguments.get(UNSPLIT), None
    state = None if outer is None else outer.batch_state
    if own is not None:
        changed = {name: value for name, value in arguments.items() if name != UNSPLIT}
        arguments = changed = changed | _tokens_of_labels(model, changed, own)
        state = _WholeBatch(own)
    if not isinstance(state, _WholeBatch) or not state.own.covers(arguments):
        return changed, state
    states = ENCODER_STATES.of(arguments)
    if state.own.decoder is not None and POSITIONS.spelled(parameter_names(type(model))) is None:
        raise without_positions()
    state.is_split = True
    return _sliced(model, arguments, state.own), None if states is None else _EncoderStates(states)


def _sliced(model: Any, arguments: dict[str, Any], own: BatchSlice) -> dict[str, Any]:
    """The arguments of a text model for the slice. Labels among them are the slice's already."""
    labels = {name: value for name, value in arguments.items() if name in OF_LABELS}
    rest = {name: value for name, value in arguments.items() if name not in OF_LABELS}
    kind: type = type(model)
    if own.decoder is None or DEFAULT_MASK not in code_names(kind):
        return own.of(rest) | labels
    ids = TOKENS.of(arguments)
    if MASK.of(arguments) is None and ids is not None:
        rest[MASK.named()] = ids != getattr(model.config, PADDING_TOKEN)
    sliced = own.of(rest)
    tokens = EMBEDDINGS.of(sliced) if ids is None else TOKENS.of(sliced)
    # Of the slice's tokens the model would make one that says nothing of the others'.
    return sliced | labels | {MASK.named(): torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)}


def _tokens_of_labels(model: Any, arguments: dict[str, Any], own: BatchSlice) -> dict[str, Any]:
    """The tokens of a decoder that a model makes of the whole batch's labels, if the call has none.

    Raises:
        UnsupportedFeatureError: nothing says how it does.
    """
    has_tokens = any(role.of(arguments) is not None for role in (DECODER_TOKENS, DECODER_EMBEDDINGS))
    if own.decoder is None or own.decoder.labels is None or has_tokens:
        return {}
    labels, (method, function) = own.decoder.labels, SHIFT
    if (shift := getattr(model, method, None)) is not None:
        tokens = shift(labels)
    elif (shift := vars(sys.modules[type(model).__module__]).get(function)) is not None:
        tokens = shift(labels, getattr(model.config, PADDING_TOKEN), getattr(model.config, START_TOKEN))
    kind: type = type(model)
    if shift is None or _masks_padding(kind):
        raise unspread(
            f"labels without {DECODER_TOKENS.named()}, of which {type(model).__name__} would make them",
            f"Pass {DECODER_TOKENS.named()} to ContextParallel.shard, and {DECODER_MASK.named()} if there is padding.",
        )
    return {DECODER_TOKENS.named(): tokens}


@constant
def _masks_padding(kind: type) -> bool:
    """Whether a model makes a mask for its decoder, too, with the tokens."""
    code = inspect.unwrap(kind.forward).__code__  # type: ignore[attr-defined]
    return any(
        step.opname == "STORE_FAST" and step.argval in DECODER_MASK.spellings for step in dis.get_instructions(code)
    )
