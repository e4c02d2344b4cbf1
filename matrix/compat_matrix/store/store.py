"""The store: runs, their cells, and the results."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Select, and_, false, or_, select, text, true, update
from sqlalchemy.exc import IntegrityError

from ..cells import Cell, many
from ..errors import MatrixError
from ..results import CellResult, Outcome, Test
from . import database, inserts, models, queries
from .models import CELL, PLANNED, RESULT, RUN, TEXT
from .records import Newest, Past, Provenance, Run, State, Summary


class Store:
    """Results in a database; a context manager. Thread-safe.

    Each writing method is one transaction. Every method raises `MatrixError` if the
    database fails or has no such run.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self.name = name

    @classmethod
    def open(cls, url: str, *, create: bool = True) -> Store:
        """Open a store; it is created or migrated if needed.

        Args:
            url: a SQLAlchemy URL; a plain path is a SQLite file.
            create: create the store if it doesn't exist.

        Raises:
            MatrixError: it can't be reached or written, is corrupt, isn't a store, or is from a newer version; or it doesn't
                exist and `create` is false.
        """
        parsed = database.parse(url)
        name = url if "://" not in url else parsed.render_as_string(hide_password=True)
        with database.explained(name):
            engine = database.connect(parsed, create=create)
            try:
                database.migrate(engine, create=create)
            except BaseException:
                engine.dispose()
                raise
        return cls(engine, name)

    @property
    def dialect(self) -> str:
        """``"sqlite"``, ``"postgresql"``."""
        return self._engine.dialect.name

    def close(self) -> None:
        """Close the connections to the database."""
        self._engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing.

    def new_run(
        self,
        cells: Sequence[Cell],
        *,
        excluded: Mapping[Cell, str] = {},
        axes: str = "",
        command: str = "",
        label: str = "",
        host: str = "",
        revision: str = "",
        partial: bool = False,
    ) -> str:
        """Create a run of cells; returns its id.

        Args:
            excluded: excluded cells, with the reasons.
            axes: the text of the axes file.
            label: a name for the run, which need not be unique.
            partial: whether its cells run less than their default suite; `current` and ``latest`` leave such runs out.
        """
        with self.writing() as connection:
            given = Provenance(axes, command, label, host, revision, partial)
            _, name = inserts.begin(connection, cells, excluded, given)
        return name

    def add(self, run: str, found: CellResult) -> None:
        """Store a result; storing the same run, cell and attempt again changes nothing.

        A cell that the run didn't plan is added to it.
        """
        try:
            with self.writing() as connection:
                inserts.add_result(connection, inserts.key(connection, run), found)
        except IntegrityError:  # another process has stored it meanwhile
            with self.writing() as connection:
                inserts.add_result(connection, inserts.key(connection, run), found)

    def finish(self, run: str, state: str) -> None:
        """Set the state of a run, such as ``finished`` or ``interrupted``, or ``running`` to continue it."""
        finished = None if state == "running" else datetime.now(timezone.utc)
        with self.writing() as connection:
            key = inserts.key(connection, run)
            connection.execute(update(RUN).where(RUN.c.id == key).values(state=state, finished=finished))

    # Reading.

    def runs(self) -> list[Run]:
        """All runs, newest first."""
        with self.reading() as connection:
            query = select(*queries.RUN_FIELDS).order_by(*queries.NEWEST_FIRST)
            return [Run(*row) for row in connection.execute(query)]

    def resolve(self, text: str) -> str:
        """The id of a run by its id, its label, the beginning of its id, ``latest``, or ``latest~1`` for the one before.

        Of several runs with a label, the newest. A partial run is the latest only if there is no other.

        Raises:
            MatrixError: there is no such run, or several match.
        """
        known = self.runs()
        if not known:
            raise MatrixError(f"the store {self.name} has no runs")
        if match := re.fullmatch(r"latest(?:~(\d{1,9}))?", text):
            back, whole = int(match[1] or 0), [one for one in known if not one.partial] or known
            if back < len(whole):
                return whole[back].id
            raise MatrixError(f"there is no {text}: the store {self.name} has {many(len(whole), 'run')}")
        for same in ([r for r in known if r.id == text], [r for r in known if text and r.label == text]):
            if same:
                return same[0].id
        begin = [one.id for one in known if text and one.id.startswith(text)]
        if len(begin) == 1:
            return begin[0]
        if begin:
            raise MatrixError(f"{len(begin)} runs begin with {text!r}: {_some(begin)}")
        raise MatrixError(f"no run is called {text!r}; there are {_some([one.id for one in known])}")

    def run(self, run: str) -> Run:
        """A run by its id."""
        with self.reading() as connection:
            row = connection.execute(select(*queries.RUN_FIELDS).where(RUN.c.name == run)).one_or_none()
        if row is None:
            raise MatrixError(f"the store {self.name} has no run {run!r}")
        return Run(*row)

    def axes(self, run: str) -> str:
        """The text of the axes file, as passed to `new_run`."""
        query = select(TEXT.c.content).join(RUN).where(RUN.c.name == run)
        with self.reading() as connection:
            return connection.scalar(query) or ""

    def summary(self, run: str) -> dict[Cell, Summary]:
        """Every cell of a run, in the order planned, with its latest result. One query."""
        with self.reading() as connection:
            rows = connection.execute(queries.summary().where(RUN.c.name == run).order_by(PLANNED.c.position)).all()
            if not rows:
                inserts.key(connection, run)
        return dict(map(queries.summary_of, rows))

    def compare(self, old: str, new: str) -> dict[Cell, tuple[Summary | None, Summary | None]]:
        """The cells that ended differently in two runs, and those that failed in both; None if a run doesn't have the cell."""
        found: dict[Cell, tuple[Summary | None, Summary | None]] = {}
        with self.reading() as connection:
            ends: list[dict[int, tuple[str | None, str | None]]] = []
            for name in (old, new):
                inserts.key(connection, name)
                ends.append({row[0]: (row[1], row[2]) for row in connection.execute(queries.verdicts(name))})
            before, after = ends
            keys = [
                key
                for key in before.keys() | after.keys()
                if before.get(key) != after.get(key) or before[key][0] == "failed"
            ]
            for some in inserts.chunks(sorted(keys)):
                own = queries.summary().where(PLANNED.c.cell_id.in_(some))
                was, now = (
                    dict(map(queries.summary_of, connection.execute(own.where(RUN.c.name == name))))
                    for name in (old, new)
                )
                found |= {one: (was.get(one), now.get(one)) for one in was.keys() | now.keys()}
        return found

    def current(self, runs: Collection[str] | None = None) -> dict[Cell, Past]:
        """Every cell, sorted, with its newest result in all whole runs, or in the given runs.

        A run in which the cell wasn't run or was only planned counts if no other run has the cell.
        """
        if runs is None:
            return {one.cell: one.past for one in sorted(self.newest())}
        with self.reading() as connection:
            rows = connection.execute(queries.newest(runs)).all()
        return dict(sorted((queries.cell_of(row), queries.past_of(row)) for row in rows))

    def newest(self, cells: Collection[Mapping[str, str]] = ({},)) -> list[Newest]:
        """As `current`, with the exact versions, for the cells with any of these combinations of values of axes."""
        wanted = or_(false(), *(and_(true(), *(CELL.c[axis] == value for axis, value in one.items())) for one in cells))
        with self.reading() as connection:
            rows = connection.execute(queries.current().where(wanted)).all()
            keys = {row.run_id for row in rows}
            runs: dict[int, Run] = {}
            for some in inserts.chunks(keys):
                query: Select[Any] = select(RUN.c.id, *queries.RUN_FIELDS).where(RUN.c.id.in_(some))
                runs |= {row[0]: Run(*row[1:]) for row in connection.execute(query)}
        found = ((*queries.summary_of(row), row) for row in rows)
        return [
            Newest(cell, Past(runs[row.run_id], one), queries.versions_of(row.versions)) for cell, one, row in found
        ]

    def totals(self) -> dict[str, Counter[State]]:
        """The number of cells in each state, by run."""
        totals: dict[str, Counter[State]] = {one.id: Counter() for one in self.runs()}
        with self.reading() as connection:
            for name, found, count in connection.execute(queries.totals()):
                totals.setdefault(name, Counter())[found] = count
        return totals

    def unfinished(self, run: str) -> list[Cell]:
        """The planned cells without a result, in the order planned."""
        return [found for found, summary in self.summary(run).items() if summary.state == "unfinished"]

    def result(self, run: str, cell: Cell, attempt: int | None = None, *, log: bool = True) -> CellResult:
        """The whole result of a cell: of its latest attempt in a run, or of the given one.

        Args:
            log: include the log, which may be large.

        Raises:
            MatrixError: the run has no result of the cell.
        """
        query = queries.result(run, cell)
        if attempt is not None:
            query = query.where(RESULT.c.attempt == attempt)
        if not log:
            query = query.with_only_columns(*(one for one in query.selected_columns if one.key != "log"))
        with self.reading() as connection:
            row = connection.execute(query).one_or_none()
            if row is None:
                inserts.key(connection, run)
                raise MatrixError(f"the run {run} has no result of {cell}")
            tests = connection.execute(queries.tests(row.id))
            return CellResult(
                cell=cell,
                verdict=row.verdict,
                kind=row.kind,
                reason=row.reason,
                started=row.started,
                seconds=row.seconds,
                tests=tuple(Test(name, outcome, seconds, said or "") for name, outcome, seconds, said in tests),
                environment=json.loads(row.environment or "{}"),
                pins=row.pins or "",
                command=tuple(json.loads(row.command or "[]")),
                log=(row.log or "") if log else "",
                attempt=row.attempt,
            )

    def environment(self, run: str, cell: Cell) -> dict[str, Any]:
        """The environment that a cell reported in its latest attempt; empty if it has none."""
        with self.reading() as connection:
            found = connection.scalar(queries.environment(run, cell))
        return dict(json.loads(found or "{}"))

    def failures(self, run: str) -> dict[Cell, dict[str, Outcome]]:
        """The tests that failed in a run, by cell and node id. One query, without the tests that passed."""
        failures: dict[Cell, dict[str, Outcome]] = {}
        with self.reading() as connection:
            for row in connection.execute(queries.outcomes(run).where(text(f"test.{models.FAILED}"))):
                failures.setdefault(queries.cell_of(row), {})[row[5]] = row[6]
        return failures

    def outcomes(self, run: str, cells: Iterable[Cell]) -> dict[Cell, dict[str, Outcome]]:
        """The outcomes of all tests of some cells, by node id."""
        found: dict[Cell, dict[str, Outcome]] = {one: {} for one in cells}
        with self.reading() as connection:
            for names in inserts.chunks(one.name for one in found):
                keys = select(CELL.c.id).where(CELL.c.name.in_(names))
                for row in connection.execute(queries.outcomes(run).where(PLANNED.c.cell_id.in_(keys))):
                    found[queries.cell_of(row)][row[5]] = row[6]
        return found

    def history(self, cell: Cell, *, run: str | None = None, limit: int | None = None) -> list[Past]:
        """Attempts at a cell, in one run or in all, the newest run and its latest attempt first; at most `limit`."""
        query = queries.history(cell).limit(limit)
        if run is not None:
            query = query.where(RUN.c.name == run)
        with self.reading() as connection:
            rows = connection.execute(query).all()
        return [queries.past_of(row) for row in rows]

    # Between stores.

    def merge(self, other: Store, runs: Collection[str] | None = None) -> list[str]:
        """Copy everything that this store lacks from another's runs, or from the given ones; returns the ids of the copied runs.

        Each run is one transaction. Repeating it copies nothing.
        """
        wanted = (one for one in reversed(other.runs()) if runs is None or one.id in runs)
        return [one.id for one in wanted if self._merge(other, one)]

    def export(self, runs: Collection[str], path: str | os.PathLike[str]) -> None:
        """Write a SQLite store with only these runs.

        Raises:
            MatrixError: a run doesn't exist, or `path` exists or can't be written.
        """
        target = Path(path)
        for one in runs:
            self.run(one)
        if target.exists():
            raise MatrixError(f"{target} exists")
        part = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
        try:
            with Store.open(str(part)) as store:
                store.merge(self, runs)
                store.single_file()
            part.replace(target)
        except OSError as error:
            raise MatrixError(f"{target} can't be written: {error}") from error
        finally:
            for left in target.parent.glob(f"{part.name}*"):
                left.unlink()

    def single_file(self) -> None:
        """Merge SQLite's write-ahead log into the file, which can then be copied, and read on read-only media."""
        with database.explained(self.name):
            database.single_file(self._engine)

    def _merge(self, other: Store, theirs: Run) -> bool:
        with self.writing() as connection:
            ours = connection.execute(
                select(RUN.c.id, *queries.RUN_FIELDS).where(RUN.c.name == theirs.id)
            ).one_or_none()
            key = inserts.new_run(connection, theirs, other.axes(theirs.id)) if ours is None else ours[0]
            changed = ours is None
            if ours is not None and theirs.finished and (ours.finished is None or ours.finished < theirs.finished):
                values = {"state": theirs.state, "finished": theirs.finished}
                connection.execute(update(RUN).where(RUN.c.id == key).values(values))
                changed = True
            with other.reading() as connection_:
                planned_there = connection_.execute(queries.planned(theirs.id)).all()
                attempts_there = connection_.execute(queries.attempts(theirs.id)).all()
            here = {row[:5] for row in connection.execute(queries.planned(theirs.id))}
            lacking = {queries.cell_of(row): row.excluded for row in planned_there if row[:5] not in here}
            inserts.plan(connection, key, lacking, {one: why for one, why in lacking.items() if why is not None})
            attempts_here = {tuple(row) for row in connection.execute(queries.attempts(theirs.id))}
            for row in attempts_there:
                if tuple(row) not in attempts_here:
                    inserts.add_result(connection, key, other.result(theirs.id, queries.cell_of(row), row.attempt))
                    changed = True
            return changed or bool(lacking)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection whose errors are raised as `MatrixError`."""
        with database.explained(self.name), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A writing transaction."""
        with database.explained(self.name), database.writing(self._engine).begin() as connection:
            yield connection


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
