"""The schema of a database, and its migration to this version's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, create_engine, inspect, text

from ..errors import MatrixError
from .models import metadata

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


def upgrade(connection: Connection, to: str = "head") -> None:
    """Migrate a database to a revision, in the caller's transaction.

    Raises:
        MatrixError: its revision is unknown to this version.
    """
    from alembic import command
    from alembic.script import ScriptDirectory

    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
    found = revision(connection)  # again: another process may have been first
    config = _config(connection)
    if found is not None and found not in {
        script.revision for script in ScriptDirectory.from_config(config).walk_revisions()
    }:
        raise MatrixError(
            f"it was written by a newer kernel-compat-matrix (schema {found}, this one knows {HEAD}): upgrade it"
        )
    command.upgrade(config, to)


def check_objects(connection: Connection) -> None:
    """Check that a SQLite database has plain tables only: reading a view, and migrating a table with a trigger, runs code.

    Raises:
        MatrixError: it has others.
    """
    sql = "SELECT type, name FROM sqlite_master WHERE type NOT IN ('table', 'index') OR sql LIKE 'CREATE VIRTUAL%'"
    if found := connection.execute(text(sql)).first():
        raise MatrixError(f"this isn't a store of kernel-compat-matrix: it has the {found[0]} {found[1]!r}")
    sql = "SELECT m.name, c.name FROM sqlite_master m, pragma_table_xinfo(m.name) c WHERE m.type = 'table' AND c.hidden > 0"
    if found := connection.execute(text(sql)).first():
        raise MatrixError(f"this isn't a store of kernel-compat-matrix: {found[0]!r} computes {found[1]!r}")


def check_tables(connection: Connection) -> None:
    """Check that the tables are those of a store, and that every row exists that another one refers to.

    Raises:
        MatrixError: a table differs, or a row doesn't exist.
    """
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    context = MigrationContext.configure(connection, opts={"version_table": VERSIONS, "compare_type": True})
    if differing := compare_metadata(context, metadata):
        raise MatrixError(f"its tables aren't those of a store: {differing[0]!r:.200}")
    if connection.dialect.name == "sqlite":
        for table, row, referred, _ in connection.execute(text("PRAGMA foreign_key_check")):
            raise MatrixError(f"the row {row} of its table {table} refers to a row of {referred} that doesn't exist")


def draft(path: str, message: str) -> None:
    """Write the next migration: the difference between `models` and the SQLite database at `path`."""
    from alembic import command

    with create_engine(f"sqlite:///{path}").begin() as connection:
        command.revision(_config(connection), message, autogenerate=True, rev_id=f"{int(HEAD) + 1:04}")


def _config(connection: Connection) -> Config:
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    config.set_main_option("file_template", "r%%(rev)s_%%(slug)s")
    return config
