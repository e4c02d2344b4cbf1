"""Waiting for events: a test fails by its clock only if something hangs."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds, for whatever ends by itself. Beside thirteen busy processes on two cores the longest test of the service takes 76 s, 30 of
#: them the silence of one that was killed.
LONG = 600.0


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition, which says at once, by an error, if it can't become true any more."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, f"in {LONG:.0f} s there was not {what}"
        time.sleep(0.05)
