"""The store's inserts, in the caller's transaction."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from hashlib import blake2b
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import Column, Connection, Select, Table, and_, case, delete, func, select, update
from sqlalchemy.exc import IntegrityError

from .. import versions
from ..cells import AXES, Cell
from ..errors import MatrixError
from ..results import CellResult
from .models import CELL, LOG, NEWEST, NODEID, PLANNED, RESULT, RUN, TEST, TEXT
from .queries import COUNTS, NEWEST_FIRST, cell_of
from .records import Provenance, Run

T = TypeVar("T")


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
    run_key = new_run(connection, run, given.axes)
    plan(connection, run_key, [*dict.fromkeys(cells)], excluded)
    return run_key, name


def new_run(connection: Connection, values: Run, axes: str) -> int:
    """Insert a run without cells; returns its key."""
    row = {"name" if field == "id" else field: value for field, value in values._asdict().items()}
    row["axes_id"] = _texts(connection, [axes]).get(axes)
    return _inserted(connection, RUN, row)


def plan(connection: Connection, key: int, cells: Iterable[Cell], excluded: Mapping[Cell, str]) -> None:
    """Append the cells that a run doesn't have yet."""
    every = [*dict.fromkeys([*cells, *excluded])]
    keys = cell_keys(connection, every)
    first = connection.scalar(select(func.count()).select_from(PLANNED).where(PLANNED.c.run_id == key)) or 0
    rows = [
        {
            "run_id": key,
            "cell_id": keys[one.name],
            "position": position,
            "excluded": plain(excluded[one]) if one in excluded else None,
        }
        for position, one in enumerate(every, first)
    ]
    if rows:
        connection.execute(PLANNED.insert(), rows)
        _plan_newest(connection, key, keys.values())


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
    messages = (one.message for one in found.tests)
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
        **{column.name: counts[column.name] for column in COUNTS},  # type: ignore[index]
    }
    result_key = _inserted(connection, RESULT, row)
    tests = [
        {
            "result_id": result_key,
            "position": position,
            "nodeid_id": nodeids[one.nodeid],
            "outcome": one.outcome,
            "seconds": one.seconds,
            "message_id": texts.get(one.message),
        }
        for position, one in enumerate(found.tests)
    ]
    if tests:
        connection.execute(TEST.insert(), tests)
    if found.log:
        connection.execute(LOG.insert().values(result_id=result_key, content=found.log))
    if not connection.scalar(select(RUN.c.partial).where(RUN.c.id == key)):
        refresh_newest(connection, [cell_key])
    return result_key


def refresh_newest(connection: Connection, cell_keys: Iterable[int]) -> None:
    """Find the newest result of these cells again: after a result was inserted, or a run deleted."""
    later, environment, pins = RESULT.alias(), TEXT.alias(), TEXT.alias()
    same_run = and_(later.c.run_id == RESULT.c.run_id, later.c.cell_id == RESULT.c.cell_id)
    last = select(func.max(later.c.attempt)).where(same_run).scalar_subquery()
    rank = case((RESULT.c.verdict.in_(["passed", "failed"]), 0), else_=1)
    ran = _first_of_each(RESULT.c.cell_id, (rank, *NEWEST_FIRST), RESULT.c.id.label("result_id"))
    ran = ran.join_from(RESULT, RUN, RUN.c.id == RESULT.c.run_id)
    ran = ran.where(RUN.c.partial.is_(False), RESULT.c.attempt == last)
    plan = _first_of_each(PLANNED.c.cell_id, NEWEST_FIRST, PLANNED.c.run_id)
    plan = plan.join_from(PLANNED, RUN, RUN.c.id == PLANNED.c.run_id).where(RUN.c.partial.is_(False))
    for keys in chunks(cell_keys):
        _lock(connection, keys)
        connection.execute(delete(NEWEST).where(NEWEST.c.cell_id.in_(keys)))
        best = ran.where(RESULT.c.cell_id.in_(keys)).subquery()
        query = (
            select(*(CELL.c[axis] for axis in AXES), CELL.c.id, RESULT.c.run_id, RESULT.c.id, environment.c.content)
            .add_columns(pins.c.content)
            .join_from(RESULT, best, and_(best.c.result_id == RESULT.c.id, best.c.number == 1))
            .join(CELL, CELL.c.id == RESULT.c.cell_id)
            .outerjoin(environment, environment.c.id == RESULT.c.environment_id)
            .outerjoin(pins, pins.c.id == RESULT.c.pins_id)
        )
        rows = []
        for *fields, cell_key, run_key, result_key, said, pinned in connection.execute(query):
            found = versions.exact(cell_of(fields), _mapping(said), pinned or "")
            rows.append((cell_key, run_key, result_key, json.dumps(found, sort_keys=True)))
        if lacking := set(keys).difference(row[0] for row in rows):
            plans = plan.where(PLANNED.c.cell_id.in_(lacking)).subquery()
            planned = select(plans.c.cell_id, plans.c.run_id).where(plans.c.number == 1)
            rows += [(cell_key, run_key, None, "{}") for cell_key, run_key in connection.execute(planned)]
        if rows:
            names = ("cell_id", "run_id", "result_id", "versions")
            connection.execute(NEWEST.insert(), [dict(zip(names, row, strict=True)) for row in rows])


