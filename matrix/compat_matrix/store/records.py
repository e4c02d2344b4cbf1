"""The values that the store returns."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import Field

from ..cells import Cell
from ..results import Figure, Kind, Outcome, Verdict

#: The state of a cell in a run: its verdict, or why it has none. ``excluded``: the axes exclude it.
State = Literal["passed", "flaky", "known", "failed", "not run", "unfinished", "excluded"]

#: The limits hold for runs from elsewhere: `foreign` checks them.
_Line = Annotated[str, Field(max_length=100_000)]


def options_of(command: str) -> dict[str, str | bool]:
    """The options in a command that change what its cells test, with their values."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in ("--axes", "--suite", "--pytest"):
        parser.add_argument(option)
    parser.add_argument("--latest", action="store_true")
    try:
        found = vars(parser.parse_known_args(shlex.split(command))[0])
    except (ValueError, argparse.ArgumentError):  # not a command of the matrix
        return {}
    return {name: value for name, value in found.items() if value}


class Run(NamedTuple):
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
    state: Annotated[str, Field(pattern=r"^[a-z][a-z -]{0,39}$")]
    label: _Line
    command: _Line
    host: _Line
    revision: _Line
    partial: bool = False
    whole: str = ""

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
    """The result of a cell in a run."""

    run: Run
    summary: Summary


class Comparison(NamedTuple):
    """Two runs: the cells that ended differently, and the tests of cells that failed both times which ran both times and failed once.

    A run that doesn't have a cell has None for it.
    """

    cells: dict[Cell, tuple[Summary | None, Summary | None]]
    tests_broke: dict[Cell, list[str]]
    tests_mended: dict[Cell, list[str]]


class Measured(NamedTuple):
    """A figure of a cell in a run, with the GPU or processor that the cell reported, if any, and the key of the result."""

    run: Run
    figure: Figure
    device: str
    result: int


class Newest(NamedTuple):
    """The newest result or plan of a cell in whole runs, with the exact versions of the result by axis."""

    cell: Cell
    past: Past
    versions: Mapping[str, str]
