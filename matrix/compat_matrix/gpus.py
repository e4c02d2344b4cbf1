"""Leases of GPUs: no two cells claim one device, in this process or in another on this machine."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path

from filelock import FileLock, Timeout

from kernel_compat.environment import Environment

#: Where locks are; one place for every user of a machine that shares its temporary folder.
LOCKS = Path(tempfile.gettempdir()) / "kernel-compat-matrix-gpus"

#: Seconds between two looks for a free device.
_POLL = 0.5


def visible() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        # CUDA takes none from the first on that it doesn't know.
        return [*takewhile(lambda name: name not in ("", "-1"), (name.strip() for name in named.split(",")))]
    return [str(index) for index in range(len(Environment.detect().devices))]


@contextmanager
def leased(count: int, among: Sequence[str], cancelled: threading.Event | None = None) -> Iterator[list[str]]:
    """Hold so many of the GPUs, once they are free; none if the wait was cancelled.

    All or nothing: two cells which need two devices each never hold one each.
    """
    LOCKS.mkdir(parents=True, exist_ok=True)
    while count:
        with ExitStack() as held:
            found: list[str] = []
            for name in among:
                if len(found) == count:
                    break
                lock = FileLock(LOCKS / f"{name.replace('/', '_')}.lock", timeout=0, mode=0o666)
                try:
                    held.enter_context(lock)
                except Timeout:
                    continue
                found.append(name)
            if len(found) == count:
                yield found
                return
        if cancelled is None:
            threading.Event().wait(_POLL)
        elif cancelled.wait(_POLL):
            break
    yield []
