"""The store's inserts, in the caller's transaction."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timezone
from hashlib import blake2b
from typing import Any, get_args

from sqlalchemy import Column, Connection, Table, and_, case, delete, func, select, update
from sqlalchemy.exc import IntegrityError

from .. import versions
from ..cells import AXES, Cell
from ..errors import MatrixError
from ..results import CellResult, Outcome
from .models import CELL, FIGURE, LOG, MOST, NEWEST, NODEID, PLANNED, RESULT, RUN, TEST, TEXT
from .queries import CELL_FIELDS, HAS_ENDED, IS_LAST, NEWEST_FIRST, RUN_FIELDS, cell_of, chunks, environment_of
from .records import Provenance, Run, options_of

#: The id (arbitrary) of the lock with which processes that begin runs in the same PostgreSQL database wait for each other.
_LOCK = 5_417_226_032


def key(connection: Connection, name: str) -> int:
    """The key of a run.

    Raises:
        MatrixError: there is no run of that name.
    """
    found: int | None = connection.scalar(select(RUN.c.id).where(RUN.c.name == name))
    if found is None:
        raise MatrixError(f"it has no run {name!r}")
    return found


def begin(
    connection: Connection, cells: Iterable[Cell], excluded: Mapping[Cell, str], given: Provenance
) -> tuple[int, str]:
    """Insert a new run; returns its key and its name."""
    started = datetime.now(timezone.utc)
    name = f"{started:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    while connection.scalar(select(RUN.c.id).where(RUN.c.name == name)) is not None:
        name = f"{name[:15]}-{secrets.token_hex(2)}"
    label, command, host, revision = map(plain, (given.label, given.command, given.host, given.revision))
    run = Run(name, started, None, "running", label, command, host, revision, given.partial)
    return new_run(connection, run, given.axes, [*dict.fromkeys(cells)], excluded), name


def new_run(
    connection: Connection, values: Run, axes: str, cells: Collection[Cell], excluded: Mapping[Cell, str]
) -> int:
    """Insert a run, perhaps as a part of an earlier one; returns its key."""
    row = {"name" if field == "id" else field: value for field, value in values._asdict().items()}
    row["axes_id"] = _texts(connection, [axes]).get(axes)
    row["whole"] = _whole(connection, values, row["axes_id"], {*cells} - {*excluded}) or values.id
    key = _inserted(connection, RUN, row)
    plan(connection, key, cells, excluded)
    return key


def _whole(connection: Connection, new: Run, axes_id: int | None, cells: Collection[Cell]) -> str | None:
    """The newest run of the same label, commit, suite and axes, if the new run is a part of it.

    It isn't if it has all of that run's cells: then everything is run again. Without a label, uncommitted code may have
    changed between the two.
    """
    if not new.label and (not new.revision or new.revision.endswith("+")):
        return None
    if connection.dialect.name == "postgresql":  # of parts that begin at once, the second must see the first
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
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


def plan(connection: Connection, key: int, cells: Iterable[Cell], excluded: Mapping[Cell, str]) -> bool:
    """Append the cells that a run doesn't have yet; returns whether there were any."""
    keys = cell_keys(connection, every := [*dict.fromkeys([*cells, *excluded])])
    there = {*connection.scalars(select(PLANNED.c.cell_id).where(PLANNED.c.run_id == key))}
    new = [one for one in every if keys[one.name] not in there]
    rows = [
        {
            "run_id": key,
            "cell_id": keys[one.name],
            "position": position,
            "excluded": plain(excluded[one]) if one in excluded else None,
        }
        for position, one in enumerate(new, len(there))
    ]
    if rows:
        connection.execute(PLANNED.insert(), rows)
        _plan_newest(connection, key, [keys[one.name] for one in new])
    return bool(rows)


