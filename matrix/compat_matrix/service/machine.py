"""The description of this machine that a worker sends."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from .. import __version__, gpus
from .protocol import Gpu, Machine

#: The files with a container's memory limit.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def describe(fingerprint: str, jobs: int, labels: Sequence[str]) -> tuple[Machine, list[str]]:
    """The description of this machine, and the names of its GPUs for `runner.Local`."""
    found = _gpus()
    name = re.sub(r"[^A-Za-z0-9._:-]+", "-", platform.node()).strip("-._:")[:80] or "worker"
    machine = Machine(
        name=f"{name}-{os.getpid()}",
        version=__version__,
        fingerprint=fingerprint,
        gpus=[*found.values()],
        memory=_memory(),
        labels=[*labels],
        jobs=jobs,
    )
    return machine, [*found]


def _memory() -> float:
    """The memory of the machine or of its container, in GiB."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        try:
            most = min(most, int(path.read_text()))
        except (OSError, ValueError):  # no such limit
            continue
    return most / 2**30


def _gpus() -> dict[str, Gpu]:
    """The visible GPUs, by their names in CUDA_VISIBLE_DEVICES."""
    import pynvml

    names = gpus.visible()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        found = {}
        for name in names:
            uuid = gpus.identity(name, uuids)
            if uuid in uuids:
                handle = handles[uuids.index(uuid)]
                major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30
                label = re.sub(r"[^ -~]", "?", str(pynvml.nvmlDeviceGetName(handle)))[:200]
                found[name] = Gpu(name=label, capability=f"{major}.{minor}", memory=memory)
        return found
    finally:
        pynvml.nvmlShutdown()
