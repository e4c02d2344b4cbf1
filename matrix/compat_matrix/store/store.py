"""The store: runs, their cells, and the results."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Select, and_, case, func, select, text, true, update

from ..cells import Cell
from ..errors import MatrixError, NotFoundError
from ..results import CellResult, Figure
from ..words import plural
from . import database, foreign, inserts, queries
from .foreign import check_schema
from .models import CELL, FAILED, FIGURE, NODEID, PLANNED, RESULT, RUN, TEST, TEXT
from .records import Comparison, Measured, Newest, Past, Run, State, Summary

#: The number of runs whose figures of a cell are read.
_MEASURED = 100


class Store:
    """Results in a database; a context manager. Thread-safe.

    Each writing method is one transaction. Every method raises `MatrixError` if the database fails or has no such run.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self.name = name

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
        return self._engine.url.render_as_string(hide_password=False)

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
        submission: Mapping[str, str] | None = None,
    ) -> str:
        """Create a run of cells; returns its id.

        Args:
            excluded: excluded cells, with the reasons.
            axes: the text of the axes file.
            label: a name for the run, which need not be unique.
            partial: whether its cells run anything other than their whole default suite; `current` and ``latest`` leave such runs out.
            submission: the ``suite`` and the ``fingerprint`` of a run that waits for a service.
        """
        started = datetime.now(timezone.utc)
        with self.writing() as connection:
            name = f"{started:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
            while connection.scalar(select(RUN.c.id).where(RUN.c.name == name)) is not None:
                name = f"{name[:15]}-{secrets.token_hex(2)}"
            run = Run(name, started, None, "running", label, command, host, revision, partial)
            key = inserts.new_run(connection, run, axes, [*dict.fromkeys(cells)], excluded)
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
        finished = None if state == "running" else datetime.now(timezone.utc)
        with self.writing() as connection:
            key = inserts.key(connection, run)
            connection.execute(update(RUN).where(RUN.c.id == key).values(state=state, finished=finished))

    # Reading.

    def runs(self) -> list[Run]:
        """All runs, newest first."""
        return self._runs()

    def resolve(self, text: str) -> str:
        """The id of a run by its id, its label, the beginning of its id, ``latest``, or ``latest~1`` for the one before.

        Runs with the same label, commit, suite and axes file are parts of one run, whose id is that of its first part; a run
        that has all its cells again is another one. Of several runs with a label, the newest. A partial run is the latest only if
        there is no other.

        Raises:
            NotFoundError: there is no such run, or several match.
        """
        known = self.runs()
        if not known:
            raise NotFoundError(f"the store {self.name} has no runs")
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
        some = ", ".join([one.id for one in found or known][:5])
        if found:
            raise NotFoundError(f"{len(wholes)} runs begin with {text!r}, such as {some}")
        raise NotFoundError(f"no run is called {text!r}; there are {some}{', and others' * (len(known) > 5)}")

    def parts(self, run: str) -> list[Run]:
        """The parts of a run, in the order received; only the run itself if it has no others."""
        return self._runs(queries.of_run(self.run(run).id))[::-1]

    def run(self, run: str) -> Run:
        """A run by its id: this part of it."""
        with self.reading() as connection:
            key = inserts.key(connection, run)
        return self._runs(RUN.c.id == key)[0]

    def _runs(self, *conditions: Any) -> list[Run]:
        query = select(*queries.RUN_FIELDS).where(*conditions).order_by(*queries.NEWEST_FIRST)
        with self.reading() as connection:
            return [Run(*row) for row in connection.execute(query)]

    def axes(self, run: str) -> str:
        """The text of the axes file, as passed to `new_run`."""
        query = select(TEXT.c.content).join(RUN).where(RUN.c.name == run)
        with self.reading() as connection:
            return connection.scalar(query) or ""

    def summary(self, run: str, *, brief: bool = False) -> dict[Cell, Summary]:
        """Every cell of a run, in the order planned, with the result that counts: the latest, and of several parts the newest.

        Args:
            brief: in any order, and without times, attempts and the numbers of tests that didn't fail; which is faster.
        """
        order = () if brief else (RUN.c.id, PLANNED.c.position)
        query = queries.summary(brief=brief).where(queries.of_run(run)).order_by(*order)
        with self.reading() as connection:
            found = _counting(connection, query)
            if not found:
                inserts.key(connection, run)
        return found

    def compare(self, old: str, new: str) -> Comparison:
        """The cells that ended differently in two runs, and the tests that failed once in cells that failed both times."""
        cells: dict[Cell, tuple[Summary | None, Summary | None]] = {}
        with self.reading() as connection:
            before, after = (self._ends(connection, name) for name in (old, new))
            differing = [
                key for key in before.keys() | after.keys() if before.get(key, ())[:2] != after.get(key, ())[:2]
            ]
            for some in queries.chunks(sorted(differing)):
                own = queries.summary().where(PLANNED.c.cell_id.in_(some))
                was, now = (_counting(connection, own.where(queries.of_run(name))) for name in (old, new))
                cells |= {one: (was.get(one), now.get(one)) for one in was.keys() | now.keys()}
            both = [
                (before[key][2], after[key][2])
                for key in before.keys() & after.keys()
                if before[key][0] == after[key][0] == "failed" and before[key] != after[key]
            ]
            mended, broke = _failed_once(connection, both), _failed_once(connection, [pair[::-1] for pair in both])
        return Comparison(cells, broke, mended)

    def _ends(self, connection: Connection, run: str) -> dict[int, tuple[str | None, str | None, int]]:
        """Verdict, kind and key of the results that count, by the key of the cell: faster than summaries."""
        inserts.key(connection, run)
        query = queries.summary().where(queries.of_run(run)).order_by(*queries.COUNTS_LAST)
        rows = connection.execute(
            query.with_only_columns(PLANNED.c.cell_id, RESULT.c.verdict, RESULT.c.kind, RESULT.c.id)
        )
        return {row[0]: (row[1], row[2], row[3]) for row in rows}

    def current(self, runs: Collection[str] | None = None) -> dict[Cell, Past]:
        """Every cell, sorted, with its newest result in all whole runs, or in the given runs.

        A run in which the cell wasn't run or was only planned counts if no other run has the cell.
        """
        return {one.cell: one.past for one in sorted(self.newest(runs))}

    def newest(self, runs: Collection[str] | None = None, *, cell: Cell | None = None) -> list[Newest]:
        """As `current`, in any order, with the exact versions; only of one cell if it is given."""
        own = true() if cell is None else CELL.c.name == cell.name
        with self.reading() as connection:
            if runs is not None:
                more = (*queries.VERSION_FIELDS, *queries.RUN_FIELDS)
                return queries.newest_of(connection, queries.first(*more, where=and_(queries.of_run(*runs), own)))
            rows = connection.execute(queries.CURRENT.where(own))
            return [
                Newest(queries.cell_of(row), queries.past_of(row), queries.versions_of(row.versions)) for row in rows
            ]

    def in_each_environment(self, cells: Iterable[Cell]) -> list[Newest]:
        """The newest results of each of these cells whose tests ran, one for each of its environments, in whole runs."""
        best: Select[Any] = select(func.max(RESULT.c.id)).join_from(RESULT, RUN, RUN.c.id == RESULT.c.run_id)
        best = best.where(RUN.c.partial.is_(False), queries.HAS_ENDED, queries.IS_LAST)
        best = best.group_by(RESULT.c.cell_id, *queries.VERSION_FIELDS)
        query = queries.summary(*queries.VERSION_FIELDS, *queries.RUN_FIELDS, every=True)
        found: list[Newest] = []
        with self.reading() as connection:
            for names in queries.chunks(cell.name for cell in cells):
                own = RESULT.c.cell_id.in_(select(CELL.c.id).where(CELL.c.name.in_(names)))
                found += queries.newest_of(connection, query.where(RESULT.c.id.in_(best.where(own))))
        return found

    def totals(self, runs: Iterable[str]) -> dict[str, Counter[State]]:
        """The number of cells in each state, for each of these runs."""
        totals: dict[str, Counter[State]] = {one: Counter() for one in runs}
        without = case((PLANNED.c.excluded.is_not(None), "excluded"), else_="unfinished")
        state = func.coalesce(RESULT.c.verdict, without).label("state")
        query = queries.summary().with_only_columns(RUN.c.name, state, func.count()).group_by(RUN.c.name, state)
        with self.reading() as connection:
            for names in queries.chunks(totals):
                for name, found, count in connection.execute(query.where(RUN.c.name.in_(names))):
                    totals[name][found] = count
        return totals

    def past(self, run: str, cell: Cell, attempt: int | None = None) -> Past | None:
        """A result of a cell in a run without its tests, chosen as by `result`; None if the run has none."""
        query = queries.summary(*queries.RUN_FIELDS, every=True)
        with self.reading() as connection:
            row = connection.execute(query.where(RESULT.c.id == queries.result_key(run, cell, attempt))).one_or_none()
        return queries.past_of(row) if row else None

    def result(self, run: str, cell: Cell, attempt: int | None = None, *, log: bool = True) -> CellResult:
        """The whole result of a cell in a run: the one that counts, or of an attempt in this part of the run, or else another part.

        Args:
            log: include the log, which may be large.

        Raises:
            MatrixError: the run has no result of the cell.
        """
        with self.reading() as connection:
            found = queries.read_result(connection, run, cell, attempt, log=log)
            if found is None:
                inserts.key(connection, run)
                raise MatrixError(f"the run {run} has no result of {cell}")
        return found

    def environment(self, run: str, cell: Cell) -> dict[str, Any]:
        """The environment in the result of a cell that counts; empty if it has none."""
        query = select(TEXT.c.content).join(RESULT, RESULT.c.environment_id == TEXT.c.id)
        with self.reading() as connection:
            found = connection.scalar(query.where(RESULT.c.id == queries.result_key(run, cell)))
        return dict(queries.environment_of(found))

    def figures(self, run: str) -> dict[Cell, list[Figure]]:
        """The figures of a run, by cell, sorted by name: those of the results that count."""
        measured = self.measured(runs=[run])
        with self.reading() as connection:
            counting = {result for _, _, result in self._ends(connection, run).values()} if measured else set()
        found = {cell: [one.figure for one in every if one.result in counting] for cell, every in measured.items()}
        return {cell: figures for cell, figures in found.items() if figures}

    def measured(self, *, cell: Cell | None = None, runs: Collection[str] = ()) -> dict[Cell, list[Measured]]:
        """Figures by cell, in the order received: those in the given runs, or of one cell in the last 100 runs that measured any."""
        if cell is None:
            wanted = queries.of_run(*runs)
        else:
            last = select(RESULT.c.run_id).join_from(FIGURE, RESULT).join(CELL, CELL.c.id == RESULT.c.cell_id)
            last = last.where(CELL.c.name == cell.name).distinct().order_by(RESULT.c.run_id.desc()).limit(_MEASURED)
            wanted = and_(CELL.c.name == cell.name, RUN.c.id.in_(last))
        with self.reading() as connection:
            rows = connection.execute(queries.measured(wanted)).all()
            texts = queries.texts_of(connection, (row.environment_id for row in rows))
        devices = {key: str(queries.environment_of(content).get("device", "")) for key, content in texts.items()}
        found: dict[Cell, list[Measured]] = {}
        for row in rows:
            one = Measured(*queries.figure_of(row), devices.get(row.environment_id, ""), row.result_id)
            found.setdefault(queries.cell_of(row), []).append(one)
        return found

    def history(self, cell: Cell, *, run: str | None = None, limit: int | None = None) -> list[Past]:
        """Attempts at a cell, in one run or in all, the newest part of a run and its latest attempt first; at most `limit`."""
        query = queries.summary(*queries.RUN_FIELDS, every=True).where(CELL.c.name == cell.name).limit(limit)
        query = query.order_by(*queries.NEWEST_FIRST, RESULT.c.attempt.desc())
        if run is not None:
            query = query.where(queries.of_run(run))
        with self.reading() as connection:
            rows = connection.execute(query).all()
        return [queries.past_of(row) for row in rows]

    # Between stores.

    def merge(self, other: Store, runs: Collection[str] | None = None) -> list[str]:
        """Copy everything that this store lacks from another's runs, or from the given ones; returns the ids of the copied runs.

        Each run is one transaction. Repeating it copies nothing.

        Raises:
            MatrixError: a part of what is lacking isn't valid. Then nothing has been copied.
        """
        with other.reading() as there:
            found = [one for one in foreign.runs(there) if runs is None or one.run.id in runs]
        lacking = [(one, self._lacking(one)) for one in found]
        with other.reading() as there:
            for one, attempts in lacking:
                for attempt in attempts:
                    foreign.result(there, one.run.id, *attempt)
        return [one.run.id for one, attempts in lacking if self._merge(other, one, attempts)]

    def _lacking(self, theirs: foreign.Copied) -> list[tuple[Cell, int]]:
        """The cells and attempts of the results of a run that this store lacks."""
        with self.reading() as connection:
            here = {(queries.cell_of(row), row.attempt) for row in foreign.attempts(connection, theirs.run.id)}
        return [one for one in theirs.attempts if one not in here]

    def _merge(self, other: Store, theirs: foreign.Copied, lacking: list[tuple[Cell, int]]) -> bool:
        """Copy a run and its lacking results; returns whether something has changed."""
        run, axes, planned, _ = theirs
        excluded = {cell: why for cell, why in planned.items() if why is not None}
        with self.writing() as connection, other.reading() as there:
            inserts.lock(connection)
            query = select(RUN.c.id, RUN.c.finished).where(RUN.c.name == run.id)
            ours = connection.execute(query).one_or_none()
            if ours is None:
                key, changed = inserts.new_run(connection, run, axes, [*planned], excluded), True
            else:
                key, changed = ours.id, inserts.plan(connection, ours.id, planned, excluded)
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
                    store.single_file()
                part.replace(target)
        except OSError as error:
            raise MatrixError(f"{target} can't be written: {error}") from error

    def single_file(self) -> None:
        """Merge SQLite's write-ahead log into the file."""
        with database.explained(self.name):
            database.set_journal(self._engine, "DELETE")

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


