"""Threads beside the work of a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def beside(work: Callable[[threading.Event], object], name: str, *, daemon: bool = False) -> Iterator[None]:
    """Run a function in a thread, and wait for its end when the block is left.

    Args:
        work: called with an event that is set then.
    """
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name, daemon=daemon)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
