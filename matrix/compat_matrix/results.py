"""The result of a cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from .cells import Cell

#: ``flaky``: a test failed and passed when it was repeated. ``known``: tests fail, all of them for issues in the axes file.
#: ``not run``: the machine lacks what the cell needs.
Verdict = Literal["passed", "flaky", "known", "failed", "not run"]

#: The verdicts of a cell whose tests ran, best first.
ENDED: tuple[Verdict, ...] = ("passed", "flaky", "known", "failed")

#: Those that don't fail a run.
FINE = ENDED[:3]

#: The kinds of failure, the most specific first: a cell that couldn't be installed has no tests, and one whose seams changed
#: fails many tests. ``stale`` is an entry for a known failure that has run out or isn't needed any more. ``test`` is a failed test
#: for none of the other reasons.
Kind = Literal["hardware", "installation", "import", "seam", "crash", "timeout", "wrong", "stale", "test"]

#: ``flaky`` and ``known``: as in `Verdict`.
Outcome = Literal["passed", "failed", "error", "skipped", "xfailed", "xpassed", "flaky", "known"]

Better = Literal["lower", "higher"]

#: Limits are for results from elsewhere, which `store.foreign` checks.
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Figure(NamedTuple):
    """A number that a test measured. Its name is unique in a cell; values in different units aren't compared."""

    name: str
    value: float
    unit: str = ""
    better: Better | None = None


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!r} has characters that can't be printed")
    return text


class Recorded(BaseModel):
    """A figure as a test records it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_printable)]
    value: Annotated[float, Field(allow_inf_nan=False)]
    unit: Annotated[str, Field(max_length=40), AfterValidator(_printable)]
    better: Better | None = "lower"


@dataclass(frozen=True)
class Test:
    """One test's outcome.

    Attributes:
        seconds: the time of setup, call and teardown together.
        message: the report of a failure or the reason of a skip; empty for a test that passed.
    """

    __test__ = False  # pytest collects classes called Test

    nodeid: str
    outcome: Outcome
    seconds: Seconds
    message: str = ""
    figures: tuple[Figure, ...] = ()

    @property
    def bad(self) -> bool:
        """Whether it fails the cell."""
        return self.outcome in ("failed", "error")


@dataclass(frozen=True)
class CellResult:
    """The result of one attempt at a cell.

    Attributes:
        kind, reason: None and empty if it passed.
        started: with a time zone.
        seconds: the time from the start of its installation to its end.
        tests: every test that reported, in order.
        environment: the cell's report on itself: ``packages`` (version by name), ``device``, ``driver``, ``python``,
            ``shims`` (state, reason and seams by name). Empty if it died before reporting.
        pins: the text of its requirement files.
        attempt: 1 for the first in its run.
    """

    cell: Cell
    verdict: Verdict
    kind: Kind | None
    reason: str
    started: datetime
    seconds: Seconds
    tests: tuple[Test, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    pins: str = ""
    command: tuple[str, ...] = ()
    log: str = ""
    attempt: Annotated[int, Field(ge=1, le=1_000_000)] = 1
