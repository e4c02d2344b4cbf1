"""The queue: cells that wait for a worker, kept in tables of the store.

A lease is taken by one conditional update, so that two workers never have the same cell. A result counts if its lease is the
cell's current one and hasn't expired. Only the service's clock decides that.
"""

from __future__ import annotations

import json
import logging
import random
import secrets
import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime, timedelta, timezone
from typing import Any, Literal, NamedTuple, TypeVar

from sqlalchemy import Connection, Select, and_, bindparam, case, exists, func, insert, literal, select, update
from sqlalchemy.exc import IntegrityError

from .. import pins
from ..axes import Axes, Tests
from ..cells import Cell, parse
from ..errors import MatrixError
from ..expressions import Expression
from ..results import CellResult
from ..store import Provenance, Store, inserts
from ..store.models import CELL, LATE, LEASE, LOG, RUN, TASK, UPLOAD, WORKER, Utc, unpack
from .protocol import Leased, Machine, Report, Result, Submission, Submitted, Wanted
from .settings import Settings

#: With concurrent writers, one of this many cells is chosen at random, so that simultaneous requests rarely collide.
_CANDIDATES = 16
#: The precision, in seconds, of the time at which a worker was last heard of.
_SEEN = 10.0
#: The time after which an expired lease is noticed.
_SWEPT = timedelta(seconds=1)
#: The time of silence after which a worker isn't shown any more.
_FORGOTTEN = timedelta(days=7)
#: The time after which a log without a result is dropped.
_UPLOADED = timedelta(days=1)

#: A cell is considered to kill its workers if the probability of losing that many by chance is below this.
_CHANCE = 1e-5
#: Or if it has lost this many times the least number.
_MOST = 10
#: The period whose leases show how often other cells lose their workers.
_LATELY = timedelta(days=1)

#: The lowest and highest compute capability that the kernels of an axis' value run on.
CAPABILITIES = {"none": (0, 999), "fa2": (80, 999), "fa3": (90, 99), "fa4": (90, 999), "torch": (80, 999)}

State = Literal["queued", "leased", "done", "dropped"]

log = logging.getLogger(__name__)
T = TypeVar("T")


class Differs(MatrixError):
    """A worker's checkout differs from the service's."""


class Over(MatrixError):
    """A lease has ended."""


class NoLease(MatrixError):
    """There never was a lease with this id."""


class WorkerSeen(NamedTuple):
    """A worker, as it last described itself, with its leases.

    Attributes:
        token: the name of its token.
        machine: the `Machine` as JSON.
        cells: run and cell of each lease.
    """

    name: str
    token: str
    began: datetime
    seen: datetime
    machine: dict[str, Any]
    cells: list[tuple[str, str]]


class Running(NamedTuple):
    """A cell under a lease."""

    run: str
    cell: Cell
    attempt: int
    worker: str
    begun: datetime
    until: datetime


class Late(NamedTuple):
    """A result that doesn't count, as its lease had expired."""

    run: str
    worker: str
    received: datetime
    result: CellResult


