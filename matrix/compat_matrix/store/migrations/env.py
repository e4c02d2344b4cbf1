"""What alembic runs; `compat_matrix.store.schema` hands it the connection, in a transaction of its own."""

from __future__ import annotations

from typing import Any, Literal

from alembic import context
from sqlalchemy import TypeDecorator

from compat_matrix.store import schema
from compat_matrix.store.models import metadata


def render(kind: str, item: Any, context: Any) -> str | Literal[False]:
    """Columns by what the database has, so that a migration doesn't change with our own types."""
    return f"sa.{item.impl!r}" if kind == "type" and isinstance(item, TypeDecorator) else False


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=schema.VERSIONS,
    render_as_batch=True,
    render_item=render,
)
with context.begin_transaction():
    context.run_migrations()
