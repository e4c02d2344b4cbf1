"""Reading another store, which may be from anywhere: every part of it is checked."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from sqlalchemy import Connection, literal_column, select

from ..cells import Cell, parse
from ..errors import MatrixError
from ..results import CellResult, Recorded
from . import queries
from .models import RUN, TEXT
from .records import Run

_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}", re.ASCII)


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


def run_names(connection: Connection) -> list[str]:
    """The ids of the runs, in the order received.

    Raises:
        MatrixError: one of them isn't the id of a run.
    """
    names: Sequence[Any] = connection.scalars(
        select(literal_column("run.name")).select_from(RUN).order_by(RUN.c.id)
    ).all()
    if wrong := next((one for one in names if not isinstance(one, str) or not _NAME.fullmatch(one)), None):
        raise MatrixError(f"{_shown(wrong)} isn't the id of a run")
    return [*names]


def run(connection: Connection, name: str) -> tuple[Run, str, dict[Cell, str | None]]:
    """A run, the text of its axes, and its cells, excluded ones with the reason.

    Raises:
        MatrixError: a part of it isn't valid.
    """
    with _valid(name):
        row = connection.execute(select(*queries.RUN_FIELDS).where(RUN.c.name == name)).one()
        found = _RUN.validate_python(Run(*row)._asdict())
        axes = connection.scalar(select(TEXT.c.content).join(RUN).where(RUN.c.name == name))
        planned = {_cell(row): row.excluded for row in connection.execute(queries.planned(name))}
        if wrong := next((why for why in planned.values() if not isinstance(why, (str, type(None)))), None):
            raise ValueError(f"excluded: {_shown(wrong)} isn't a reason")
        return found, axes or "", planned


def attempts(connection: Connection, name: str) -> list[tuple[Cell, int]]:
    """The cells and attempts of a run's results, in the order received.

    Raises:
        MatrixError: one of them isn't valid.
    """
    with _valid(name):
        return [(_cell(row), row.attempt) for row in connection.execute(queries.attempts(name))]


def result(connection: Connection, name: str, cell: Cell, attempt: int) -> CellResult:
    """A result of a run.

    Raises:
        MatrixError: a part of it isn't valid, or too large.
    """
    with _valid(name, cell):
        found = queries.read_result(connection, name, cell, attempt)
        if found is None:
            raise ValueError(f"it has no attempt {_shown(attempt)}")
        for figure in (figure for test in found.tests for figure in test.figures):
            Recorded.model_validate(figure._asdict())
        checked = _RESULT.validate_python({**vars(found), "tests": [vars(test) for test in found.tests]})
        _Environment.model_validate(checked.environment)
        return checked


def _cell(row: Any) -> Cell:
    """The cell in the first fields of a row, if it has the name of a cell."""
    cell = queries.cell_of(row)
    try:
        valid = len(cell.name) <= 200 and parse(cell.name) == cell
    except (MatrixError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise ValueError(f"cell: {_shown(tuple(row))} isn't a cell")
    return cell


@contextmanager
def _valid(name: str, cell: Cell | None = None) -> Iterator[None]:
    """Turn the errors of invalid values into a `MatrixError` about the run and the cell."""
    where = f"run {name}{f', {cell}' if cell else ''}"
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(one) for one in first["loc"])
        raise MatrixError(f"{where}: {field}: {first['msg']}, not {_shown(first['input'])}") from None
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError, zlib.error) as error:
        raise MatrixError(f"{where}: {error}") from error


def _shown(value: object) -> str:
    return repr(value) if len(repr(value)) <= 100 else f"{value!r:.97}..."
