"""Waiting for events: a test fails by its clock only if something hangs."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds, for whatever ends by itself. The longest wait took 70 s beside ten busy processes on two cores, 30 s of them a service's
#: silence.
LONG = 300.0


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition, which says at once, by an error, if it can't become true any more."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, f"in {LONG:.0f} s there was not {what}"
        time.sleep(0.05)
