"""The settings of a service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Settings:
    """The settings of one service. Rate limits are counted in each process separately.

    Attributes:
        read: who may read: everyone, or only holders of a token of any scope.
        pins: the folder of the cells' pins; a run with cells that have none is refused. None turns this check off.
        lease_seconds: the duration of a lease that isn't renewed.
        tries: the number of lost leases after which a cell has failed, as it seems to kill its workers. More if other cells
            lose theirs too.
        log_bytes: the part of a log that is kept: half of it at the beginning, half at the end.
        upload_bytes: a longer log is refused.
        writes_per_minute, submissions_per_minute: limits for each token.
        failures_per_minute: wrong tokens from one address that get a 401; further ones get a 429.
        root_path: the path at which a proxy serves the service, such as /matrix.
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
