"""The store's inserts, in the caller's transaction."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timezone
from hashlib import blake2b
from typing import Any, get_args

from sqlalchemy import Column, Connection, and_, delete, func, insert, select, update

from .. import versions
from ..cells import AXES, Cell
from ..errors import NotFoundError
from ..results import ENDED, CellResult, Outcome, Run, options_of
from .models import CELL, DOCUMENT, FIGURE, LOG, MOST, NEWEST, NODEID, PLANNED, RESULT, RUN, SUBMISSION, TEST, TEXT
from .queries import NEWEST_FIRST, RUN_FIELDS, VERSION_FIELDS, chunks, exact_versions, first

#: The id (arbitrary) of the lock of `lock`.
_LOCK = 5_417_226_031


def lock(connection: Connection) -> None:
    """Make others that begin runs, insert or delete results, or migrate wait until this transaction ends.

    SQLite has one writer anyway. Without it, two of them may insert the same text at once.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))


def key(connection: Connection, name: str) -> int:
    """The primary key of the run with this name. A `NotFoundError` if there is no such run."""
    found: int | None = connection.scalar(select(RUN.c.id).where(RUN.c.name == name))
    if found is None:
        raise unknown(name)
    return found


def unknown(name: str) -> NotFoundError:
    """The error for a run that the store doesn't have."""
    return NotFoundError(f"the store has no run {name!r}")


def new_run(connection: Connection, values: Run, axes: str, planned: Mapping[Cell, str | None]) -> int:
    """Insert a run, perhaps as a part of an earlier one, with its cells, as in `plan`; returns its key."""
    lock(connection)  # of parts that begin at once, the second must see the first
    axes_id = _shared(connection, TEXT.c.content, [axes] if axes else []).get(axes)
    cells = [cell for cell, excluded in planned.items() if excluded is None]
    whole = _whole(connection, values, axes_id, cells) or values.id
    row = {**vars(values), "name": values.id, "axes_id": axes_id, "whole": whole}
    del row["id"]
    run: int = connection.scalars(RUN.insert().returning(RUN.c.id), row).one()
    plan(connection, run, planned)
    return run


def _whole(connection: Connection, new: Run, axes_id: int | None, cells: Collection[Cell]) -> str | None:
    """The newest run of the same label, commit, suite and axes, if the new run is a part of it.

    It isn't if it has all of that run's cells: then everything is run again. Without a label, uncommitted code may have
    changed between the two.
    """
    if not new.label and (not new.revision or new.revision.endswith("+")):
        return None
    same = (RUN.c.label == new.label, RUN.c.revision == new.revision, RUN.c.partial == new.partial)
    query = select(*RUN_FIELDS).where(*same, RUN.c.axes_id == axes_id).order_by(*NEWEST_FIRST)
    tests = _tests_of(new)
    earlier = next((run for row in connection.execute(query) if _tests_of(run := Run(*row)) == tests), None)
    if earlier is None:
        return None
    names = select(CELL.c.name).join_from(PLANNED, CELL).join(RUN, RUN.c.id == PLANNED.c.run_id)
    names = names.where(RUN.c.whole == earlier.whole, PLANNED.c.excluded.is_(None))
    return earlier.whole if {*connection.scalars(names)} - {one.name for one in cells} else None


def _tests_of(run: Run) -> object:
    """What the cells of a run test: the same for the same suite, arguments of pytest and origin of the packages."""
    return run.command.split(" ")[0], {**options_of(run.command), "axes": None}


def plan(connection: Connection, run: int, planned: Mapping[Cell, str | None]) -> bool:
    """Append the cells that a run doesn't have yet, excluded ones with the reason; returns whether there were any."""
    keys = _cell_keys(connection, planned)
    there = {*connection.scalars(select(PLANNED.c.cell_id).where(PLANNED.c.run_id == run))}
    new = [one for one in planned if keys[one.name] not in there]
    rows = [
        {"run_id": run, "cell_id": keys[one.name], "position": position, "excluded": planned[one]}
        for position, one in enumerate(new, len(there))
    ]
    if rows:
        connection.execute(PLANNED.insert(), rows)
        have_results = {*connection.scalars(select(NEWEST.c.cell_id).where(NEWEST.c.result_id.is_not(None)))}
        refresh_newest(connection, [keys[one.name] for one in new if keys[one.name] not in have_results])
    return bool(rows)


def finish(connection: Connection, run: int, state: str) -> None:
    """Set the state of a run, such as ``finished`` or ``interrupted``, or ``running`` to continue it."""
    finished = None if state == "running" else datetime.now(timezone.utc)
    connection.execute(update(RUN).where(RUN.c.id == run).values(state=state, finished=finished))


def submit(connection: Connection, run: int, suite: str, fingerprint: str, again: Mapping[Cell, int]) -> None:
    """Let a run wait for a service, which runs its unfinished cells and repeats those in `again`, with their attempts so far."""
    repeated = json.dumps({cell.name: attempts for cell, attempts in again.items()})
    row = {"run_id": run, "suite": suite, "fingerprint": fingerprint, "again": repeated}
    connection.execute(SUBMISSION.insert(), {**row, "host": "", "running": "{}", "tries": 0, "reason": ""})


def document(connection: Connection, name: str, content: str, made: datetime | None = None) -> None:
    """Insert a document, which is the current one of its name, by default as made now."""
    row = {"name": name, "made": made or datetime.now(timezone.utc), "content": content}
    connection.execute(DOCUMENT.insert(), row)


