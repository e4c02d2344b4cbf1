"""The settings of a service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Settings:
    """The settings of one service. Rate limits are counted in each process separately.

    Attributes:
        read: who may read: everyone, or only holders of a token of any scope.
        runs: whether runs can be submitted; they are executed by this service or another one on the same database.
        upload_bytes: the size of the largest store that may be uploaded.
        writes_per_minute: a limit for each token.
        failures_per_minute: wrong tokens from one address that get a 401; further ones get a 429.
        root_path: the path at which a proxy serves the service, such as /matrix.
    """

    read: Literal["open", "token"] = "open"
    runs: bool = True
    upload_bytes: int = 2**30
    writes_per_minute: int = 120
    failures_per_minute: int = 30
    root_path: str = ""
