"""alembic's environment; `compat_matrix.store.database` passes the connection, with an open transaction."""

from __future__ import annotations

from alembic import context

from compat_matrix.store import database
from compat_matrix.store.models import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, version_table=database.VERSIONS)
with context.begin_transaction():
    context.run_migrations()