def add_result(connection: Connection, run: int, found: CellResult) -> None:
    """Insert a result, unless the run has that attempt at the cell already."""
    lock(connection)
    cell = _cell_keys(connection, [found.cell])[found.cell.name]
    own = and_(RESULT.c.run_id == run, RESULT.c.cell_id == cell)
    attempts = {*connection.scalars(select(RESULT.c.attempt).where(own))}
    if found.attempt in attempts:
        return
    if connection.scalar(select(PLANNED.c.position).where(PLANNED.c.run_id == run, PLANNED.c.cell_id == cell)) is None:
        plan(connection, run, {found.cell: None})
    environment = json.dumps(dict(found.environment), sort_keys=True) if found.environment else ""
    command = json.dumps(found.command) if found.command else ""
    messages = [_kept(one.message) for one in found.tests]
    texts = _shared(connection, TEXT.c.content, filter(None, [environment, command, found.pins, *messages]))
    nodeids = _shared(connection, NODEID.c.name, (one.nodeid for one in found.tests))
    row = {
        "run_id": run,
        "cell_id": cell,
        **{name: getattr(found, name) for name in ("attempt", "verdict", "kind", "reason", "started", "seconds")},
        "environment_id": texts.get(environment),
        "pins_id": texts.get(found.pins),
        "command_id": texts.get(command),
        **dict.fromkeys(get_args(Outcome), 0),
        **Counter(one.outcome for one in found.tests),
    }
    result: int = connection.scalars(RESULT.insert().returning(RESULT.c.id), row).one()
    tests, figures = list[dict[str, Any]](), list[dict[str, Any]]()
    for position, (one, message) in enumerate(zip(found.tests, messages, strict=True)):
        of_test = {"result_id": result, "nodeid_id": nodeids[one.nodeid]}
        ended = {"outcome": one.outcome, "seconds": one.seconds, "message_id": texts.get(message)}
        tests.append({**of_test, "position": position, **ended})
        figures += ({**of_test, **vars(figure)} for figure in one.figures)
    logs = [{"result_id": result, "content": _kept(found.log)}] if found.log else []
    for table, rows in ((TEST, tests), (FIGURE, figures), (LOG, logs)):
        if rows:  # with RETURNING it is one statement on PostgreSQL instead of one a row
            connection.execute(table.insert().returning(table.c.result_id), rows)
    if connection.scalar(select(RUN.c.partial).where(RUN.c.id == run)):
        return
    if found.verdict in ENDED and found.attempt > max(attempts, default=0):  # the newest: it was received last
        exact = json.dumps(versions.exact(found.cell, found.environment, found.pins))
        values = {"run_id": run, "result_id": result, "versions": exact}
        connection.execute(update(NEWEST).where(NEWEST.c.cell_id == cell).values(values))
    else:
        refresh_newest(connection, [cell])


def refresh_newest(connection: Connection, cells: Iterable[int]) -> None:
    """Find the newest result of these cells among all: it takes milliseconds for a cell with hundreds."""
    keys = (PLANNED.c.cell_id, PLANNED.c.run_id, RESULT.c.id.label("result_id"))
    for some in chunks(cells):
        connection.execute(delete(NEWEST).where(NEWEST.c.cell_id.in_(some)))
        whole = and_(RUN.c.partial.is_(False), PLANNED.c.cell_id.in_(some))
        rows = connection.execute(first(*keys, *VERSION_FIELDS, where=whole)).all()
        newest = [
            {**{key.name: getattr(row, key.name) for key in keys}, "versions": json.dumps(exact)}
            for row, exact in zip(rows, exact_versions(connection, rows), strict=True)
        ]
        if newest:
            connection.execute(NEWEST.insert(), newest)


def _kept(text: str) -> str:
    """A log or a message, without its middle if it is too long."""
    half = MOST // 8 - 100  # a character has up to 4 bytes
    if len(text) <= 2 * half or len(text.encode("utf-8", "surrogatepass")) <= MOST:
        return text
    return f"{text[:half]}\n\n[... {len(text) - 2 * half} characters were not kept ...]\n\n{text[-half:]}"


def _cell_keys(connection: Connection, cells: Iterable[Cell]) -> dict[str, int]:
    """The keys of cells by name."""
    rows = {one.name: {axis: getattr(one, axis) for axis in AXES} | {"extra": one.own} for one in cells}
    return _keys(connection, CELL.c.name, rows)


def _shared(connection: Connection, column: Column[str], values: Iterable[str]) -> dict[str, int]:
    """The keys of texts in a column of a table that has each once, with its digest."""
    digests = {one: blake2b(one.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest() for one in values}
    rows = {digest: {column.name: one} for one, digest in digests.items()}
    keys = _keys(connection, column.table.c.digest, rows)
    return {one: keys[digest] for one, digest in digests.items()}


def _keys(connection: Connection, by: Column[str], rows: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """The keys of rows by their values in a unique column; missing rows are inserted."""
    id, keys = by.table.c.id, dict[str, int]()
    for values in chunks(rows):
        keys |= {row[0]: row[1] for row in connection.execute(select(by, id).where(by.in_(values)))}
    if missing := [{by.name: value, **row} for value, row in rows.items() if value not in keys]:
        inserted = connection.execute(insert(by.table).returning(by, id), missing)
        keys |= {row[0]: row[1] for row in inserted}
    return keys
