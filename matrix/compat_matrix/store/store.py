"""The store: runs, their cells, and the results."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from sqlalchemy import Connection, Engine, Select, and_, case, func, select, text, true, update

from ..cells import Cell
from ..errors import MatrixError, NotFoundError
from ..results import CellResult, Figure, Measured, Past, Run, State, Summary
from ..words import plural
from . import database, foreign, inserts, queries
from .foreign import check_schema
from .models import CELL, FAILED, NODEID, PLANNED, RESULT, RUN, TEST, TEXT


class Store(AbstractContextManager["Store"]):
    """Results in a database; a context manager. Thread-safe.

    Each writing method is one transaction. Every method raises `MatrixError` if the database fails or has no such run.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name = engine, name
        self._reading, self._writing = database.reading(engine), database.writing(engine)

    @classmethod
    def open(cls, url: str, *, create: bool = True, foreign: bool = False) -> Store:
        """Open a store; it is created or migrated if needed.

        Args:
            url: a SQLAlchemy URL; a plain path is a SQLite file.
            foreign: check the schema of a SQLite file first: it may be from anywhere.

        Raises:
            MatrixError: it can't be reached or written, is corrupt, isn't a store, or is from another version; or it doesn't
                exist and `create` is false.
        """
        parsed = database.parse(url)
        name = url if "://" not in url else parsed.render_as_string(hide_password=True)
        with database.explained(name):
            engine = database.connect(parsed, create=create)
            try:
                if foreign:
                    check_schema(engine)
                database.migrate(engine, create=create)
            except BaseException:
                engine.dispose()
                raise
        return cls(engine, name)

    @property
    def url(self) -> str:
        """The URL of the database, with its password."""
        return self.engine.url.render_as_string(hide_password=False)

    def close(self) -> None:
        """Close the connections to the database."""
        self.engine.dispose()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def project(self) -> str:
        """The name of the project whose runs the store has; empty if that isn't known."""
        return next((str(row.content) for row in self.rows(queries.PROJECT)), "")

    # Writing.

    def claim(self, project: str) -> None:
        """Note the project whose runs the store has, unless it is known or `project` is empty."""
        if project and not self.project:
            with self.writing() as connection:
                inserts.document(connection, "project", project)

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
        submission: Mapping[str, str] | None = None,
        once: str = "",
    ) -> str:
        """Create a run of cells; returns its id.

        Args:
            excluded: excluded cells, with the reasons.
            axes: the text of the axes file.
            label: a name for the run, which need not be unique.
            partial: whether its cells run anything other than their whole default suite; `current` and ``latest`` leave such runs out.
            submission: the ``suite`` and the ``fingerprint`` of a run that waits for a service.
            once: the end of the id; if a run has it already, that one is returned, and none is created.
        """
        started = datetime.now(timezone.utc)
        with self.writing() as connection:
            inserts.lock(connection)  # of two that are submitted at once, the second must see the first
            if once and (same := connection.scalar(select(RUN.c.name).where(RUN.c.name.endswith(f"-{once}")))):
                return str(same)
            name = f"{started:%Y%m%d-%H%M%S}-{once or secrets.token_hex(2)}"
            while connection.scalar(select(RUN.c.id).where(RUN.c.name == name)) is not None:
                name = f"{name[:15]}-{secrets.token_hex(2)}"
            run = Run(name, started, None, "running", label, command, host, revision, partial, "")
            key = inserts.new_run(connection, run, axes, {**dict.fromkeys(cells), **excluded})
            if submission is not None:
                inserts.submit(connection, key, **submission, again={})
        return name

    def add(self, run: str, found: CellResult) -> None:
        """Store a result; storing the same run, cell and attempt again changes nothing.

        A cell that the run didn't plan is added to it.
        """
        with self.writing() as connection:
            inserts.add_result(connection, inserts.key(connection, run), found)

    def finish(self, run: str, state: str) -> None:
        """Set the state of a run, such as ``finished`` or ``interrupted``, or ``running`` to continue it."""
        with self.writing() as connection:
            inserts.finish(connection, inserts.key(connection, run), state)

    # Reading.

    def runs(self, limit: int | None = None, after: str = "", **where: object) -> list[Run]:
        """Runs, newest first: at most `limit`, after the one with an id, and with these values."""
        given = {name: value for name, value in where.items() if value is not None}
        query = queries.runs(limit is not None, bool(after), tuple(given))
        return [Run(*row) for row in self.rows(query, most=limit, after=after, **given)]

    def resolve(self, text: str) -> str:
        """The id of a run by its id, its label, the beginning of its id, ``latest``, or ``latest~1`` for the one before.

        The id of a run in parts is that of its first one. Of several runs with a label, it is the newest. A partial run is the
        latest only if there is no other.

        Raises:
            NotFoundError: there is no such run, or several match.
        """
        known = self.runs()
        if match := re.fullmatch(r"latest(?:~(\d{1,9}))?", text):
            back = int(match[1] or 0)
            wholes = [*dict.fromkeys(one.whole for one in [one for one in known if not one.partial] or known)]
            if back < len(wholes):
                return wholes[back]
            raise NotFoundError(f"there is no {text}: the store {self.name} has {plural(len(wholes), 'run')}")
        named = [one for one in known if one.id == text] or [one for one in known if text and one.label == text][:1]
        found = named or [one for one in known if text and one.id.startswith(text)]
        wholes = [*dict.fromkeys(one.whole for one in found)]
        if len(wholes) == 1:
            return wholes[0]
        some = ", ".join([one.id for one in found or known][:5]) or "none"
        if found:
            raise NotFoundError(f"{len(wholes)} runs begin with {text!r}, such as {some}")
        raise NotFoundError(f"no run is called {text!r}; there are {some}{', and others' * (len(known) > 5)}")

    def wholes(self) -> list[str]:
        """The ids of all runs, newest first; of a run in parts that of its first one."""
        return [*dict.fromkeys(row.whole for row in self.rows(queries.WHOLES))]

    def parts(self, run: str) -> list[Run]:
        """The parts of a run, in the order received; only the run itself if it has no others."""
        return self.runs(whole=self.run(run).whole)[::-1]

    def run(self, run: str) -> Run:
        """A run by its id: this part of it."""
        if not (found := self.runs(name=run)):
            raise inserts.unknown(run)
        return found[0]

    def last(self) -> Run | None:
        """The whole run that began last and wasn't cancelled; None if there is none."""
        return next((Run(*row) for row in self.rows(queries.LAST)), None)

    def summary(self, *runs: str, brief: bool = False) -> dict[Cell, Summary]:
        """Every cell of runs, in the order planned, with the result that counts: the latest, and of several runs or parts the newest.

        Args:
            brief: in any order, and without times, attempts and the numbers of tests that didn't fail; which is faster.
        """
        order = () if brief else (RUN.c.id, PLANNED.c.position)
        query = queries.summary(brief=brief).where(queries.of_run(*runs)).order_by(*order)
        found: dict[Cell, Summary] = {}
        number = 0
        with self.reading() as connection:
            for rows in connection.execute(query).partitions(1000):  # all at once, garbage collection would take long
                found.update(map(queries.summary_of, rows))
                number += len(rows)
            if len(found) < number:  # several parts have a cell
                again = query.order_by(None).order_by(*queries.COUNTS_LAST)
                found.update(map(queries.summary_of, connection.execute(again)))
            for run in () if found else runs:
                inserts.key(connection, run)
        return found

    def failed(self, runs: Iterable[str]) -> dict[str, dict[Cell, Summary]]:
        """The cells that failed in each of these runs, without their times and the numbers of tests that didn't fail."""
        found: dict[str, dict[Cell, Summary]] = {}
        query = queries.summary(RUN.c.name, brief=True).where(RESULT.c.verdict == "failed")
        for names in queries.chunks(runs):
            for row in self.rows(query.where(RUN.c.name.in_(names))):
                cell, summary = queries.summary_of(row[:-1])
                found.setdefault(row.name, {})[cell] = summary
        return found

    def changed_tests(
        self, old: str, new: str, cells: Iterable[Cell]
    ) -> tuple[dict[Cell, list[str]], dict[Cell, list[str]]]:
        """Of cells that failed in two runs: the tests that ran in both and failed only in the new one, and only in the old one."""
        with self.reading() as connection:
            before, after = (_failed(connection, run) for run in (old, new))
            still = {*cells} & before.keys() & after.keys()  # runs may go on meanwhile
            both = [(before[cell], after[cell]) for cell in still if before[cell] != after[cell]]
            return _failed_once(connection, [pair[::-1] for pair in both]), _failed_once(connection, both)

    def current(self, runs: Collection[str] | None = None) -> dict[Cell, Past]:
        """Every cell, sorted, with its newest result in all whole runs, or in the given runs.

        A run in which the cell wasn't run or was only planned counts if no other run has the cell.
        """
        return {one.cell: one for one in sorted(self.newest(runs))}

    def newest(self, runs: Collection[str] | None = None, *, cell: Cell | None = None) -> list[Past]:
        """As `current`, in any order, with the exact versions; only of one cell if it is given."""
        if runs is None:
            rows = self.rows(queries.CURRENT_OF_CELL, cell=cell.name) if cell else self.rows(queries.CURRENT)
            return [queries.past_of(row, queries.versions_of(row.versions)) for row in rows]
        own = true() if cell is None else CELL.c.name == cell.name
        more = (*queries.VERSION_FIELDS, *queries.RUN_FIELDS)
        with self.reading() as connection:
            return queries.with_versions(connection, queries.first(*more, where=and_(queries.of_run(*runs), own)))

    def in_each_environment(self, cells: Iterable[Cell]) -> list[Past]:
        """The newest results of each of these cells whose tests ran, one for each of its environments, in whole runs."""
        best: Select[Any] = select(func.max(RESULT.c.id)).select_from(queries.RESULTS)
        best = best.where(RUN.c.partial.is_(False), queries.HAS_ENDED, queries.IS_LAST)
        best = best.group_by(RESULT.c.cell_id, *queries.VERSION_FIELDS)
        query = queries.summary(*queries.VERSION_FIELDS, *queries.RUN_FIELDS, every=True)
        found: list[Past] = []
        with self.reading() as connection:
            for names in queries.chunks(cell.name for cell in cells):
                own = best.where(CELL.c.name.in_(names))
                found += queries.with_versions(connection, query.where(RESULT.c.id.in_(own)))
        return found

    def totals(self, runs: Iterable[str]) -> dict[str, Counter[State]]:
        """The number of cells in each state, for each of these runs."""
        totals: dict[str, Counter[State]] = {one: Counter() for one in runs}
        without = case((PLANNED.c.excluded.is_not(None), "excluded"), else_="unfinished")
        state = func.coalesce(RESULT.c.verdict, without).label("state")
        query = queries.summary().with_only_columns(RUN.c.name, state, func.count()).group_by(RUN.c.name, state)
        for names in queries.chunks(totals):
            for name, found, count in self.rows(query.where(RUN.c.name.in_(names))):
                totals[name][found] = count
        return totals

    def past(self, run: str, cell: Cell, attempt: int | None = None) -> Past | None:
        """A result of a cell in a run without its tests, chosen as by `result`; None if the run has none."""
        query = queries.of_result(queries.summary(*queries.RUN_FIELDS, every=True), attempt is not None)
        return next(map(queries.past_of, self.rows(query, **queries.named(run, cell, attempt))), None)

    def result(self, run: str, cell: Cell, attempt: int | None = None, *, log: bool = True) -> CellResult:
        """The whole result of a cell in a run: the one that counts, or of an attempt in this part of the run, or else another part.

        Args:
            log: include the log, which may be large.

        Raises:
            NotFoundError: the run has no result of the cell.
        """
        with self.reading() as connection:
            found = queries.read_result(connection, run, cell, attempt, log=log)
            if found is None:
                inserts.key(connection, run)
                raise NotFoundError(f"the run {run} has no result of {cell}")
        return found

    def environment(self, run: str, cell: Cell) -> dict[str, Any]:
        """The environment in the result of a cell that counts; empty if it has none."""
        rows = self.rows(queries.of_result(queries.ENVIRONMENT), **queries.named(run, cell))
        return dict(queries.environment_of(rows[0].content if rows else None))

    def lost_tests(
        self, run: str, pairs: Callable[[Collection[Cell]], Iterable[tuple[Cell, Cell]]]
    ) -> list[tuple[Cell, Cell, dict[str, str]]]:
        """The tests that ran in one cell of a run and not in another, in the results that count.

        Args:
            pairs: called with the cells in which tests ran; returns pairs of the other cell and the one.

        Returns:
            The pair, and the reasons of the tests that were skipped in the other cell by name, empty for those it hasn't.
        """
        counting = queries.first(RESULT.c.id.label("key"), where=queries.of_run(run))
        found = []
        with self.reading() as connection:
            keys = {queries.cell_of(row): row.key for row in connection.execute(counting) if row.key is not None}
            ran: dict[int, set[int]] = {}
            for some in queries.chunks(keys.values()):
                query = select(TEST.c.result_id, TEST.c.nodeid_id).where(TEST.c.outcome != "skipped")
                for result, test in connection.execute(query.where(TEST.c.result_id.in_(some))):
                    ran.setdefault(result, set()).add(test)
            for other, one in pairs([cell for cell, key in keys.items() if key in ran]):
                said: dict[str, str] = {}
                own = and_(TEST.c.nodeid_id == NODEID.c.id, TEST.c.result_id == keys[other])
                query = select(NODEID.c.name, TEXT.c.content).select_from(NODEID).outerjoin(TEST, own)
                query = query.outerjoin(TEXT, TEXT.c.id == TEST.c.message_id)
                for some in queries.chunks(ran[keys[one]] - ran[keys[other]]):
                    rows = connection.execute(query.where(NODEID.c.id.in_(some)))
                    said |= {name: message or "" for name, message in rows}
                if said:
                    found.append((other, one, dict(sorted(said.items()))))
        return found

    def figures(self, run: str) -> dict[Cell, list[Figure]]:
        """The figures of a run, by cell, sorted by name: those of the results that count."""
        counting = queries.first(RESULT.c.id.label("key"), where=queries.of_run(run)).subquery()
        with self.reading() as connection:
            found = queries.measured(connection, queries.MEASURED.where(RESULT.c.id.in_(select(counting.c.key))))
        return {cell: [one.figure for one in every] for cell, every in found.items()}

    def measured(self, runs: Iterable[str]) -> dict[Cell, list[Measured]]:
        """The figures of runs by cell, in the order received."""
        with self.reading() as connection:
            return queries.measured(connection, queries.MEASURED.where(queries.of_run(*runs)))

    def series(self, cell: Cell) -> list[Measured]:
        """The figures of a cell's last 100 results that have any, in the order in which their runs began."""
        with self.reading() as connection:
            found = queries.measured(connection, queries.LAST_MEASURED, cell=cell.name).get(cell, [])
        return sorted(found, key=lambda one: one.run.started)

    def history(self, cell: Cell, *, limit: int | None = None) -> list[Past]:
        """Attempts at a cell, at most the `limit` newest ones: the newest run and its latest attempt first."""
        return [*map(queries.past_of, self.rows(queries.history(limit is not None), cell=cell.name, most=limit))]

    def plans(self, cell: Cell) -> list[str]:
        """The ids of the runs that have planned a cell, newest first."""
        return [row.name for row in self.rows(queries.PLANS, cell=cell.name)]

    # Between stores.

    def merge(
        self, other: Store, runs: Collection[str] | None = None, *, project: str = "", any_project: bool = False
    ) -> list[str]:
        """Copy everything that this store lacks from another's runs, or from the given ones; returns the ids of the copied runs.

        Each run is one transaction. Repeating it copies nothing.

        Args:
            project: the name of this store's project, if not the one that it knows.
            any_project: copy also the runs of another project.

        Raises:
            MatrixError: a part of what is lacking isn't valid, or the other store is of another project. Then nothing has been copied.
        """
        ours = project or self.project
        with other.reading() as there:
            theirs = foreign.project(there)
            if ours and theirs and not any_project and canonicalize_name(ours) != canonicalize_name(theirs):
                said = f"the store {other.name} has the runs of the project {theirs}, and this one those of {ours}"
                raise MatrixError(f"{said}; `kernel-compat-matrix merge --any-project` copies them all the same")
        with other.reading() as there:
            found = [one for one in foreign.runs(there) if runs is None or one.run.id in runs]
        with self.reading() as here:
            for copied in found:
                known = {*foreign.attempts(here, copied.run.id)}
                copied.attempts[:] = [one for one in copied.attempts if one not in known]
        with other.reading() as there:
            for copied in found:
                for attempt in copied.attempts:
                    foreign.result(there, copied.run.id, *attempt)
        self.claim(ours or ("" if self.runs(1) else theirs))
        return [copied.run.id for copied in found if self._merge(other, *copied)]

    def _merge(
        self, other: Store, run: Run, axes: str, planned: Mapping[Cell, str | None], lacking: Sequence[tuple[Cell, int]]
    ) -> bool:
        """Copy a run and its lacking results; returns whether something has changed."""
        with self.writing() as connection, other.reading() as there:
            inserts.lock(connection)
            query = select(RUN.c.id, RUN.c.finished).where(RUN.c.name == run.id)
            ours = connection.execute(query).one_or_none()
            if ours is None:
                key, changed = inserts.new_run(connection, run, axes, planned), True
            else:
                key, changed = ours.id, inserts.plan(connection, ours.id, planned)
                if run.finished and (ours.finished is None or ours.finished < run.finished):
                    values = {"state": run.state, "finished": run.finished}
                    connection.execute(update(RUN).where(RUN.c.id == key).values(values))
                    changed = True
            for cell, attempt in lacking:
                inserts.add_result(connection, key, foreign.result(there, run.id, cell, attempt))
        return changed or bool(lacking)

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
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
                part = Path(folder, "store.db")
                with Store.open(str(part)) as store:
                    store.merge(self, runs)
                    database.set_journal(store.engine, "DELETE")
                part.replace(target)
        except OSError as error:
            raise MatrixError(f"{target} can't be written: {error}") from error

    def damage(self) -> str:
        """What is wrong with the database, if it can be read; empty if nothing is. It reads all of it."""
        with self.reading() as connection:
            return database.damage(connection)

    def rows(self, query: Select[Any], **parameters: object) -> Sequence[Any]:
        """The rows of a query."""
        with self.reading() as connection:
            return connection.execute(query, parameters).all()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection whose errors are raised as `MatrixError`."""
        with database.explained(self.name), self._reading.connect() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A writing transaction."""
        with database.explained(self.name), self._writing.begin() as connection:
            yield connection


