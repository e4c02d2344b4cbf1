"""What is known of a cell that has run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from .cells import Cell

#: ``not run``: the machine lacks what the cell needs.
Verdict = Literal["passed", "failed", "not run"]

#: Why a cell failed, the most telling first: one that couldn't be installed has no tests, and one whose seams changed fails
#: many. ``test`` is a test that failed for none of the other reasons.
Kind = Literal["hardware", "installation", "import", "seam", "crash", "timeout", "wrong", "test"]

Outcome = Literal["passed", "failed", "error", "skipped", "xfailed", "xpassed"]


@dataclass(frozen=True)
class Test:
    """One test's outcome.

    Attributes:
        nodeid: pytest's name of it, relative to the project.
        seconds: set-up, call and tear-down together.
        message: the failure's report or the reason of a skip; empty for what passed.
    """

    __test__ = False  # pytest collects classes called Test

    nodeid: str
    outcome: Outcome
    seconds: float
    message: str = ""


@dataclass(frozen=True)
class CellResult:
    """What one run of a cell gave.

    Attributes:
        cell: which.
        verdict, kind, reason: how it ended; `kind` is None and `reason` empty for what passed.
        tests: every test that reported, in their order.
        started: with a time zone.
        seconds: from the start of its installation to its end.
        environment: what the cell said of itself: ``packages`` (name to version), ``device``, ``driver``, ``python``,
            ``shims`` (name to state, reason and seams). Empty where it died before.
        pins: the text of its requirement files.
        command: what ran the tests, as arguments.
        log: everything it printed.
        attempt: 1 for the first in its run.
    """

    cell: Cell
    verdict: Verdict
    kind: Kind | None
    reason: str
    started: datetime
    seconds: float
    tests: tuple[Test, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    pins: str = ""
    command: tuple[str, ...] = ()
    log: str = ""
    attempt: int = 1
