"""alembic's environment; `compat_matrix.store.schema` passes the connection, with an open transaction."""

from __future__ import annotations

from typing import Any, Literal

from alembic import context
from sqlalchemy import TypeDecorator

from compat_matrix.store import schema
from compat_matrix.store.models import metadata


def render(kind: str, item: Any, context: Any) -> str | Literal[False]:
    """Render columns by their database types, so that a migration doesn't change with the types in `models`."""
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
