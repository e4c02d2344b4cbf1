"""The messages between workers and the service, and their size limits. Anything else is refused."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from ..axes import Label
from ..cells import Cell
from ..results import CellResult, Kind, Outcome, Test, Verdict

#: The largest report as JSON, without the log, in bytes.
REPORT_BYTES = 16 * 2**20
#: The largest other request except a log, in bytes.
REQUEST_BYTES = 2**20

#: The lengths in characters to which messages are cut, one after the other, until a report is small enough.
_MESSAGES = (100_000, 10_000, 1_000, 100, 0)
_TESTS = 50_000

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,99}$")]
CellName = Annotated[str, StringConstraints(pattern=r"^py[a-z0-9._=-]{1,150}$")]
Version = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,3}(\.[0-9]{1,3}){1,2}$")]
Word = Annotated[str, StringConstraints(max_length=1_000)]
Line = Annotated[str, StringConstraints(max_length=10_000)]
Text = Annotated[str, StringConstraints(max_length=REPORT_BYTES)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
LeaseId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{20,64}$")]
#: 32 characters are 192 bits, which can't be guessed.
NewLeaseId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{32,64}$")]
#: Seconds since 1970, up to the year 3000.
Moment = Annotated[float, Field(ge=0, le=32_503_680_000, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=10**9, allow_inf_nan=False)]
Gib = Annotated[float, Field(ge=0, le=10**6, allow_inf_nan=False)]

T = TypeVar("T", bound=BaseModel)


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Submission(_Message):
    """A request to create a run of cells of the served axes.

    Attributes:
        only: an expression, such as ``device==cpu and torch==2.15``.
        cells: the names of the cells; all cells if empty.
        suite: the name of the tests in the axes file.
        label: a name for the run.
    """

    only: Annotated[str, StringConstraints(min_length=1, max_length=2_000)] | None = None
    cells: Annotated[list[CellName], Field(max_length=20_000)] = []
    suite: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,60}$")] = "default"
    label: Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{0,100}$")] = ""


class Submitted(_Message):
    """A run that was created, with the number of its cells and of its excluded cells."""

    run: str
    cells: int
    excluded: int


class Gpu(_Message):
    """A GPU; its compute capability as in ``9.0``, its memory in GiB."""

    name: Annotated[str, StringConstraints(pattern=r"^[ -~]{0,200}$")]
    capability: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}\.[0-9]$")]
    memory: Gib = 0.0

    @property
    def sm(self) -> int:
        """The compute capability as an integer, such as 90."""
        return int(self.capability.replace(".", ""))


class Machine(_Message):
    """A worker and its machine.

    Attributes:
        name: the worker's name; two workers of the same name are shown as one.
        version: its version of kernel-compat-matrix.
        fingerprint: the fingerprint of its project and axes file.
        pythons: the Python versions that it provides; None for all.
        gpus: the GPUs that it may use.
        memory: its memory in GiB.
        jobs: the number of cells it runs at a time.
    """

    name: Name
    version: Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z.+-]{1,40}$")]
    fingerprint: Digest
    pythons: Annotated[list[Version], Field(max_length=20)] | None = None
    gpus: Annotated[list[Gpu], Field(max_length=128)] = []
    memory: Gib
    labels: Annotated[list[Label], Field(max_length=50)] = []
    jobs: Annotated[int, Field(ge=1, le=10_000)] = 1


class Wanted(_Message):
    """A request for a cell to run.

    Attributes:
        free_gpus, free_memory: the part of the machine that no cell of this worker is using.
        only: an expression; the worker takes only cells that match it.
        lease: a random id for the lease. If the response is lost, the worker repeats the request with the same id and gets the
            same lease.
    """

    machine: Machine
    free_gpus: Annotated[int, Field(ge=0, le=128)] = 0
    free_memory: Gib
    only: Annotated[str, StringConstraints(min_length=1, max_length=2_000)] | None = None
    lease: NewLeaseId | None = None


class Leased(_Message):
    """A cell to run.

    Attributes:
        lease: the id for renewing and reporting. A secret.
        seconds: the duration of the lease from the response on, unless it is renewed.
    """

    lease: str
    run: str
    cell: str
    suite: str
    attempt: int
    seconds: float


class Renewed(_Message):
    """The lease was renewed for this number of seconds from now."""

    seconds: float


class Taken(_Message):
    """A report has arrived. It isn't counted if its lease had expired; the result is then kept as late."""

    counted: bool