def _plan_newest(connection: Connection, key: int, cell_keys: Iterable[int]) -> None:
    """A run has planned these cells: it has the newest plan of those without a result, unless a newer run has planned them too."""
    if connection.scalar(select(RUN.c.partial).where(RUN.c.id == key)):
        return
    for keys in chunks(cell_keys):
        _lock(connection, keys)
        known = select(NEWEST.c.cell_id, NEWEST.c.run_id, NEWEST.c.result_id).where(NEWEST.c.cell_id.in_(keys))
        there = connection.execute(known).all()
        rows = [
            {"cell_id": one, "run_id": key, "versions": "{}"} for one in set(keys).difference(row[0] for row in there)
        ]
        if rows:
            connection.execute(NEWEST.insert(), rows)
        runs = {row.run_id for row in there if row.result_id is None}
        order = connection.scalars(select(RUN.c.id).where(RUN.c.id.in_({key, *runs})).order_by(*NEWEST_FIRST)).all()
        older = [row.cell_id for row in there if row.result_id is None and row.run_id in order[order.index(key) + 1 :]]
        if older:
            connection.execute(update(NEWEST).where(NEWEST.c.cell_id.in_(older)).values(run_id=key))


def _first_of_each(key: Column[Any], order: tuple[Any, ...], *more: Any) -> Select[Any]:
    return select(key, *more, func.row_number().over(partition_by=key, order_by=order).label("number"))


def _lock(connection: Connection, cell_keys: Iterable[int]) -> None:
    """Make other transactions that change the newest results of these cells wait. SQLite has one writer anyway."""
    query = select(CELL.c.id).where(CELL.c.id.in_(sorted(cell_keys))).order_by(CELL.c.id)
    connection.execute(query.with_for_update(key_share=True)).all()


def _mapping(text: str | None) -> Mapping[str, Any]:
    found = json.loads(text or "{}")
    return found if isinstance(found, dict) else {}


def _inserted(connection: Connection, table: Table, row: Mapping[str, Any]) -> int:
    key = connection.execute(table.insert().values(row)).inserted_primary_key
    assert key is not None
    return int(key[0])


def cell_keys(connection: Connection, cells: Iterable[Cell]) -> dict[str, int]:
    """The keys of cells by name."""
    rows = {one.name: {"name": one.name} | {field: getattr(one, field) for field in AXES} for one in cells}
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


def chunks(values: Iterable[T]) -> Iterator[list[T]]:
    """Chunks that are small enough for the parameter limit of every database."""
    iterator = iter(values)
    while chunk := list(islice(iterator, 500)):
        yield chunk


def _digest(value: str) -> str:
    return blake2b(value.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def plain(value: str) -> str:
    """A text without the characters that a database refuses: lone surrogates and NUL."""
    return value.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
