"""The newest result of every cell, kept in memory until the store changes."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from ..cells import Cell
from ..store import Past, Run, Store
from . import reading


class Picture(NamedTuple):
    """What was known at one moment.

    Attributes:
        version: another one whenever anything else is another, and after a restart.
        cells: of whole runs, as `Store.current` has them.
        open: cells without a result in a run that goes on and is newer than their newest result, by that run.
        runs: all of them, the newest first.
        made: what others made of it, and keep as long as it.
    """

    version: str
    cells: Mapping[Cell, Past]
    open: Mapping[Cell, Run]
    runs: list[Run]
    made: dict[object, bytes]


class Board:
    """Threads may share one.

    Args:
        busy: the part of the time that reading may take where results come all the time.
    """

    def __init__(self, store: Store, busy: float = 0.2) -> None:
        self._store, self._busy = store, busy
        self._lock = threading.Lock()
        self._name = secrets.token_hex(4)
        self._picture = Picture("", {}, {}, [], {})
        self._until = 0.0

    def look(self) -> Picture:
        """While one thread reads, others get what was known before.

        Raises:
            MatrixError: the database is gone.
        """
        if not self._lock.acquire(blocking=not self._picture.version):
            return self._picture
        try:
            if (began := time.monotonic()) < self._until:
                return self._picture
            version = f"{self._name}-{reading.version(self._store)}"
            if version != self._picture.version:
                cells = reading.newest(self._store, reading.cells(self._store))
                self._picture = Picture(version, cells, self._waiting(cells), self._store.runs(), {})
            self._until = time.monotonic() + (time.monotonic() - began) * (1 / self._busy - 1)
            return self._picture
        finally:
            self._lock.release()

    def _waiting(self, cells: Mapping[Cell, Past]) -> dict[Cell, Run]:
        waiting: dict[Cell, Run] = {}
        for cell, run in reading.unfinished(self._store):  # of several runs, the newest
            shown = cells.get(cell)
            if shown is None or shown.run.id == run.id or shown.run.started < run.started:
                waiting.setdefault(cell, run)
        return waiting
