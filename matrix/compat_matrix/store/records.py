"""The values that the store returns."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Literal, NamedTuple

from ..cells import Cell
from ..results import Kind, Outcome, Verdict

#: The state of a cell in a run: its verdict, or why it has none. ``excluded``: the axes exclude it.
State = Literal["passed", "failed", "not run", "unfinished", "excluded"]


class Run(NamedTuple):
    """One run of a matrix.

    Attributes:
        id: such as ``20261121-114502-7f3a``, in UTC; sorts by time.
        state: ``running`` until `Store.finish`, also after the runner was killed.
        label, command, host, revision, partial: as in its `Provenance`.
    """

    id: str
    started: datetime
    finished: datetime | None
    state: str
    label: str
    command: str
    host: str
    revision: str
    partial: bool = False


class Provenance(NamedTuple):
    """The origin of a run.

    Attributes:
        axes: the text of the axes file.
        command: the command that runs it.
        label: a name for the run, which need not be unique.
        host: the machine that started it.
        revision: the tested commit.
        partial: whether its cells run less than their default suite.
    """

    axes: str = ""
    command: str = ""
    label: str = ""
    host: str = ""
    revision: str = ""
    partial: bool = False


class Summary(NamedTuple):
    """A cell in a run, without its tests and its log. If it has no verdict, only `reason` is meaningful.

    Attributes:
        attempt: the number of its latest attempt in this run, from 1; 0 without a result.
        seconds: the duration of that attempt.
    """

    verdict: Verdict | None = None
    kind: Kind | None = None
    reason: str = ""
    excluded: bool = False
    started: datetime | None = None
    seconds: float = 0.0
    attempt: int = 0
    passed: int = 0
    failed: int = 0
    error: int = 0
    skipped: int = 0
    xfailed: int = 0
    xpassed: int = 0

    @property
    def state(self) -> State:
        """The verdict; without one, ``excluded`` or ``unfinished``."""
        return self.verdict or ("excluded" if self.excluded else "unfinished")

    @property
    def counts(self) -> Mapping[Outcome, int]:
        """The number of tests by outcome."""
        return {
            "passed": self.passed,
            "failed": self.failed,
            "error": self.error,
            "skipped": self.skipped,
            "xfailed": self.xfailed,
            "xpassed": self.xpassed,
        }


class Past(NamedTuple):
    """The result of a cell in a run."""

    run: Run
    summary: Summary


class Newest(NamedTuple):
    """The newest result or plan of a cell in whole runs.

    Attributes:
        versions: the exact versions that it was run with, by axis; empty without a result.
    """

    cell: Cell
    past: Past
    versions: Mapping[str, str]
