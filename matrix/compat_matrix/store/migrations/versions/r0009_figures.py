"""The numbers that tests record, and tests that are flaky or fail as is known."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Create the table ``figure``, and add ``result.flaky`` and ``result.known``; 0 for existing results."""
    for outcome in ("flaky", "known"):
        op.add_column("result", sa.Column(outcome, sa.Integer, nullable=False, server_default="0"))
    op.create_table(
        "figure",
        sa.Column("result_id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String(100), primary_key=True),
        sa.Column("nodeid_id", sa.Integer, nullable=False),
        sa.Column("value", sa.Float, nullable=False),
        sa.Column("unit", sa.String(40), nullable=False),
        sa.Column("better", sa.String(6)),
        sa.ForeignKeyConstraint(["nodeid_id"], ["nodeid.id"]),
        sa.ForeignKeyConstraint(["result_id"], ["result.id"]),
        sqlite_with_rowid=False,
    )
