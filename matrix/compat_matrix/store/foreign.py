"""Reading another store, which may be from anywhere: every part of it is checked."""

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, NamedTuple

from pydantic import BaseModel, TypeAdapter, ValidationError
from sqlalchemy import Connection, Engine, Row, create_engine, select, text, type_coerce
from sqlalchemy.pool import NullPool
from sqlalchemy.types import NullType

from ..cells import Cell, parse
from ..errors import MatrixError
from ..results import CellResult, Run
from . import database, queries
from .models import CELL, PLANNED, RESULT, RUN, TEXT

_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}", re.ASCII)

#: Without the indexes of keys, which have no statement, and the table of ANALYZE.
_OBJECTS = text(
    "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL AND sql != 'CREATE TABLE sqlite_stat1(tbl,idx,stat)'"
)


def check_schema(engine: Engine) -> None:
    """Check that a SQLite database has the tables of a store, and runs no code of its own.

    Views run code when they are read; triggers, CHECK constraints and indexes of expressions when a table is migrated. So every
    statement in its schema must be the one that a store of its revision has, and rows refer to rows that exist.
    """

    def statements(of: Connection) -> dict[tuple[str, str], list[str]]:
        return {(row.type, row.name): re.findall(r"\w+|\S", row.sql) for row in of.execute(_OBJECTS)}

    if engine.dialect.name != "sqlite":
        return
    with engine.connect() as connection, create_engine("sqlite://", poolclass=NullPool).begin() as memory:
        theirs = statements(connection)
        if other := next((one for one in theirs if one[0] not in ("table", "index")), None):
            raise MatrixError(f"this isn't a store of kernel-compat-matrix: it has the {other[0]} {other[1]!r}")
        if (known := database.revision(connection)) not in database.REVISIONS:
            return  # it isn't read
        database.upgrade(memory, known)
        ours = statements(memory)
        for kind, name in sorted(ours.keys() | theirs.keys(), reverse=True):  # tables first
            if ours.get((kind, name)) != theirs.get((kind, name)):
                raise MatrixError(f"its {kind} {name!r} isn't that of a store")
        if said := database.dangling(connection):
            raise MatrixError(said)


def project(connection: Connection) -> str:
    """The name of the project whose runs the store has; empty if that isn't known. A `MatrixError` if it is no name."""
    try:
        found = connection.scalar(queries.PROJECT)
    except (zlib.error, UnicodeDecodeError) as error:
        raise MatrixError(f"its project: {error}") from error
    if found and (len(found) > 200 or not found.isprintable()):
        raise MatrixError(f"its project: {_shown(found)} isn't a name")
    return found or ""


class _Shim(BaseModel):
    state: str
    reason: str
    seams: list[str] = []


class _Environment(BaseModel):
    """The parts of an environment that views read."""

    packages: dict[str, str | None] = {}
    shims: dict[str, _Shim] = {}
    conflicts: list[str] = []


_RUN, _RESULT = TypeAdapter(Run), TypeAdapter(CellResult)


class Copied(NamedTuple):
    """A run of another store: its cells, excluded ones with the reason, and the attempts at them in the order received."""

    run: Run
    axes: str
    planned: dict[Cell, str | None]
    attempts: list[tuple[Cell, int]]


def runs(connection: Connection) -> Iterator[Copied]:
    """The runs, in the order received, without their results. A `MatrixError` if a part of one isn't valid."""
    for name in connection.scalars(select(type_coerce(RUN.c.name, NullType())).order_by(RUN.c.id)).all():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise MatrixError(f"{_shown(name)} isn't the id of a run")
        with _valid(name):
            row = connection.execute(select(*queries.RUN_FIELDS).where(RUN.c.name == name)).one()
            axes = connection.scalar(select(TEXT.c.content).join(RUN).where(RUN.c.name == name))
            query = select(*queries.CELL_FIELDS, PLANNED.c.excluded).join_from(PLANNED, CELL).join(RUN)
            rows = connection.execute(query.where(RUN.c.name == name).order_by(PLANNED.c.position))
            planned = {_cell(row): row.excluded for row in rows}
            if wrong := next((why for why in planned.values() if not isinstance(why, (str, type(None)))), None):
                raise ValueError(f"excluded: {_shown(wrong)} isn't a reason")
            run = _RUN.validate_python(vars(Run(*row)))
            yield Copied(run, axes or "", planned, attempts(connection, name))


def attempts(connection: Connection, run: str) -> list[tuple[Cell, int]]:
    """The cell and the attempt of each result of a run, in the order received."""
    query = select(*queries.CELL_FIELDS, RESULT.c.attempt).select_from(queries.RESULTS).where(RUN.c.name == run)
    return [(queries.cell_of(row), row.attempt) for row in connection.execute(query.order_by(RESULT.c.id))]


def result(connection: Connection, name: str, cell: Cell, attempt: int) -> CellResult:
    """A result of a run. A `MatrixError` if a part of it isn't valid, or too large."""
    with _valid(f"{name}, {cell}"):
        found = queries.read_result(connection, name, cell, attempt)
        if found is None:
            raise ValueError(f"it has no attempt {_shown(attempt)}")
        checked = _RESULT.validate_python(asdict(found))
        _Environment.model_validate(checked.environment)
        return checked


def _cell(row: Row[Any]) -> Cell:
    """The cell in the first fields of a row, if it has the name of a cell."""
    with suppress(MatrixError, TypeError, AttributeError):
        cell = queries.cell_of(row)
        if parse(cell.name) == cell:
            return cell
    raise ValueError(f"cell: {_shown(tuple(row))} isn't a cell")


@contextmanager
def _valid(name: str) -> Iterator[None]:
    """Turn the errors of invalid values into a `MatrixError` about the run, or the cell in it."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(one) for one in first["loc"])
        raise MatrixError(f"run {name}: {field}: {first['msg']}, not {_shown(first['input'])}") from None
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError, zlib.error) as error:
        raise MatrixError(f"run {name}: {error}") from error


def _shown(value: object) -> str:
    return repr(value) if len(repr(value)) <= 100 else f"{value!r:.97}..."
