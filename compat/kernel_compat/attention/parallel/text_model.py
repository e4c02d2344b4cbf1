"""Models of images and sound: a call with the whole batch on every rank, whose text model gets the rank's slice.

The towers run whole, and their features replace tokens of the whole batch, as on one rank.
"""

from __future__ import annotations

from typing import Any

from ...errors import UnsupportedFeatureError
from ..forward_context import ForwardContext, UnsplitState, current_context
from ..roles import UNSPLIT
from .batch_slice import BatchSlice

__all__ = ["is_unsplit", "split_at_text_model"]


class _WholeBatch(UnsplitState):
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
            raise UnsupportedFeatureError(
                f"{', '.join(sorted(self.own.inputs))} of {type(model).__name__}",
                "context parallelism",
                "No model in it gets the tokens of the whole batch without them.",
            )


def is_unsplit() -> bool:
    """Whether the model's call in progress has the tokens of the whole batch on every rank, or those of a tower."""
    context = current_context()
    return context is not None and context.unsplit is not None


def split_at_text_model(
    arguments: dict[str, Any], outer: ForwardContext | None
) -> tuple[dict[str, Any] | None, UnsplitState | None]:
    """See `forward_context.Split`: of a call with what `ContextParallel.shard` returned, and of the calls in it."""
    own = arguments.get(UNSPLIT)
    if own is not None:
        return {name: value for name, value in arguments.items() if name != UNSPLIT}, _WholeBatch(own)
    whole = None if outer is None else outer.unsplit
    if isinstance(whole, _WholeBatch) and whole.own.covers(arguments):
        whole.is_split = True
        return whole.own.of(arguments), None
    return None, whole
