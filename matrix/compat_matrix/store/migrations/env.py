"""alembic's environment; `compat_matrix.store.schema` passes the connection, with an open transaction."""

from __future__ import annotations

from alembic import context

from compat_matrix.store import schema
from compat_matrix.store.models import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, version_table=schema.VERSIONS)
with context.begin_transaction():
    context.run_migrations()
