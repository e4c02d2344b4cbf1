"""What a service is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Settings:
    """Of one service. Rates are kept in the memory of each process.

    Attributes:
        read: who may read: all, or who has a token of any scope.
        pins: where those of the cells are; a run is refused whose cells have none. Not looked at if None.
        lease_seconds: how long a worker has a cell without a sign of life.
        tries: leases of a cell that may be lost before it has failed: it seems to kill what runs it. More where others lose
            theirs too.
        log_bytes: of a longer log the beginning and the end are kept, half of it each.
        upload_bytes: a longer log is refused.
        writes_per_minute, submissions_per_minute: of one token.
        failures_per_minute: wrong tokens from one address that are told so; others are told to wait.
        root_path: under which a proxy has the service, such as /matrix.
    """

    read: Literal["open", "token"] = "open"
    pins: Path | None = None
    lease_seconds: float = 60.0
    tries: int = 3
    log_bytes: int = 8 * 2**20
    upload_bytes: int = 2**30
    writes_per_minute: int = 30_000
    submissions_per_minute: int = 60
    failures_per_minute: int = 30
    root_path: str = ""
