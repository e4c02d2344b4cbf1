"""Runs that are parts of one run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the column ``run.whole``: existing runs are whole. Runs aren't ordered by their start any more."""
    op.add_column("run", sa.Column("whole", sa.String(length=40), nullable=False, server_default=sa.text("''")))
    op.execute("UPDATE run SET whole = name")
    op.create_index(op.f("ix_run_whole"), "run", ["whole"], unique=False)
    op.drop_index(op.f("ix_run_started"), table_name="run")
