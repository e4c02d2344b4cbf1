"""Leases of GPUs, whole or in shares, across all processes on this machine."""

import os
import random
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from itertools import takewhile
from pathlib import Path

from filelock import FileLock, Timeout

#: Into how many shares a GPU is divided; each has a lock.
SHARES = 16

#: The folder of the locks, shared by all users of the machine's temporary folder.
LOCKS = Path(tempfile.gettempdir()) / "kernel-compat-matrix-gpus"


def visible() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        # CUDA ignores everything from the first unknown entry on.
        return [*takewhile(lambda name: name not in ("", "-1"), (name.strip() for name in named.split(",")))]
    return [str(index) for index in range(len(_uuids()))]


@contextmanager
def leased(count: float, among: Sequence[str], cancelled: threading.Event | None = None) -> Iterator[list[str]]:
    """Wait until a number of the GPUs is free, or that share of one, and lease them; no GPU if the wait was cancelled.

    All or none are leased: two cells that need two devices each never hold one each.
    """
    LOCKS.mkdir(parents=True, exist_ok=True)
    with suppress(PermissionError):  # owned by another user who created it
        LOCKS.chmod(0o777)
    while count:
        with ExitStack() as held:
            # Cells that share GPUs spread over them.
            order = among if count >= 1 else random.sample(among, len(among))
            found: list[str] = []
            for name in order:
                if _takes(held, identity(name, _uuids()).replace("/", "_"), round(min(count, 1) * SHARES)):
                    found.append(name)
                if len(found) == max(count, 1):
                    yield found
                    return
        if (cancelled or threading.Event()).wait(0.5):
            break
    yield []


def _takes(held: ExitStack, device: str, shares: int) -> bool:
    """Take this many of a device's shares until `held` is closed, or none."""
    with ExitStack() as taken:
        for n in range(SHARES):
            with suppress(Timeout):
                taken.enter_context(FileLock(LOCKS / f"{device}.{n}.lock", timeout=0, mode=0o666))
                shares -= 1
            if not shares:
                held.push(taken.pop_all())
                return True
            if shares > SHARES - n - 1:
                break
    return False


def identity(name: str, uuids: Sequence[str]) -> str:
    """The UUID of a device given by its index or the beginning of its UUID; the name itself if it matches none."""
    if name.isdecimal() and int(name) < len(uuids):
        return uuids[int(name)]
    return next((uuid for uuid in uuids if uuid.startswith(name)), name)


@cache
def _uuids() -> tuple[str, ...]:
    """The UUIDs of this machine's devices, in the order of their indices."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return tuple(str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles)
    except pynvml.NVMLError:
        return ()
