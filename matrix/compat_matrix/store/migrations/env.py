"""alembic's environment; `compat_matrix.store.database` passes the connection, with an open transaction."""

from alembic import context

from compat_matrix.store import database

connection = context.config.attributes["connection"]
context.configure(connection=connection, version_table=database.VERSIONS)
with context.begin_transaction():
    context.run_migrations()
