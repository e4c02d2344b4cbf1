"""Running one cell: its environments, its process, its result. A `Job` can be sent to another process or machine."""

import errno
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from . import gpus
from .axes import Known, Tests
from .cell.kernel_compat_host import PRELOADED
from .cells import Cell
from .environments import Environments
from .errors import MatrixError
from .outcomes import distinct, judge, read_report_log, retried, tied
from .pins import Part, UvError
from .processes import INSIDE, Hosts, Process
from .results import CellResult, Kind, Verdict
from .words import plural

#: The beginnings of environment variables that cells don't inherit: those of a pytest and a virtual environment that run the runner,
#: and the places where the runner may write. Without bytecode caches a cell would compile torch and transformers for 10 s.
_NOT_INHERITED = (
    *("PYTEST_XDIST_", "VIRTUAL_ENV", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE"),
    *("KERNEL_COMPAT_MATRIX_STORE", "RAY_AUTH_TOKEN"),
)

#: Seconds for a process to end by itself.
_GRACE = 5.0


@dataclass(frozen=True)
class Job:
    """A cell to run.

    Attributes:
        parts: its base and its layer.
        attempt: the number of the attempt in its run, from 1.
        arguments: further arguments for pytest.
        known: the failures that are tied to an issue in this cell.
        retry: repeat failed tests once, in a process of their own, if the command is pytest.
        fork: without a GPU, fork pytest from a process that has imported torch.
    """

    cell: Cell
    parts: tuple[Part, Part]
    tests: Tests
    environments: Environments
    attempt: int = 1
    arguments: tuple[str, ...] = ()
    known: tuple[Known, ...] = ()
    retry: bool = False
    fork: bool = True

    @property
    def command(self) -> tuple[str, ...]:
        """The command, with the further arguments if it is pytest."""
        return (*self.tests.command, *(self.arguments if self.tests.command[0] == "pytest" else ()))

    @property
    def gpus(self) -> float:
        """The number of GPUs that it leases, or the share of one."""
        count = self.tests.gpus if self.cell.device == "cuda" else 0
        return count if 0 < count < 1 else int(count)

    def result(self, verdict: Verdict, kind: Kind | None, reason: str, **more: Any) -> CellResult:
        """Its result; without further values, that of a cell that didn't start."""
        more = {"started": datetime.now(timezone.utc), "seconds": 0.0, **more}
        pins = "".join(part.text for part in self.parts)
        return CellResult(self.cell, verdict, kind, reason, pins=pins, attempt=self.attempt, **more)


class Cancelled(Exception):
    """The cell was ended because its run was cancelled."""


def run(job: Job, started: Callable[[Cell], object], hosts: Hosts) -> CellResult:
    """Run a cell to its end, with GPUs that no other process on this machine has; failures of any kind are in the result.

    `started` is called when the cell has its GPUs.

    Raises:
        Cancelled: `hosts.cancelled` was set.
    """
    devices = gpus.visible() if job.gpus else []
    if job.gpus > len(devices):
        there = {0: "none is", 1: "one is"}.get(len(devices), f"{len(devices)} are")
        return job.result("not run", "hardware", f"it needs {plural(job.gpus, 'GPU')}, and {there} visible")
    with gpus.leased(job.gpus, devices, hosts.cancelled) as held:
        if hosts.cancelled.is_set():
            raise Cancelled
        started(job.cell)
        begun, clock = datetime.now(timezone.utc), time.monotonic()
        result = _run(job, held, hosts, begun.date())
        return replace(result, started=begun, seconds=time.monotonic() - clock)


def _run(job: Job, leased: Sequence[str], hosts: Hosts, today: date) -> CellResult:
    try:
        if problem := next((part.problem for part in job.parts if part.problem), None):
            raise UvError(problem)
        python = job.environments.base(job.parts[0])
        layer = job.environments.layer(job.parts[1], python)
    except (UvError, OSError) as error:
        full = os.strerror(errno.ENOSPC)
        if isinstance(error, UvError) and full not in str(error):
            return job.result("failed", "installation", " ".join(str(error).split())[:600], log=str(error))
        # An error of the machine, which every cell would have.
        reason = full if isinstance(error, UvError) else error.strerror or error
        raise MatrixError(f"environments can't be kept in {job.environments.root}: {reason}") from error
    with tempfile.TemporaryDirectory(prefix="kernel-compat-matrix-") as scratch:
        folder = Path(scratch)
        (folder / "log").touch()
        hosts.logs[job.cell] = folder / "log"
        start = partial(_start, job, python, layer, folder, leased, hosts)
        deadline = time.monotonic() + job.tests.minutes * 60
        try:
            process = start("report.jsonl")
        except OSError as error:
            reason = f"{job.tests.command[0]} can't be started: {error.strerror}"
            return job.result("failed", "installation", reason)
        returncode = _supervise(process, deadline, hosts.cancelled)
        tests, uncollected = read_report_log(folder / "report.jsonl")
        try:
            found = dict(json.loads((folder / "environment.json").read_bytes()))
        except (OSError, ValueError):  # the cell ended early, or its own code wrote the file
            found = {}
        tests, stale = tied(tests, job.known, today)
        last_failed = (folder / "cache/v/cache/lastfailed").exists()
        if job.retry and returncode == 1 and last_failed and any(test.bad for test in tests):
            _supervise(start("retry.jsonl", "--last-failed"), deadline, hosts.cancelled)
            tests = retried(tests, read_report_log(folder / "retry.jsonl")[0])
        log = (folder / "log").read_text(encoding="utf-8", errors="replace")
    tests = distinct(tests)
    verdict, kind, reason = judge(tests, uncollected, found, log, returncode, job.tests.minutes, stale)
    return job.result(verdict, kind, reason, tests=tuple(tests), environment=found, command=job.command, log=log)


def _start(
    job: Job, python: Path, layer: Path, folder: Path, leased: Sequence[str], hosts: Hosts, report: str, *more: str
) -> Process:
    """Start the command of a job, pytest with a report log and with further arguments."""
    environment = {
        "OMP_NUM_THREADS": "1",
        **{name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)},
        **job.tests.environment,
        # A cell sees the leased devices only, also on a machine that has more.
        "CUDA_VISIBLE_DEVICES": ",".join(leased),
        "KERNEL_COMPAT_MATRIX_AXES": json.dumps(job.cell.axes),
        "COMPAT_MATRIX_ENVIRONMENT": str(folder / "environment.json"),
        "PYTHONPATH": os.pathsep.join([str(layer), str(INSIDE)]),
        "TMPDIR": str(folder),
    }
    place = (environment, job.environments.project, folder / "log")
    first, *rest = job.command
    if first != "pytest":
        return hosts.start(None, [str(python) if part == "python" else part for part in job.command], *place)
    arguments = ["pytest", "-p", "kernel_compat_cell", f"--report-log={folder / report}"]
    arguments += ["-o", f"cache_dir={folder / 'cache'}"] if job.retry else ["-p", "no:cacheprovider"]
    arguments += ["-n", str(len(leased))] if len(leased) > 1 else []
    arguments += [*rest, *more]
    # A fork has imported the base's release of what the layer may have too.
    shadowed = any(name in PRELOADED for name in job.parts[1].versions)
    if job.fork and not leased and not shadowed:
        with suppress(OSError):  # torch can't be imported: the cell's own log shows why
            return hosts.start(python, arguments, *place)
    return hosts.start(None, [str(python), "-m", *arguments], *place)


def _supervise(process: Process, deadline: float, cancelled: threading.Event) -> int | None:
    """The return code of the process; None if it was ended at `deadline`, in seconds of `time.monotonic`."""
    try:
        while time.monotonic() <= deadline:
            with suppress(TimeoutError):
                return process.wait(0.2)
            if cancelled.is_set():
                raise Cancelled
        with suppress(ProcessLookupError, TimeoutError):
            os.kill(process.pid, signal.SIGABRT)  # pytest's fault handler writes the stacks of all threads
            process.wait(_GRACE)
        return None
    finally:
        process.end()
