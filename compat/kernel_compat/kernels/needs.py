"""The needs of one attention call or layer, and why a kernel doesn't meet them. Imports no torch."""

from __future__ import annotations

from typing import Any, NamedTuple

from .provider import Features

__all__ = ["Needs", "is_open", "unmet"]


class Needs(NamedTuple):
    """What a call of attention needs of a kernel.

    Attributes:
        head_dim, value_dim: the head dimensions of query and value.
        dtype: the name of the inputs' torch dtype; empty for one that isn't known yet.
        device: the inputs' torch device type.
        features: names of the `Features` that it needs, besides causal masks.
        page_size: the tokens of a page of the cache; 0 for no paged cache.
    """

    head_dim: int
    value_dim: int
    dtype: str
    device: str
    features: frozenset[str]
    page_size: int = 0

    def __str__(self) -> str:
        dims = f"head dimensions {self.head_dim} and {self.value_dim}"
        return ", ".join([f"a call on {self.device} in {self.dtype}", dims, *map(Features.word, sorted(self.features))])


def is_open(causal: bool, window: tuple[int | None, int | None], longest: tuple[Any, Any]) -> bool:
    """Whether a call has a window without a limit to the right over more queries than keys.

    Args:
        longest: the lengths of the longest sequences of query and key.
    """
    left, right = (-1 if side is None else side for side in window)
    # A limit at the number of keys hides nothing from one query more.
    return not causal and left >= 0 and right < 0 and int(longest[0]) > int(longest[1]) + 1


def unmet(features: Features, needs: Needs) -> str:
    """Why a kernel with these features can't compute a call, in a few words; empty if it can."""
    if needs.device not in features.devices:
        return f"no {needs.device}"
    if needs.dtype and needs.dtype not in features.dtypes:
        return f"no {needs.dtype}"
    largest, dims = features.max_head_dim, (needs.head_dim, needs.value_dim)
    pair = features.pair(*dims)
    if needs.value_dim > needs.head_dim and not (features.value_head_dim and largest is None):
        return f"no head dimensions {dims}"
    if largest is not None and needs.head_dim > largest and pair is None:
        return f"no head dimension {needs.head_dim}" if dims[0] == dims[1] else f"no head dimensions {dims}"
    if "backward" in needs.features and needs.device in features.no_backward_on:
        return f"no gradients on {needs.device}"
    lacking = features.lacking(needs.features) or features.lacking_with(pair, needs.features)
    return ", ".join(f"no {one}" for one in lacking)