def add_result(connection: Connection, key: int, found: CellResult) -> int | None:
    """Insert a result, unless the run has that attempt at the cell already. Returns its key."""
    cell_key = cell_keys(connection, [found.cell])[found.cell.name]
    own = and_(RESULT.c.run_id == key, RESULT.c.cell_id == cell_key, RESULT.c.attempt == found.attempt)
    if connection.scalar(select(RESULT.c.id).where(own)) is not None:
        return None
    place = select(PLANNED.c.position).where(PLANNED.c.run_id == key, PLANNED.c.cell_id == cell_key)
    if connection.scalar(place) is None:
        plan(connection, key, [found.cell], {})
    environment = json.dumps(dict(found.environment), sort_keys=True) if found.environment else ""
    command = json.dumps(found.command) if found.command else ""
    messages = [_kept(one.message) for one in found.tests]
    texts = _texts(connection, [environment, command, found.pins, *messages])
    nodeids = _nodeids(connection, [one.nodeid for one in found.tests])
    counts = Counter(one.outcome for one in found.tests)
    row = {
        "run_id": key,
        "cell_id": cell_key,
        "attempt": found.attempt,
        "verdict": found.verdict,
        "kind": found.kind,
        "reason": plain(found.reason),
        "started": found.started,
        "seconds": found.seconds,
        "environment_id": texts.get(environment),
        "pins_id": texts.get(found.pins),
        "command_id": texts.get(command),
        **{outcome: counts[outcome] for outcome in get_args(Outcome)},
    }
    result_key = _inserted(connection, RESULT, row)
    tests = [
        {
            "result_id": result_key,
            "position": position,
            "nodeid_id": nodeids[one.nodeid],
            "outcome": one.outcome,
            "seconds": one.seconds,
            "message_id": texts.get(message),
        }
        for position, (one, message) in enumerate(zip(found.tests, messages, strict=True))
    ]
    if tests:
        connection.execute(TEST.insert(), tests)
    figures = [
        {
            "result_id": result_key,
            "name": plain(figure.name),
            "nodeid_id": nodeids[one.nodeid],
            "value": figure.value,
            "unit": plain(figure.unit),
            "better": figure.better,
        }
        for one in found.tests
        for figure in one.figures
    ]
    if figures:
        connection.execute(FIGURE.insert(), figures)
    if found.log:
        connection.execute(LOG.insert().values(result_id=result_key, content=_kept(found.log)))
    if not connection.scalar(select(RUN.c.partial).where(RUN.c.id == key)):
        refresh_newest(connection, [cell_key])
    return result_key


def refresh_newest(connection: Connection, cell_keys: Iterable[int]) -> None:
    """Find the newest result of these cells again: after a result was inserted, or a run deleted."""
    environment, pins = TEXT.alias(), TEXT.alias()
    best = func.coalesce(func.max(case((HAS_ENDED, RESULT.c.id))), func.max(RESULT.c.id)).label("result_id")
    ran = select(best).join_from(RESULT, RUN, RUN.c.id == RESULT.c.run_id).where(RUN.c.partial.is_(False), IS_LAST)
    plan = select(PLANNED.c.cell_id, func.max(PLANNED.c.run_id)).join_from(PLANNED, RUN, RUN.c.id == PLANNED.c.run_id)
    plan = plan.where(RUN.c.partial.is_(False)).group_by(PLANNED.c.cell_id)
    for keys in chunks(cell_keys):
        _lock(connection, keys)
        connection.execute(delete(NEWEST).where(NEWEST.c.cell_id.in_(keys)))
        query = (
            select(*CELL_FIELDS, CELL.c.id, RESULT.c.run_id, RESULT.c.id, environment.c.content, pins.c.content)
            .join_from(RESULT, CELL, CELL.c.id == RESULT.c.cell_id)
            .outerjoin(environment, environment.c.id == RESULT.c.environment_id)
            .outerjoin(pins, pins.c.id == RESULT.c.pins_id)
            .where(RESULT.c.id.in_(ran.where(RESULT.c.cell_id.in_(keys)).group_by(RESULT.c.cell_id)))
        )
        rows = []
        for row in connection.execute(query):
            cell_key, run_key, result_key, said, pinned = row[len(CELL_FIELDS) :]
            found = versions.exact(cell_of(row), environment_of(said), pinned or "")
            rows.append((cell_key, run_key, result_key, json.dumps(found, sort_keys=True)))
        if lacking := set(keys).difference(row[0] for row in rows):
            planned = connection.execute(plan.where(PLANNED.c.cell_id.in_(lacking)))
            rows += [(cell_key, run_key, None, "{}") for cell_key, run_key in planned]
        if rows:
            names = ("cell_id", "run_id", "result_id", "versions")
            connection.execute(NEWEST.insert(), [dict(zip(names, row, strict=True)) for row in rows])


