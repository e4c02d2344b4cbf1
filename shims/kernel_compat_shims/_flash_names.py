"""Shared by the shims of frameworks that compare attention names with lists of their own."""

from __future__ import annotations

from kernel_compat.attention.defaults import resolve

__all__ = ["CountsAsFlash", "has_varlen_kernel"]


def has_varlen_kernel(name: object) -> bool:
    """Whether it is a registered name whose kernel computes packed sequences."""
    entry = resolve(name)
    return entry is not None and entry.kernel.features.varlen


class CountsAsFlash(str):
    """A name that also equals ``"flash_attention_2"``, and finds its own entry in a dict.

    For functions that look their argument up in a list that they make themselves.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "flash_attention_2" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__
