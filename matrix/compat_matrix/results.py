"""The results of cells, and the runs that they are from."""

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import AfterValidator, ConfigDict, Field, PlainSerializer

from .cells import Cell
from .words import clean

#: ``flaky``: a test failed and passed when it was repeated. ``known``: tests fail, all of them for issues in the axes file.
#: ``not run``: the machine lacks what the cell needs.
Verdict = Literal["passed", "flaky", "known", "failed", "not run"]

#: The state of a cell in a run: its verdict, or why it has none. ``excluded``: the axes exclude it.
State = Literal["passed", "flaky", "known", "failed", "not run", "unfinished", "excluded"]

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

#: Text that may have any character, and is printable in JSON.
Output = Annotated[str, PlainSerializer(lambda text: clean(str(text)), return_type=str)]

#: Limits are for results from elsewhere, which `store.foreign` checks, and for figures, which `outcomes` checks.
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Line = Annotated[Output, Field(max_length=100_000)]


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!r} has characters that can't be printed")
    return text


@dataclass(frozen=True)
class Figure:
    """A number that a test measured. Its name is unique in a cell; values in different units aren't compared."""

    __pydantic_config__ = ConfigDict(extra="forbid", json_schema_serialization_defaults_required=True)

    name: Annotated[Output, Field(strict=True, min_length=1, max_length=100), AfterValidator(_printable)]
    value: Annotated[float, Field(strict=True, allow_inf_nan=False)]
    unit: Annotated[Output, Field(strict=True, max_length=40), AfterValidator(_printable)]
    better: Better | None = "lower"


@dataclass(frozen=True)
class Test:
    """One test's outcome.

    Attributes:
        seconds: the time of setup, call and teardown together.
        message: the report of a failure or the reason of a skip; empty for a test that passed.
    """

    __test__ = False  # pytest collects classes called Test
    __pydantic_config__ = ConfigDict(json_schema_serialization_defaults_required=True)

    nodeid: Annotated[Output, Field(serialization_alias="name")]
    outcome: Outcome
    seconds: Seconds
    message: Output = ""
    figures: Annotated[tuple[Figure, ...], Field(exclude=True)] = ()

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

    __pydantic_config__ = ConfigDict(json_schema_serialization_defaults_required=True)

    cell: Cell
    verdict: Verdict
    kind: Kind | None
    reason: Output
    started: datetime
    seconds: Seconds
    tests: tuple[Test, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    pins: Output = ""
    command: tuple[Output, ...] = ()
    log: str = ""
    attempt: Annotated[int, Field(ge=1, le=1_000_000)] = 1


@lru_cache(1000)  # a page of figures asks for each of hundreds of runs, and a parser takes a third of a millisecond
def options_of(command: str) -> Mapping[str, str | bool]:
    """The options in a command that change what its cells test, with their values."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in ("--axes", "--suite", "--pytest"):
        parser.add_argument(option)
    parser.add_argument("--latest", action="store_true")
    try:
        found = vars(parser.parse_known_args(shlex.split(command))[0])
    except (ValueError, argparse.ArgumentError):  # not a command of the matrix
        return {}
    return MappingProxyType({name: value for name, value in found.items() if value})


@dataclass(frozen=True)
class Run:
    """A run of a matrix, or a part of one.

    Attributes:
        id: such as ``20261121-114502-7f3a``, by the clock of the machine that started it.
        state: ``running`` until `Store.finish`, also after the runner was killed.
        label, command, host, revision, partial: as `Store.new_run` takes them.
        whole: the id of the run that it is a part of: that of the first part, its own if it is the only one.
    """

    id: str
    started: datetime
    finished: datetime | None
    state: Annotated[Output, Field(pattern=r"^[a-z][a-z -]{0,39}$")]
    label: _Line
    command: _Line
    host: _Line
    revision: _Line
    partial: bool
    whole: str

    @property
    def suite(self) -> str:
        """The suite that its cells run."""
        return str(options_of(self.command).get("suite", "default"))


class Summary(NamedTuple):
    """A cell in a run, without its tests and its log. If it has no verdict, only `reason` is meaningful.

    The last fields count its tests by outcome.
    """

    verdict: Verdict | None = None
    kind: Kind | None = None
    reason: str = ""
    excluded: bool = False
    failed: int = 0
    error: int = 0
    started: datetime | None = None
    seconds: float = 0.0
    attempt: int = 0
    passed: int = 0
    skipped: int = 0
    xfailed: int = 0
    xpassed: int = 0
    flaky: int = 0
    known: int = 0

    @property
    def state(self) -> State:
        """The verdict; without one, ``excluded`` or ``unfinished``."""
        return self.verdict or ("excluded" if self.excluded else "unfinished")

    @property
    def counts(self) -> Mapping[Outcome, int]:
        """The number of tests by outcome."""
        return {outcome: getattr(self, outcome) for outcome in get_args(Outcome)}


class Past(NamedTuple):
    """A cell in a run: its result, or else its plan.

    Attributes:
        versions: the exact version that was installed, by axis. Only `Store.newest` and `Store.in_each_environment` read it.
    """

    cell: Cell
    run: Run
    summary: Summary
    versions: Mapping[str, str] = {}


class Measured(NamedTuple):
    """A figure of a cell in a run, with the GPU or processor that the cell reported, if any."""

    run: Run
    figure: Figure
    device: str
