"""The first schema. The names of constraints follow the convention in `models`."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "cell",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String(200), nullable=False, unique=True),
        sa.Column("python", sa.String(40), nullable=False),
        sa.Column("transformers", sa.String(40), nullable=False),
        sa.Column("torch", sa.String(40), nullable=False),
        sa.Column("flash_attention", sa.String(20), nullable=False),
        sa.Column("device", sa.String(20), nullable=False),
    )
    op.create_table(
        "nodeid",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String(32), nullable=False, unique=True),
        sa.Column("name", sa.Text, nullable=False),
    )
    op.create_table(
        "shared_text",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String(32), nullable=False, unique=True),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "run",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String(40), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=False, index=True),
        sa.Column("finished", sa.DateTime(timezone=True)),
        sa.Column("state", sa.String(40), nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("label", "command", "host", "revision")),
        sa.Column("axes_id", sa.Integer),
        sa.ForeignKeyConstraint(["axes_id"], ["shared_text.id"]),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "planned",
        sa.Column("run_id", sa.Integer, primary_key=True),
        sa.Column("cell_id", sa.Integer, primary_key=True),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("excluded", sa.Text),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"]),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"]),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "result",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("run_id", sa.Integer, nullable=False),
        sa.Column("cell_id", sa.Integer, nullable=False, index=True),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("verdict", sa.String(20), nullable=False),
        sa.Column("kind", sa.String(20)),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seconds", sa.Float, nullable=False),
        *(sa.Column(name, sa.Integer) for name in ("environment_id", "pins_id", "command_id")),
        *(
            sa.Column(name, sa.Integer, nullable=False)
            for name in ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
        ),
        *(sa.ForeignKeyConstraint([name], ["shared_text.id"]) for name in ("command_id", "environment_id", "pins_id")),
        sa.ForeignKeyConstraint(["run_id", "cell_id"], ["planned.run_id", "planned.cell_id"]),
        sa.UniqueConstraint("run_id", "cell_id", "attempt"),
    )
    op.create_table(
        "log",
        sa.Column("result_id", sa.Integer, sa.ForeignKey("result.id"), primary_key=True),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "test",
        sa.Column("result_id", sa.Integer, primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("nodeid_id", sa.Integer, nullable=False),
        sa.Column("outcome", sa.String(8), nullable=False),
        sa.Column("seconds", sa.Float, nullable=False),
        sa.Column("message_id", sa.Integer),
        sa.ForeignKeyConstraint(["message_id"], ["shared_text.id"]),
        sa.ForeignKeyConstraint(["nodeid_id"], ["nodeid.id"]),
        sa.ForeignKeyConstraint(["result_id"], ["result.id"]),
        sqlite_with_rowid=False,
    )
    bad = sa.text("outcome IN ('failed', 'error')")
    columns = ["result_id", "nodeid_id", "outcome"]
    op.create_index("ix_test_failed", "test", columns, sqlite_where=bad, postgresql_where=bad)
