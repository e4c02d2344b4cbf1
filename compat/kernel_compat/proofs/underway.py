"""Whether this thread builds models in order to prove them, which then need no proof."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["is_proving", "nothing_to_prove"]

_proving: ContextVar[bool] = ContextVar("proving", default=False)


def is_proving() -> bool:
    """Whether this thread is in a block of `nothing_to_prove`."""
    return _proving.get()


@contextmanager
def nothing_to_prove() -> Iterator[None]:
    """Models that this thread builds in the block pass `require_proof`: they are built to be proven."""
    token = _proving.set(True)
    try:
        yield
    finally:
        _proving.reset(token)
