"""Shared by the shims of frameworks that compare attention names with lists of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kernel_compat.attention.defaults import resolve

__all__ = ["FlashNames", "check_of", "has_varlen_kernel"]


def has_varlen_kernel(name: object) -> bool:
    """Whether it is a registered name that computes packed sequences."""
    entry = resolve(name)
    return entry is not None and entry.supported.varlen


class FlashNames(set[str]):
    """A framework's set of names; contains registered names as well, which may come and go."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or has_varlen_kernel(name)


def check_of(
    attribute: str, default: Callable[[], object] = lambda: None
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Makes a method's replacement that lets registered names pass, of a method that does nothing with the name but check it.

    Args:
        attribute: the attribute of the object that has the name.
        default: returns the name that the method takes where the attribute is None.
    """

    def replacement_of(original: Callable[[Any], None]) -> Callable[[Any], None]:
        @wraps(original)
        def check(self: Any) -> None:
            name = getattr(self, attribute)
            if name is None:
                name = default()
            if not has_varlen_kernel(name):
                return original(self)
            setattr(self, attribute, "flash_attention_2")
            try:
                original(self)
            finally:
                setattr(self, attribute, name)

        return check

    return replacement_of
