"""The schema of a database, and its migration to this version's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, create_engine, inspect, text

from ..errors import MatrixError

if TYPE_CHECKING:  # its import takes longer than opening a store that needs no migration
    from alembic.config import Config

#: The last revision in ``migrations/versions``.
HEAD = "0008"

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
