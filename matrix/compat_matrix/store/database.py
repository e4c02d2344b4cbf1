"""Connecting to a database, and translating its errors."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError

from ..errors import MatrixError
from . import inserts, schema
from .models import CELL

#: The number of seconds that SQLite waits for another writing process.
_PATIENCE = 60.0


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn errors of the driver into a `MatrixError` about the store `name`."""
    try:
        yield
    except MatrixError as error:
        raise MatrixError(f"the store {name}: {error}") from error.__cause__
    except IntegrityError:
        raise  # the caller handles it: another process may have stored the same
    except DBAPIError as error:
        raise MatrixError(f"the store {name}: {' '.join(str(error.orig).split())}") from error
    except (zlib.error, UnicodeDecodeError) as error:
        raise MatrixError(f"the store {name}: the database is corrupt ({error})") from error


def parse(store: str) -> URL:
    """The URL of a store; a plain path is a SQLite file.

    Raises:
        MatrixError: it isn't a valid URL.
    """
    if not store:
        raise MatrixError("the name of a store can't be empty")
    if "://" not in store:
        return URL.create("sqlite", database=store)
    try:
        url = make_url(store)
    except (ArgumentError, ValueError) as error:
        raise MatrixError(f"{store!r} isn't the URL of a database: {error}") from error
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def connect(url: URL, *, create: bool) -> Engine:
    """An engine for a database, without looking at its contents. SQLite creates the file at the first write.

    Raises:
        MatrixError: its driver is missing; or the file or folder doesn't exist and `create` is false.
    """
    path = _file(url)
    if path and create:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MatrixError(f"the folder of the store can't be made: {error}") from error
    elif path and not path.exists():
        raise MatrixError("it doesn't exist")
    try:
        engine = create_engine(
            url, hide_parameters=True, **_pool(url)
        )  # errors are logged, and parameters may be secrets
    except NoSuchModuleError as error:
        raise MatrixError(f"SQLAlchemy knows no such database: {error}") from error
    except ModuleNotFoundError as error:
        hint = ": install kernel-compat-matrix[postgres]" if error.name == "psycopg" else ""
        raise MatrixError(f"its driver is not installed ({error}){hint}") from error
    if engine.dialect.name == "sqlite":
        _set_up_sqlite(engine)
    return engine


def migrate(engine: Engine, *, create: bool, foreign: bool = False) -> None:
    """Create or migrate the schema of a database.

    Args:
        foreign: check its schema: it may be from anywhere.

    Raises:
        MatrixError: there is no schema and `create` is false; it is from a newer version; or the tables aren't a store's.
    """
    with engine.connect() as connection:
        if foreign and engine.dialect.name == "sqlite":
            schema.check(connection)
        found = schema.revision(connection)
    if found is None and not create:
        raise MatrixError("it is empty: no run has been stored in it")
    if found is None and engine.dialect.name == "sqlite":
        _journal(engine, "WAL")  # readers and a writer don't block each other; this setting is stored in the file
    if found != schema.HEAD:
        with writing(engine).begin() as connection:
            if schema.upgrade(connection):
                inserts.refresh_newest(connection, connection.scalars(select(CELL.c.id)).all())


def writing(engine: Engine) -> Engine:
    """The engine for writing transactions. SQLite's take their lock at the start, and wait for it.

    A SQLite transaction that takes the lock after a read fails if another process has written meanwhile.
    """
    return engine.execution_options(begin="BEGIN IMMEDIATE")


def single_file(engine: Engine) -> None:
    """Merge SQLite's write-ahead log into the file, which can then be copied, and read on read-only media."""
    _journal(engine, "DELETE")


def _file(url: URL) -> Path | None:
    database = url.database
    if url.get_backend_name() != "sqlite" or not database or database == ":memory:" or database.startswith("file:"):
        return None
    return Path(database)


def _pool(url: URL) -> dict[str, Any]:
    """A pool with a connection for each thread of a service. Broken connections are detected and replaced."""
    if url.get_backend_name() == "sqlite":
        return {"pool_size": 10, "max_overflow": 40} if _file(url) else {}
    return {"pool_size": 10, "max_overflow": 40, "pool_pre_ping": True}


def _set_up_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        connection.isolation_level = None  # the driver must not begin transactions by itself
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA busy_timeout = {int(_PATIENCE * 1000)}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if statement := connection.get_execution_options().get("begin", "BEGIN"):
            connection.exec_driver_sql(statement)


def _journal(engine: Engine, mode: str) -> None:
    with engine.execution_options(begin=None).connect() as connection:  # can't be changed within a transaction
        connection.exec_driver_sql(f"PRAGMA journal_mode = {mode}")
