"""The handle of a patch that can be undone."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Handle"]


class Handle:
    """Undoes one patch: by `undo()`, or at the end of a ``with`` block.

    Args:
        undo: restores the values that are still ours; returns whether other code has overwritten some.
    """

    def __init__(self, undo: Callable[[], bool | None]) -> None:
        self._undo: Callable[[], bool | None] | None = undo
        self._lock = threading.RLock()
        #: Whether `undo` hasn't been called yet.
        self.active = True

    def undo(self) -> None:
        """Undo the patch. A value that other code has overwritten stays theirs; a later call restores it if ours is back by then."""
        with self._lock:
            self.active = False
            if self._undo is not None and not self._undo():
                self._undo = None

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()
