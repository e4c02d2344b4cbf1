"""Creates a worker for this machine from the options of a command."""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from .. import options as shared
from ..axes import Axes
from ..cells import parse
from ..errors import MatrixError
from ..fingerprint import of_axes
from ..runner import Executor, Local, default_root
from ..work import Job
from .client import Service
from .machine import describe
from .protocol import Leased
from .upload_queue import UploadQueue
from .worker import Worker

#: Seconds for which the project's fingerprint is reused.
_LOOK = 2.0


class Offer(NamedTuple):
    """The cells that a worker takes.

    Attributes:
        jobs: the number of cells at a time; the number of cores by default.
        labels: its labels, which cells may require.
        only: an expression that cells must match.
    """

    jobs: int | None = None
    labels: Sequence[str] = ()
    only: str | None = None


def worker(
    options: argparse.Namespace,
    axes: Axes,
    service: Service,
    at: str,
    note: Callable[[str], None],
    offer: Offer,
    *,
    executor: Executor | None = None,
    spool: Path | None = None,
) -> Worker:
    """A worker for this machine.

    Args:
        options: the parsed options of `options.add_environments`.
        at: the service's name; each service has its own upload queue.
        executor: runs the cells; this machine by default.
        spool: the folder of the upload queue; one in the cache folder by default.
    """
    project = _Project(axes)
    jobs = executor.jobs if executor is not None else offer.jobs or os.cpu_count() or 1
    machine, devices = describe(project(), jobs, offer.labels)
    folder = spool or (options.cache or default_root()) / "spool" / hashlib.sha256(at.encode()).hexdigest()[:12]

    def job(leased: Leased) -> Job:
        cell = parse(leased.cell)
        if axes.all_cells.get(cell, "no such cell"):
            raise MatrixError(f"{at} asks for {cell}, which {axes.path} doesn't have")
        asked = argparse.Namespace(**{**vars(options), "suite": leased.suite, "latest": False, "pytest": ""})
        (found,) = shared.jobs_of(asked, axes, [cell], {cell: leased.attempt - 1})
        return found

    return Worker(
        service,
        machine,
        executor or Local(jobs, devices, not options.no_fork),
        job,
        UploadQueue(folder),
        only=offer.only,
        fingerprint=project,
        note=note,
    )


class _Project:
    """The project's fingerprint, at most two seconds old."""

    def __init__(self, axes: Axes) -> None:
        self._axes = axes
        self._found, self._at = "", 0.0

    def __call__(self) -> str:
        if not self._found or time.monotonic() - self._at > _LOOK:
            self._found, self._at = of_axes(self._axes), time.monotonic()
        return self._found
