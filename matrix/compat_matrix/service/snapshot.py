"""The newest result of every cell, kept in memory until the store changes."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from ..cells import Cell
from ..store import Past, Run, Store
from . import queries


class Snapshot(NamedTuple):
    """The state of the store at one moment.

    Attributes:
        version: an identifier that differs after every change of the store and after a restart.
        cells: the newest result of every cell in whole runs, as `Store.current` returns them.
        open: for each cell that has no result yet in an unfinished run newer than its newest result, that run.
        runs: all runs, newest first.
        made: responses computed from this snapshot; they are dropped together with it.
    """

    version: str
    cells: Mapping[Cell, Past]
    open: Mapping[Cell, Run]
    runs: list[Run]
    made: dict[object, bytes]


class SnapshotCache:
    """Returns the current `Snapshot` and reads the store again only after it has changed. Thread-safe.

    Args:
        busy: the largest share of the time that may be spent reading while results arrive continuously.
    """

    def __init__(self, store: Store, busy: float = 0.2) -> None:
        self._store, self._busy = store, busy
        self._lock = threading.Lock()
        self._name = secrets.token_hex(4)
        self._snapshot = Snapshot("", {}, {}, [], {})
        self._until = 0.0

    def current(self) -> Snapshot:
        """The current snapshot; the previous one while another thread is reading the store.

        Raises:
            MatrixError: the database can't be reached.
        """
        if not self._lock.acquire(blocking=not self._snapshot.version):
            return self._snapshot
        try:
            if (began := time.monotonic()) < self._until:
                return self._snapshot
            version = f"{self._name}-{queries.version(self._store)}"
            if version != self._snapshot.version:
                cells = queries.newest(self._store, queries.cells(self._store))
                self._snapshot = Snapshot(version, cells, self._waiting(cells), self._store.runs(), {})
            self._until = time.monotonic() + (time.monotonic() - began) * (1 / self._busy - 1)
            return self._snapshot
        finally:
            self._lock.release()

    def _waiting(self, cells: Mapping[Cell, Past]) -> dict[Cell, Run]:
        waiting: dict[Cell, Run] = {}
        for cell, run in queries.unfinished(self._store):  # of several runs, the newest
            shown = cells.get(cell)
            if shown is None or shown.run.id == run.id or shown.run.started < run.started:
                waiting.setdefault(cell, run)
        return waiting
