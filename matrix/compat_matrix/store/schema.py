"""The schema of a database, and its migration to this version's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, create_engine, inspect, text

from ..errors import MatrixError

if TYPE_CHECKING:  # its import takes longer than opening a store that needs no migration
    from alembic.config import Config

#: The last revision in ``migrations/versions``.
HEAD = "0009"

#: The table with a database's revision. Not alembic's default name, which others may use in the same database.
VERSIONS = "kernel_compat_matrix_schema"

#: The id (arbitrary) of the lock with which processes that migrate the same PostgreSQL database wait for each other.
_LOCK = 5_417_226_031


def revision(connection: Connection) -> str | None:
    """The revision of a database; None for one without tables.

    Raises:
        MatrixError: it has tables that aren't a store's.
    """
    tables = inspect(connection).get_table_names()
    if VERSIONS in tables:
        found = connection.execute(text(f"SELECT version_num FROM {VERSIONS}")).scalar()
        if isinstance(found, str):
            return found
    if tables:
        some = ", ".join(sorted(tables)[:3])
        raise MatrixError(f"this isn't a store of kernel-compat-matrix: it has other tables ({some})")
    return None


def upgrade(connection: Connection, to: str = "head") -> str | None:
    """Migrate a database to a revision, in the caller's transaction; returns the revision that it had.

    Raises:
        MatrixError: its revision is unknown to this version.
    """
    from alembic import command

    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
    found = revision(connection)  # again: another process may have been first
    config = _config(connection)
    if found is not None and found not in _revisions(config):
        raise MatrixError(
            f"it was written by a newer kernel-compat-matrix (schema {found}, this one knows {HEAD}): upgrade it"
        )
    command.upgrade(config, to)
    return found


def check(connection: Connection) -> None:
    """Check that a SQLite database, which may be from anywhere, has the tables of a store, and runs no code of its own.

    Views run code when they are read; triggers, CHECK constraints and indexes of expressions when a table is migrated. So every
    statement in its schema must be the one that a store of its revision has.

    Raises:
        MatrixError: a statement differs, or a row refers to another one that doesn't exist.
    """
    found = connection.execute(text(_OBJECTS)).all()
    if other := next((row for row in found if row.type not in ("table", "index")), None):
        raise MatrixError(f"this isn't a store of kernel-compat-matrix: it has the {other.type} {other.name!r}")
    theirs = {(row.type, row.name): row for row in found}
    known = revision(connection)
    with create_engine("sqlite://").begin() as memory:
        if known not in _revisions(_config(memory)):
            return  # it isn't read
        upgrade(memory, known)
        ours = {(row.type, row.name): row for row in memory.execute(text(_OBJECTS))}
    for kind, name in sorted(ours.keys() | theirs.keys(), reverse=True):  # tables first
        there, row = theirs.get((kind, name)), ours.get((kind, name))
        if there is None or row is None or _words(there.sql) != _words(row.sql):
            raise MatrixError(f"its {kind} {name!r} isn't that of a store")
    for table, number, referred, _ in connection.execute(text("PRAGMA foreign_key_check")):
        raise MatrixError(f"the row {number} of its table {table} refers to a row of {referred} that doesn't exist")


#: Without the indexes of keys, which have no statement, and the table of ANALYZE.
_OBJECTS = (
    "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL AND sql != 'CREATE TABLE sqlite_stat1(tbl,idx,stat)'"
    " ORDER BY type DESC, name"
)


def _words(sql: str | None) -> list[str]:
    return (sql or "").split()


def _revisions(config: Config) -> set[str]:
    from alembic.script import ScriptDirectory

    return {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}


def _config(connection: Connection) -> Config:
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    return config
