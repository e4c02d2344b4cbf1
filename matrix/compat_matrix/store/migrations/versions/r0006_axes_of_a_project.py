"""Axes of a project's own."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the column ``cell.extra``; existing cells have no further axes."""
    op.add_column("cell", sa.Column("extra", sa.Text(), nullable=False, server_default=sa.text("''")))