def _counting(connection: Connection, query: Select[Any]) -> dict[Cell, Summary]:
    """The summaries that count, of the rows of `queries.summary` for one run."""
    found: dict[Cell, Summary] = {}
    number = 0
    for rows in connection.execute(query).partitions(1000):  # all at once, garbage collection would take long
        found.update(map(queries.summary_of, rows))
        number += len(rows)
    if len(found) < number:  # several parts have a cell
        found.update(map(queries.summary_of, connection.execute(query.order_by(None).order_by(*queries.COUNTS_LAST))))
    return found


def _failed_once(connection: Connection, pairs: Iterable[tuple[int, int]]) -> dict[Cell, list[str]]:
    """The tests that failed in the first result of a pair and not in the second, but ran there; by cell, sorted."""
    found: dict[Cell, list[str]] = {}
    for some in queries.chunks(pairs):
        failed: dict[int, set[int]] = {key: set() for pair in some for key in pair}
        query = select(TEST.c.result_id, TEST.c.nodeid_id).where(TEST.c.result_id.in_(failed))
        for result, test in connection.execute(query.where(text(f"test.{FAILED}"))):
            failed[result].add(test)
        once = {other: tests for one, other in some if (tests := failed[one] - failed[other])}
        ran = select(*queries.CELL_FIELDS, TEST.c.result_id, TEST.c.nodeid_id, NODEID.c.name).join_from(TEST, NODEID)
        ran = ran.join(RESULT, RESULT.c.id == TEST.c.result_id).join(CELL, CELL.c.id == RESULT.c.cell_id)
        ran = ran.where(TEST.c.result_id.in_(once), TEST.c.outcome != "skipped")
        for keys in queries.chunks(set[int]().union(*once.values())):
            for row in connection.execute(ran.where(TEST.c.nodeid_id.in_(keys))):
                if row.nodeid_id in once[row.result_id]:
                    found.setdefault(queries.cell_of(row), []).append(row.name)
    return {cell: sorted(tests) for cell, tests in found.items()}