def _plan_newest(connection: Connection, key: int, cell_keys: Iterable[int]) -> None:
    """A run has planned these cells: of those without a result it has the newest plan, unless a newer run has planned them."""
    if connection.scalar(select(RUN.c.partial).where(RUN.c.id == key)):
        return
    for keys in chunks(cell_keys):
        _lock(connection, keys)
        known = set(connection.scalars(select(NEWEST.c.cell_id).where(NEWEST.c.cell_id.in_(keys))))
        rows = [{"cell_id": one, "run_id": key, "versions": "{}"} for one in keys if one not in known]
        if rows:
            connection.execute(NEWEST.insert(), rows)
        older = (NEWEST.c.cell_id.in_(keys), NEWEST.c.result_id.is_(None), NEWEST.c.run_id < key)
        connection.execute(update(NEWEST).where(*older).values(run_id=key))


def _lock(connection: Connection, cell_keys: Iterable[int]) -> None:
    """Make other transactions that change the newest results of these cells wait. SQLite has one writer anyway."""
    query = select(CELL.c.id).where(CELL.c.id.in_(sorted(cell_keys))).order_by(CELL.c.id)
    connection.execute(query.with_for_update(key_share=True)).all()


def _kept(text: str) -> str:
    """A log or a message, without its middle if it is too long."""
    half = MOST // 8 - 100  # a character has up to 4 bytes
    if len(text) <= 2 * half or len(text.encode("utf-8", "surrogatepass")) <= MOST:
        return text
    return f"{text[:half]}\n\n[... {len(text) - 2 * half} characters were not kept ...]\n\n{text[-half:]}"


def _inserted(connection: Connection, table: Table, row: Mapping[str, Any]) -> int:
    key = connection.execute(table.insert().values(row)).inserted_primary_key
    assert key is not None
    return int(key[0])


def cell_keys(connection: Connection, cells: Iterable[Cell]) -> dict[str, int]:
    """The keys of cells by name."""
    rows = {
        one.name: {
            "name": one.name,
            **{axis: getattr(one, axis) for axis in AXES},
            "extra": one.own,
        }
        for one in cells
    }
    return _keys(connection, CELL.c.name, rows)


def _nodeids(connection: Connection, names: Iterable[str]) -> dict[str, int]:
    digests = {name: _digest(name) for name in names}
    rows = {digest: {"digest": digest, "name": plain(name)} for name, digest in digests.items()}
    keys = _keys(connection, NODEID.c.digest, rows)
    return {name: keys[digest] for name, digest in digests.items()}


def _texts(connection: Connection, texts: Iterable[str]) -> dict[str, int]:
    """The keys of texts; an empty text has none."""
    digests = {one: _digest(one) for one in texts if one}
    rows = {digest: {"digest": digest, "content": one} for one, digest in digests.items()}
    keys = _keys(connection, TEXT.c.digest, rows)
    return {one: keys[digest] for one, digest in digests.items()}


def _keys(connection: Connection, by: Column[str], rows: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """The keys of rows by their values in a unique column; missing rows are inserted."""
    table = by.table
    assert isinstance(table, Table)
    for last in (False, False, False, True):
        keys: dict[str, int] = {}
        for values in chunks(rows):
            keys |= {row[0]: row[1] for row in connection.execute(select(by, table.c.id).where(by.in_(values)))}
        # Sorted, so that two processes that insert the same rows don't deadlock.
        missing = [dict(rows[value]) for value in sorted(rows.keys() - keys.keys())]
        if not missing:
            break
        try:
            with connection.begin_nested():
                connection.execute(table.insert(), missing)
        except IntegrityError:  # another process has inserted one of them meanwhile
            if last:
                raise
    return keys


def _digest(value: str) -> str:
    return blake2b(value.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def plain(value: str) -> str:
    """A text without the characters that a database refuses: lone surrogates and NUL."""
    return value.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