class _Shim(_Message):
    state: Word
    reason: Line
    seams: Annotated[list[Line], Field(max_length=1_000)]


class Environment(_Message):
    """The environment of a cell, as the cell reports it."""

    python: Word = ""
    system: Word = ""
    device: Word = ""
    capability: Word = ""
    driver: Word = ""
    packages: Annotated[dict[Word, Word], Field(max_length=10_000)] = {}
    conflicts: Annotated[list[Line], Field(max_length=10_000)] = []
    shims: Annotated[dict[Word, _Shim], Field(max_length=1_000)] = {}


class Outcomes(_Message):
    """The outcome of one test."""

    nodeid: Line
    outcome: Outcome
    seconds: Seconds
    message: Text = ""


class Result(_Message):
    """The result of a cell: a `CellResult` without its cell and attempt, which the lease identifies, and without its log.

    Lone surrogates, which JSON can't represent, are replaced.
    """

    verdict: Verdict
    kind: Kind | None = None
    reason: Line = ""
    started: Moment
    seconds: Seconds
    tests: Annotated[list[Outcomes], Field(max_length=_TESTS)] = []
    environment: Environment = Environment()
    pins: Text = ""
    command: Annotated[list[Line], Field(max_length=1_000)] = []

    @model_validator(mode="after")
    def _agrees(self) -> Result:
        if (self.verdict == "passed") != (self.kind is None):
            raise ValueError("a passed result has no kind, and any other result has one")
        return self

    @classmethod
    def of(cls, found: CellResult) -> Result:
        """The message for a result. If it is too large, test messages are shortened in their middle."""
        for longest in _MESSAGES:
            result = cls(
                verdict=found.verdict,
                kind=found.kind,
                reason=_cut(_text(found.reason), 10_000),
                started=found.started.timestamp(),
                seconds=max(found.seconds, 0.0),
                tests=[
                    Outcomes(
                        nodeid=_cut(_text(one.nodeid), 10_000),
                        outcome=one.outcome,
                        seconds=min(max(one.seconds, 0.0), 10.0**9),
                        message=_cut(_text(one.message), longest),
                    )
                    for one in found.tests[:_TESTS]
                ],
                environment=_environment(found.environment),
                pins=_cut(_text(found.pins), REPORT_BYTES // 8),
                command=[_cut(_text(part), 10_000) for part in found.command[:1_000]],
            )
            if len(result.model_dump_json()) < REPORT_BYTES - 1_000:
                break
        return result

    def result(self, cell: Cell, attempt: int, ahead: float, log: str = "") -> CellResult:
        """The result as it is stored.

        Args:
            ahead: the number of seconds by which the worker's clock is ahead of the service's.
        """
        started = datetime.fromtimestamp(self.started, timezone.utc) - timedelta(seconds=ahead)
        return CellResult(
            cell=cell,
            verdict=self.verdict,
            kind=self.kind,
            reason=self.reason,
            started=started,
            seconds=self.seconds,
            tests=tuple(Test(one.nodeid, one.outcome, one.seconds, one.message) for one in self.tests),
            environment=self.environment.model_dump(exclude_unset=True),
            pins=self.pins,
            command=tuple(self.command),
            log=log,
            attempt=attempt,
        )


class Report(_Message):
    """A worker's report of a result.

    Attributes:
        now: the worker's clock at the time of sending.
    """

    result: Result
    now: Moment


def _environment(found: Mapping[str, Any]) -> Environment:
    try:
        return Environment.model_validate(_clean(dict(found)))
    except ValidationError:  # the tested project may have written anything to this file
        return Environment()


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return {_clean(key): _clean(one) for key, one in value.items()}
    return [_clean(one) for one in value] if isinstance(value, (list, tuple)) else value


def _text(value: str) -> str:
    return value.encode("utf-8", "replace").decode()


def _cut(text: str, longest: int) -> str:
    """The text without its middle if it is longer than `most`."""
    if len(text) <= longest:
        return text
    note = f"\n[... {len(text) - longest} characters ...]\n"
    half = max(longest - len(note), 0) // 2
    return f"{text[:half]}{note}{text[len(text) - half :]}" if half else ""
