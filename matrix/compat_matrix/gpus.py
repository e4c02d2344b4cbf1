"""Leases of GPUs: no two cells claim one device, in this process or in another on this machine."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
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
    with suppress(PermissionError):  # another user's, who did the same
        LOCKS.chmod(0o777)
    while count:
        with ExitStack() as held:
            found: list[str] = []
            for name in among:
                if len(found) == count:
                    break
                device = identity(name, _uuids()).replace("/", "_")
                lock = FileLock(LOCKS / f"{device}.lock", timeout=0, mode=0o666)
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


def identity(name: str, uuids: Sequence[str]) -> str:
    """The UUID of a device that is named by its index or the beginning of its UUID; the name where it is none of them."""
    if name.isdecimal() and int(name) < len(uuids):
        return uuids[int(name)]
    return next((uuid for uuid in uuids if uuid.startswith(name)), name)


@cache
def _uuids() -> tuple[str, ...]:
    """Those of this machine, in the order of their indices."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return tuple(str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles)
    finally:
        pynvml.nvmlShutdown()
