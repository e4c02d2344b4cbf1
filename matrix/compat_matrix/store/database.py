"""The database of a store: connecting, its schema, and its errors."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError

from ..errors import MatrixError
from . import inserts
from .models import CELL, NEWEST, PLANNED, RUN

#: The revisions in ``migrations/versions``: that of 0.1.0 and 0.2.0, and the last one.
REVISIONS = ("0004", "0009")
HEAD = REVISIONS[-1]

#: The table with a database's revision. Not alembic's default name, which others may use in the same database.
VERSIONS = "kernel_compat_matrix_schema"


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn errors of the driver into a `MatrixError` about the store `name`."""
    try:
        yield
    except MatrixError as error:
        if type(error) is not MatrixError:  # it says enough
            raise
        raise MatrixError(f"the store {name}: {error}") from error.__cause__
    except IntegrityError:
        raise  # the caller handles it: a name is taken
    except DBAPIError as error:
        raise MatrixError(f"the store {name}: {' '.join(str(error.orig).split())}") from error
    except (zlib.error, UnicodeDecodeError) as error:
        raise MatrixError(f"the store {name}: the database is corrupt ({error})") from error


def parse(store: str) -> URL:
    """The URL of a store; a plain path is a SQLite file. A `MatrixError` if it isn't valid, or has no file."""
    if not store:
        raise MatrixError("the name of a store can't be empty")
    if "://" not in store:
        return URL.create("sqlite", database=store)
    try:
        url = make_url(store)
    except (ArgumentError, ValueError) as error:
        raise MatrixError(f"{store!r} isn't the URL of a database: {error}") from error
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise MatrixError(f"{store!r} has no file: a store can't be in memory")
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def connect(url: URL, *, create: bool) -> Engine:
    """An engine for a database, without looking at its contents. SQLite creates the file at the first write."""
    path = Path(url.database or "")
    is_file = url.get_backend_name() == "sqlite" and not str(path).startswith("file:")
    if is_file and create:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MatrixError(f"the folder of the store can't be made: {error}") from error
    elif is_file and not path.exists():
        raise MatrixError("it doesn't exist")
    try:  # A connection for each thread of a service. Errors are logged, and parameters may be secrets.
        engine = create_engine(url, pool_size=10, max_overflow=40, pool_pre_ping=True, hide_parameters=True)
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        hint = ": install kernel-compat-matrix[postgres]" if "psycopg" in str(error) else ""
        raise MatrixError(f"its driver is not installed ({error}){hint}") from error
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _connected)
        event.listen(engine, "begin", _begin)
    return engine


def _connected(connection: Any, _: object) -> None:
    connection.isolation_level = None  # the driver must not begin transactions by itself
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA busy_timeout = 60000")  # the number of ms for which a writer waits for another one


def _begin(connection: Connection) -> None:
    if statement := connection.get_execution_options().get("begin", "BEGIN"):
        connection.exec_driver_sql(statement)


def reading(engine: Engine) -> Engine:
    """The engine for statements that only read.

    In PostgreSQL each sees what is committed when it begins, also within a transaction, which takes two messages more.
    """
    return engine if engine.dialect.name == "sqlite" else engine.execution_options(isolation_level="AUTOCOMMIT")


def writing(engine: Engine) -> Engine:
    """The engine for writing transactions.

    SQLite's take their lock at the start: one that takes it after a read fails if another process has written meanwhile.
    """
    return engine.execution_options(begin="BEGIN IMMEDIATE")


def set_journal(engine: Engine, mode: str) -> None:
    """Set the journal of a SQLite file: with ``WAL`` readers and a writer don't block each other.

    ``DELETE`` merges the write-ahead log into the file, which can then be copied, and read on read-only media.
    """
    with engine.execution_options(begin=None).connect() as connection:  # can't be changed within a transaction
        connection.exec_driver_sql(f"PRAGMA journal_mode = {mode}")


def migrate(engine: Engine, *, create: bool) -> None:
    """Create or migrate the schema of a database. Errors are those of `Store.open`."""
    with engine.connect() as connection:
        found = revision(connection)
    if found is None and not create:
        raise MatrixError("it is empty: no run has been stored in it")
    if found is None and engine.dialect.name == "sqlite":
        set_journal(engine, "WAL")
    if found != HEAD:
        with writing(engine).begin() as connection:
            if upgrade(connection):
                inserts.refresh_newest(connection, connection.scalars(select(CELL.c.id)).all())


def revision(connection: Connection) -> str | None:
    """The revision of a database; None for one without tables. A `MatrixError` if these aren't a store's."""
    tables = inspect(connection).get_table_names()
    found = connection.scalar(text(f"SELECT version_num FROM {VERSIONS}")) if VERSIONS in tables else None
    if isinstance(found, str):
        return found
    if VERSIONS in tables:
        raise MatrixError(f"it is damaged: its table {VERSIONS} has no revision")
    if tables:
        some = ", ".join(sorted(tables)[:3])
        raise MatrixError(f"this isn't a store of kernel-compat-matrix: it has other tables ({some})")
    return None


def damage(connection: Connection) -> str:
    """What is wrong with the contents of a database that can be read; empty if nothing is."""
    if connection.dialect.name == "sqlite":
        found = " ".join(str(connection.scalar(text("PRAGMA integrity_check(1)"))).split())
        if said := dangling(connection) if found == "ok" else found:
            return said
    whole = select(CELL.c.name).join_from(PLANNED, CELL).join(RUN, RUN.c.id == PLANNED.c.run_id)
    lost = whole.where(RUN.c.partial.is_(False), CELL.c.id.not_in(select(NEWEST.c.cell_id)))
    cell = connection.scalar(lost.limit(1))
    return f"its table newest lacks the cell {cell}" if cell else ""


def dangling(connection: Connection) -> str:
    """A row of a SQLite database that refers to one that doesn't exist; empty if none does."""
    for table, number, referred, _ in connection.execute(text("PRAGMA foreign_key_check")):
        return f"the row {number} of its table {table} refers to a row of {referred} that doesn't exist"
    return ""


def upgrade(connection: Connection, to: str = HEAD) -> str | None:
    """Migrate a database to a revision, in the caller's transaction; returns the revision that it had."""
    from alembic import command  # its import takes longer than opening a store that needs no migration
    from alembic.config import Config

    inserts.lock(connection)
    found = revision(connection)  # again: another process may have been first
    if found is not None and found not in REVISIONS:
        said = f"kernel-compat-matrix (schema {found}, this one knows {' and '.join(REVISIONS)})"
        if found > HEAD:
            raise MatrixError(f"it was written by a newer {said}: upgrade it")
        raise MatrixError(f"it was written by a {said} that was never released, and can't be migrated")
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    command.upgrade(config, to)
    return found