def _failed(connection: Connection, run: str) -> dict[Cell, int]:
    """The keys of the results that failed; of several in one cell that of the newest."""
    query = queries.summary(RESULT.c.id, brief=True).where(queries.of_run(run), RESULT.c.verdict == "failed")
    return {queries.cell_of(row): row[-1] for row in connection.execute(query.order_by(RESULT.c.id))}


def _failed_once(connection: Connection, pairs: Iterable[tuple[int, int]]) -> dict[Cell, list[str]]:
    """The tests that failed in the first result of a pair and not in the second, but ran there; by cell, sorted."""
    found: dict[Cell, list[str]] = {}
    for some in queries.chunks(pairs):
        failed: dict[int, set[int]] = {key: set() for pair in some for key in pair}
        query = select(TEST.c.result_id, TEST.c.nodeid_id).where(TEST.c.result_id.in_(failed))
        for result, test in connection.execute(query.where(text(f"test.{FAILED}"))):
            failed[result].add(test)
        once = {other: tests for one, other in some if (tests := failed[one] - failed[other])}
        ran = select(*queries.CELL_FIELDS, TEST.c.result_id, TEST.c.nodeid_id, NODEID.c.name)
        ran = ran.select_from(queries.RESULTS).join(TEST, TEST.c.result_id == RESULT.c.id).join(NODEID)
        ran = ran.where(TEST.c.result_id.in_(once), TEST.c.outcome != "skipped")
        for keys in queries.chunks(set[int]().union(*once.values())):
            for row in connection.execute(ran.where(TEST.c.nodeid_id.in_(keys))):
                if row.nodeid_id in once[row.result_id]:
                    found.setdefault(queries.cell_of(row), []).append(row.name)
    return {cell: sorted(tests) for cell, tests in found.items()}
