"""The handle of a patch that can be undone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

__all__ = ["Handle"]


class Handle:
    """Undoes one patch: by `undo()`, or at the end of a ``with`` block."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo
        self._lock = threading.Lock()

    @property
    def active(self) -> bool:
        """Whether `undo` hasn't been called yet."""
        return self._undo is not None

    def undo(self) -> None:
        """Undo the patch; a second call does nothing."""
        with self._lock:
            undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()
