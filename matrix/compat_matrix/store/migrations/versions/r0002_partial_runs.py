"""Runs that say less of their cells than what cells run by default."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the column ``run.partial``; false for existing runs."""
    op.add_column("run", sa.Column("partial", sa.Boolean(), nullable=False, server_default=sa.false()))