class Queue:
    """The queue of a store. Thread-safe; several services may share one database.

    Args:
        axes: the axes whose cells can be run; None if none can.
        fingerprint: the fingerprint of the project and the axes, which workers must match.
        revision: a description of the tested commit.
        now: returns the current time.
    """

    def __init__(
        self,
        store: Store,
        axes: Axes | None,
        settings: Settings,
        *,
        fingerprint: str = "",
        revision: str = "",
        host: str = "",
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self.store, self.axes, self.settings, self.fingerprint = store, axes, settings, fingerprint
        self.revision, self.host = revision, host
        self._now = now
        # SQLite has one writer at a time. Threads that wait for this lock continue at once; those that wait in SQLite
        # poll.
        self._one: Any = threading.Lock() if store.dialect == "sqlite" else nullcontext()
        self._swept = datetime.min.replace(tzinfo=timezone.utc)
        self._answered = time.monotonic()
        self._seen: dict[str, tuple[datetime, str]] = {}

    # Runs.

    def submit(self, wanted: Submission) -> Submitted:
        """Create a run of cells of the axes.

        Raises:
            MatrixError: it names a cell or a suite that the axes don't have, or nothing can be run here.
        """
        if self.axes is None:
            raise MatrixError("this service was started without an axes file, and accepts no runs")
        cells = self.axes.select(wanted.only, wanted.cells)
        excluded = {} if wanted.cells else self.axes.excluded(wanted.only)
        tests = {cell: self.axes.tests_of(cell, wanted.suite) for cell in cells}
        if without := next((cell for cell, one in tests.items() if one is None), None):
            raise MatrixError(f"{self.axes.path.name} has no tests for {without} in the suite {wanted.suite!r}")
        if self.settings.pins is not None:
            pins.of_cells(self.axes, cells, self.settings.pins)
        words = ["run", *wanted.cells, *([f"--only={wanted.only}"] if wanted.only else [])]
        words += [f"--suite={wanted.suite}"] if wanted.suite != "default" else []

        def write(connection: Connection) -> str:
            given = Provenance(
                axes=self.axes.path.read_text(encoding="utf-8") if self.axes else "",
                command=shlex.join(words),
                label=wanted.label,
                host=self.host,
                revision=self.revision,
                partial=wanted.suite != "default",
            )
            key, name = inserts.begin(connection, cells, excluded, given)
            keys = inserts.cell_keys(connection, cells)
            same = {
                "run_id": key,
                "attempt": 1,
                "suite": wanted.suite,
                "fingerprint": self.fingerprint,
                "state": "queued",
                "tries": 0,
            }
            rows = [same | {"cell_id": keys[cell.name]} | _needs(cell, found) for cell, found in tests.items() if found]
            connection.execute(TASK.insert(), rows)
            return name

        name = self._write(write)
        return Submitted(run=name, cells=len(cells), excluded=len(excluded))

    # Leases.

    def lease(self, wanted: Wanted, token: str) -> Leased | None:
        """Lease the next cell that a machine can run; None if there is none now.

        Raises:
            Differs: its project differs from the service's.
            MatrixError: `only` isn't a valid expression.
        """
        machine = wanted.machine
        if machine.fingerprint != self.fingerprint:
            raise Differs(
                f"the project and the axes file of {machine.name} (kernel-compat-matrix {machine.version}) differ from "
                f"those the service was started with{f', at {self.revision}' if self.revision else ''}: update both to the same commit"
            )
        fits = self._fits(wanted)
        self._after_outage()
        if abs(self._now() - self._swept) >= _SWEPT:
            self.sweep()
        self._heard_of(machine, token)
        query = select(TASK.c.id, TASK.c.rank).where(TASK.c.state == "queued", *fits).order_by(TASK.c.rank, TASK.c.id)
        for _ in range(4):
            with self.store.reading() as connection:
                if (leased := self._same(connection, wanted, token)) is not None:
                    return leased
                if connection.execute(query.limit(1)).first() is None:  # the most frequent answer needs no lock
                    return None
            if (leased := self._write(lambda c: self._take(c, query, wanted, token))) is not None:
                return leased
        return None  # other workers were faster each time; the worker tries again

    def renew(self, lease: str) -> float:
        """Renew a lease; returns its new duration in seconds. An expired lease that wasn't noticed yet is renewed as well.

        Raises:
            Over: it has ended.
            NoLease: there never was such a one.
        """
        self._after_outage()
        until = self._now() + timedelta(seconds=self.settings.lease_seconds)
        own = and_(TASK.c.lease == lease, TASK.c.state == "leased")
        if not self._write(lambda c: c.execute(update(TASK).where(own).values(until=until)).rowcount):
            self.ended(lease)
            raise Over("this lease has ended")
        return self.settings.lease_seconds

    def give_back(self, lease: str) -> None:
        """Return a lease without a result; its cell waits for a worker again. Repeating it is no error.

        Raises:
            NoLease: there never was such a one.
        """

        def write(connection: Connection) -> None:
            own = and_(TASK.c.lease == lease, TASK.c.state == "leased")
            back = update(TASK).where(own).values(**_FREE, state=self._again())
            if connection.execute(back).rowcount:
                _end(connection, lease, "returned", self._now())

        self._write(write)
        self.ended(lease)

    def upload(self, lease: str, packed: bytes) -> None:
        """Store the log of a lease; its result follows.

        Args:
            packed: the log, compressed as in the store.

        Raises:
            NoLease: there never was such a one.
            Over: its result has arrived already.
        """
        if self.ended(lease) in ("counted", "late"):
            raise Over("the result of this lease has already arrived")

        def write(connection: Connection) -> None:
            connection.execute(UPLOAD.delete().where(UPLOAD.c.lease == lease))
            connection.execute(UPLOAD.insert().values(lease=lease, received=self._now(), content=packed))

        self._write(write)

    def report(self, lease: str, report: Report) -> bool:
        """Store the result of a lease; returns whether it counts. A repeated report counts once and gets the same answer.

        Raises:
            NoLease: there never was such a one.
        """
        self._after_outage()
        now = self._now()
        row = self._lease(lease)
        if row.how in ("counted", "late"):
            return bool(row.how == "counted")
        result = report.result.result(parse(row.cell), row.attempt, report.now - now.timestamp())
        counted = self._write(lambda c: self._take_in(c, lease, row, result, report.result, now))
        self._finish(row.run_id)
        return counted

    def ended(self, lease: str) -> str | None:
        """How a lease ended: counted, late, lost or returned; None if it is open.

        Raises:
            NoLease: there never was such a one.
        """
        found: str | None = self._lease(lease).how
        return found

    # Maintenance.

    def start(self) -> None:
        """Take over from a service that ended: its open leases start anew, as they couldn't be renewed meanwhile.

        Cells that were queued for a different state of the project are dropped, and their runs are interrupted.
        """
        self._go_on()

        def write(connection: Connection) -> None:
            other = and_(TASK.c.state == "queued", TASK.c.fingerprint != self.fingerprint)
            if self.axes is not None:
                connection.execute(update(TASK).where(other).values(state="dropped"))

        self._write(write)
        self.sweep()

    def sweep(self) -> None:
        """End expired leases, and runs whose last result has arrived. Repeating it changes nothing."""
        self._after_outage()
        now = self._swept = self._now()
        with self.store.reading() as connection:
            lost = connection.execute(_LOST, {"now": now}).scalars().all()
            ended = connection.execute(_ENDED).scalars().all()
        for lease in lost:
            self._write(lambda c, lease=lease: self._lose(c, lease))  # type: ignore[misc]
        if lost or ended:
            self._finish(None)
        self._answered = time.monotonic()

    def _after_outage(self) -> None:
        """Restart all leases if the last sweep was long ago, which means that the database was unavailable."""
        if time.monotonic() - self._answered > self.settings.lease_seconds / 2:
            self._go_on()
            self._answered = time.monotonic()

    def _go_on(self) -> None:
        """Restart every open lease, as if it had just been renewed."""
        until = self._now() + timedelta(seconds=self.settings.lease_seconds)
        own = and_(TASK.c.state == "leased", TASK.c.until < until)
        self._write(lambda c: c.execute(update(TASK).where(own).values(until=until)))

    def tidy(self) -> None:
        """Delete workers that have been gone for long, and logs whose results never arrived."""
        now = self._now()

        def write(connection: Connection) -> None:
            connection.execute(WORKER.delete().where(WORKER.c.seen < now - _FORGOTTEN))
            connection.execute(UPLOAD.delete().where(UPLOAD.c.received < now - _UPLOADED))

        self._write(write)

    # Queries.

    def counts(self) -> Counter[State]:
        """The number of cells in each state, over all unfinished runs."""
        query = select(TASK.c.state, func.count()).where(TASK.c.state.in_(["queued", "leased"])).group_by(TASK.c.state)
        with self.store.reading() as connection:
            return Counter({row[0]: row[1] for row in connection.execute(query)})

    def workers(self) -> list[WorkerSeen]:
        """The workers of the last days, the most recently heard of first."""
        cells: dict[str, list[tuple[str, str]]] = {}
        for one in self.running():
            cells.setdefault(one.worker, []).append((one.run, one.cell.name))
        query = select(WORKER.c.name, WORKER.c.token, WORKER.c.began, WORKER.c.seen, WORKER.c.machine)
        with self.store.reading() as connection:
            rows = connection.execute(query.order_by(WORKER.c.seen.desc())).all()
        return [WorkerSeen(*row[:4], json.loads(row[4]), cells.get(row[0], [])) for row in rows]

    def running(self, run: str | None = None) -> list[Running]:
        """The leased cells of one run or of all."""
        query = (
            select(RUN.c.name, CELL.c.name, TASK.c.attempt, TASK.c.worker, LEASE.c.begun, TASK.c.until)
            .join_from(TASK, RUN, RUN.c.id == TASK.c.run_id)
            .join(CELL, CELL.c.id == TASK.c.cell_id)
            .join(LEASE, LEASE.c.id == TASK.c.lease)
            .where(TASK.c.state == "leased")
            .order_by(TASK.c.id)
        )
        if run is not None:
            query = query.where(RUN.c.name == run)
        with self.store.reading() as connection:
            return [Running(row[0], parse(row[1]), *row[2:]) for row in connection.execute(query)]

    def late(self, cell: Cell, run: str | None = None) -> list[Late]:
        """The late results of a cell, in one run or in all, newest first."""
        query = (
            select(
                *(RUN.c.name, LEASE.c.worker, LATE.c.received, TASK.c.attempt, LATE.c.content, LATE.c.log),
                LATE.c.started,
            )
            .join_from(LATE, LEASE, LEASE.c.id == LATE.c.lease)
            .join(TASK, TASK.c.id == LATE.c.task_id)
            .join(RUN, RUN.c.id == TASK.c.run_id)
            .join(CELL, CELL.c.id == TASK.c.cell_id)
            .where(CELL.c.name == cell.name)
            .order_by(LATE.c.received.desc())
        )
        if run is not None:
            query = query.where(RUN.c.name == run)
        found = []
        with self.store.reading() as connection:
            for row in connection.execute(query):
                result = Result.model_validate_json(row.content)
                text = unpack(row.log) if row.log else ""
                ahead = result.started - row.started.timestamp()
                found.append(Late(row[0], row[1], row[2], result.result(cell, row.attempt, ahead, text)))
        return found

    # Transactions.

    def _same(self, connection: Connection, wanted: Wanted, token: str) -> Leased | None:
        """The lease that this worker requested before, if it is open."""
        if wanted.lease is None:
            return None
        own = {"lease": wanted.lease, "worker": wanted.machine.name, "token": token}
        row = connection.execute(_GOING, own).one_or_none()
        if row is None:
            return None
        seconds = max((row.until - self._now()).total_seconds(), 0.0)
        return self._leased(connection, wanted.lease, row.id, seconds)

    def _leased(self, connection: Connection, lease: str, task: int, seconds: float) -> Leased:
        run, cell, suite, attempt = connection.execute(_OF_TASK, {"task": task}).one()
        return Leased(lease=lease, run=run, cell=cell, suite=suite, attempt=attempt, seconds=seconds)

    def _take(self, connection: Connection, query: Select[Any], wanted: Wanted, token: str) -> Leased | None:
        """Lease one of the first of these tasks that is still free."""
        worker, lease = wanted.machine.name, wanted.lease or secrets.token_urlsafe(24)
        if wanted.lease is not None and connection.execute(_OF_LEASE, {"lease": lease}).first() is not None:
            if (leased := self._same(connection, wanted, token)) is not None:  # the first query has just been made
                return leased
            lease = secrets.token_urlsafe(24)
        alone = self.store.dialect == "sqlite"
        found = connection.execute(query.limit(1 if alone else _CANDIDATES)).all()
        tasks = [row.id for row in sorted(found, key=lambda row: (row.rank, random.random()))]
        now = self._now()
        until = now + timedelta(seconds=self.settings.lease_seconds)
        for task in tasks:
            own = and_(TASK.c.id == task, TASK.c.state == "queued")
            values = {"state": "leased", "lease": lease, "worker": worker, "until": until}
            if connection.execute(update(TASK).where(own).values(values)).rowcount:
                break
        else:
            return None
        connection.execute(LEASE.insert().values(id=lease, task_id=task, worker=worker, token=token, begun=now))
        return self._leased(connection, lease, task, self.settings.lease_seconds)

    def _take_in(
        self, connection: Connection, lease: str, row: Any, result: CellResult, sent: Result, now: datetime
    ) -> bool:
        current = and_(TASK.c.lease == lease, TASK.c.state == "leased", TASK.c.until > now)
        if connection.execute(update(TASK).where(current).values(state="done", until=None)).rowcount:
            _end(connection, lease, "counted", now)
            if (key := inserts.add_result(connection, row.run_id, result)) is not None:
                uploaded = select(literal(key), UPLOAD.c.content).where(UPLOAD.c.lease == lease)
                connection.execute(insert(LOG).from_select(["result_id", "content"], uploaded))
            connection.execute(UPLOAD.delete().where(UPLOAD.c.lease == lease))
            return True
        if not _end(connection, lease, "late", now):  # the same report arrived at the same time
            return bool(connection.scalar(select(LEASE.c.how).where(LEASE.c.id == lease)) == "counted")
        kept = connection.scalar(select(UPLOAD.c.content).where(UPLOAD.c.lease == lease))
        values = {
            "lease": lease,
            "task_id": row.task_id,
            "received": now,
            "verdict": result.verdict,
            "kind": result.kind,
            "reason": inserts.plain(result.reason),
            "started": result.started,
            "seconds": result.seconds,
            "content": sent.model_dump_json(exclude_unset=True),
            "log": kept,
        }
        connection.execute(LATE.insert().values(values))
        connection.execute(UPLOAD.delete().where(UPLOAD.c.lease == lease))
        return False

    def _lose(self, connection: Connection, lease: str) -> None:
        """Free the cell of an expired lease. A cell that keeps killing its workers has failed."""
        now = self._now()
        own = and_(TASK.c.lease == lease, TASK.c.state == "leased", TASK.c.until <= now)
        free = update(TASK).where(own).values(**_FREE, state=self._again(), tries=TASK.c.tries + 1)
        row = connection.execute(
            select(TASK.c.id, TASK.c.run_id, TASK.c.attempt, TASK.c.tries, CELL.c.name)
            .join_from(TASK, CELL)
            .where(TASK.c.lease == lease)
        ).one_or_none()
        if row is None or not connection.execute(free).rowcount:
            return  # another service was faster, or it was renewed
        _end(connection, lease, "lost", now)
        log.info("the lease of %s was lost for the %s. time", row.name, row.tries + 1)
        if not self._is_culprit(connection, row.id, row.tries + 1):
            return
        lost = select(LEASE.c.worker).where(LEASE.c.task_id == row.id, LEASE.c.how.in_(["lost", "late"]))
        names = ", ".join(dict.fromkeys(connection.execute(lost.order_by(LEASE.c.begun)).scalars()))
        reason = f"its worker was lost {row.tries + 1} times: {names}"
        result = CellResult(parse(row.name), "failed", "crash", reason, now, 0.0, attempt=row.attempt)
        inserts.add_result(connection, row.run_id, result)
        connection.execute(update(TASK).where(TASK.c.id == row.id).values(state="done"))

    def _is_culprit(self, connection: Connection, task: int, times: int) -> bool:
        """Whether a cell has lost its worker too often for chance, given how often other cells lose theirs."""
        if times < self.settings.tries:
            return False
        lost = case((LEASE.c.how.in_(["lost", "late"]), 1))
        others = select(func.count(LEASE.c.how), func.count(lost)).where(LEASE.c.task_id != task)
        leases, of_these = connection.execute(others.where(LEASE.c.begun > self._now() - _LATELY)).one()
        share = of_these / leases if leases else 0.0
        return bool(share**times < _CHANCE) or times >= _MOST * self.settings.tries

    def _finish(self, run: int | None) -> None:
        """End runs that have no cell left: one run, or all of them."""
        with self.store.reading() as connection:
            if run is None:
                ended = connection.execute(_ENDED).scalars().all()
            else:
                ended = connection.execute(_HAS_ENDED, {"run": run}).scalars().all()

        def write(connection: Connection, key: int) -> None:
            dropped = exists().where(TASK.c.run_id == key, TASK.c.state == "dropped")
            state = "interrupted" if connection.scalar(select(dropped)) else "finished"
            own = and_(RUN.c.id == key, RUN.c.state == "running")
            connection.execute(update(RUN).where(own).values(state=state, finished=self._now()))

        for key in ended:
            self._write(lambda c, key=key: write(c, key))  # type: ignore[misc]

    def _write(self, do: Callable[[Connection], T]) -> T:
        """A transaction; repeated once if another process has inserted the same text meanwhile."""
        for last in (*[False] * 9, True):
            try:
                with self._one, self.store.writing() as connection:
                    return do(connection)
            except IntegrityError:
                if last:
                    raise
        raise AssertionError

    # Conditions and small statements.

    def _fits(self, wanted: Wanted) -> list[Any]:
        """The conditions on the tasks that a machine can run."""
        machine = wanted.machine
        conditions = [TASK.c.fingerprint == self.fingerprint, TASK.c.memory <= wanted.free_memory]
        conditions.append(TASK.c.gpus <= min(wanted.free_gpus, len(machine.gpus)))
        if machine.pythons is not None:
            conditions.append(TASK.c.python.in_(machine.pythons))
        if machine.gpus:  # the worker decides which GPUs a cell gets
            conditions += [
                (TASK.c.gpus == 0)
                | (
                    (TASK.c.low <= min(one.sm for one in machine.gpus))
                    & (TASK.c.high >= max(one.sm for one in machine.gpus))
                )
            ]
        tests = self.axes.tests if self.axes else []
        sets = {_labels(one) for one in tests if set(one.labels) <= {*machine.labels}}
        conditions.append(TASK.c.labels.in_(sorted({"", *sets})))
        if wanted.only is not None:
            condition = Expression(wanted.only)
            names = [cell.name for cell in (self.axes.cells if self.axes else ()) if condition(cell)]
            conditions.append(TASK.c.cell_id.in_(select(CELL.c.id).where(CELL.c.name.in_(names))))
        return conditions

    def _heard_of(self, machine: Machine, token: str) -> None:
        """Store a worker's description if it is new or the stored one is some seconds old."""
        now, said = self._now(), machine.model_dump_json()
        at, before = self._seen.get(machine.name, (None, ""))
        if at is not None and before == said and (now - at).total_seconds() < _SEEN:
            return
        if len(self._seen) > 10_000:
            self._seen.clear()
        values = {"token": token, "seen": now, "machine": said}

        def write(connection: Connection) -> None:
            if not connection.execute(update(WORKER).where(WORKER.c.name == machine.name).values(values)).rowcount:
                connection.execute(WORKER.insert().values(name=machine.name, began=now, **values))

        self._write(write)
        self._seen[machine.name] = (now, said)

    def _lease(self, lease: str) -> Any:
        with self.store.reading() as connection:
            row = connection.execute(_OF_LEASE, {"lease": lease}).one_or_none()
        if row is None:
            raise NoLease("there is no such lease")
        return row

    def _again(self) -> Any:
        """The new state of a cell that lost its worker: queued, unless no worker can take it any more."""
        if self.axes is None:
            return "queued"
        return case((TASK.c.fingerprint == self.fingerprint, "queued"), else_="dropped")


#: The values of a task that isn't leased.
_FREE = {"lease": None, "worker": None, "until": None}


def _needs(cell: Cell, tests: Tests) -> dict[str, Any]:
    gpus = tests.gpus if cell.device == "cuda" else 0
    low, high = CAPABILITIES[cell.flash_attention] if gpus else (0, 999)
    return {
        "python": cell.python,
        "gpus": gpus,
        "memory": tests.memory,
        "low": low,
        "high": high,
        "labels": _labels(tests),
        "rank": -gpus,  # a machine with GPUs first takes cells that others can't run
    }


def _labels(tests: Tests) -> str:
    return " ".join(sorted(tests.labels))


def _end(connection: Connection, lease: str, how: str, now: datetime) -> bool:
    """Record how a lease ended. A lost or returned lease may still become late; any other end is final."""
    open_lease = (
        LEASE.c.how.is_(None) if how != "late" else LEASE.c.how.is_(None) | LEASE.c.how.in_(["lost", "returned"])
    )
    values = (
        update(LEASE).where(LEASE.c.id == lease, open_lease).values(how=how, ended=func.coalesce(LEASE.c.ended, now))
    )
    return bool(connection.execute(values).rowcount)


# Statements that are executed for every cell are built once: building one takes longer than executing it.

_LOST = select(TASK.c.lease).where(TASK.c.state == "leased", TASK.c.until <= bindparam("now", type_=Utc)).limit(100)

#: The unfinished runs that have cells in the queue, none of which is left to run.
_ENDED = select(RUN.c.id).where(
    RUN.c.state == "running",
    exists().where(TASK.c.run_id == RUN.c.id),
    ~exists().where(TASK.c.run_id == RUN.c.id, TASK.c.state.in_(["queued", "leased"])),
)
_HAS_ENDED = _ENDED.where(RUN.c.id == bindparam("run"))

_OF_TASK = (
    select(RUN.c.name, CELL.c.name, TASK.c.suite, TASK.c.attempt)
    .join_from(TASK, RUN, RUN.c.id == TASK.c.run_id)
    .join(CELL, CELL.c.id == TASK.c.cell_id)
    .where(TASK.c.id == bindparam("task"))
)

_GOING = (
    select(TASK.c.id, TASK.c.until)
    .join_from(LEASE, TASK, TASK.c.lease == LEASE.c.id)
    .where(TASK.c.state == "leased", LEASE.c.id == bindparam("lease"))
    .where(LEASE.c.worker == bindparam("worker"), LEASE.c.token == bindparam("token"))
)

_OF_LEASE = (
    select(LEASE.c.how, LEASE.c.task_id, TASK.c.run_id, TASK.c.attempt, CELL.c.name.label("cell"))
    .join_from(LEASE, TASK)
    .join(CELL, CELL.c.id == TASK.c.cell_id)
    .where(LEASE.c.id == bindparam("lease"))
)
