"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "cell",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("python", sa.String(length=40), nullable=False),
        sa.Column("transformers", sa.String(length=40), nullable=False),
        sa.Column("torch", sa.String(length=40), nullable=False),
        sa.Column("flash_attention", sa.String(length=20), nullable=False),
        sa.Column("device", sa.String(length=20), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cell")),
        sa.UniqueConstraint("name", name=op.f("uq_cell_name")),
    )
    op.create_table(
        "nodeid",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=32), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodeid")),
        sa.UniqueConstraint("digest", name=op.f("uq_nodeid_digest")),
    )
    op.create_table(
        "shared_text",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=32), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_shared_text")),
        sa.UniqueConstraint("digest", name=op.f("uq_shared_text_digest")),
    )
    op.create_table(
        "run",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=40), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished", sa.DateTime(timezone=True), nullable=True),
        sa.Column("state", sa.String(length=40), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("command", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("revision", sa.Text(), nullable=False),
        sa.Column("axes_id", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["axes_id"], ["shared_text.id"], name=op.f("fk_run_axes_id_shared_text")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run")),
        sa.UniqueConstraint("name", name=op.f("uq_run_name")),
    )
    op.create_index(op.f("ix_run_started"), "run", ["started"], unique=False)

    op.create_table(
        "planned",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("cell_id", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("excluded", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"], name=op.f("fk_planned_cell_id_cell")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_planned_run_id_run")),
        sa.PrimaryKeyConstraint("run_id", "cell_id", name=op.f("pk_planned")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "result",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("cell_id", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("verdict", sa.String(length=20), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=True),
        sa.Column("pins_id", sa.Integer(), nullable=True),
        sa.Column("command_id", sa.Integer(), nullable=True),
        sa.Column("passed", sa.Integer(), nullable=False),
        sa.Column("failed", sa.Integer(), nullable=False),
        sa.Column("error", sa.Integer(), nullable=False),
        sa.Column("skipped", sa.Integer(), nullable=False),
        sa.Column("xfailed", sa.Integer(), nullable=False),
        sa.Column("xpassed", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["command_id"], ["shared_text.id"], name=op.f("fk_result_command_id_shared_text")),
        sa.ForeignKeyConstraint(
            ["environment_id"], ["shared_text.id"], name=op.f("fk_result_environment_id_shared_text")
        ),
        sa.ForeignKeyConstraint(["pins_id"], ["shared_text.id"], name=op.f("fk_result_pins_id_shared_text")),
        sa.ForeignKeyConstraint(
            ["run_id", "cell_id"], ["planned.run_id", "planned.cell_id"], name=op.f("fk_result_run_id_cell_id_planned")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_result")),
        sa.UniqueConstraint("run_id", "cell_id", "attempt", name=op.f("uq_result_run_id_cell_id_attempt")),
    )
    op.create_index(op.f("ix_result_cell_id"), "result", ["cell_id"], unique=False)

    op.create_table(
        "log",
        sa.Column("result_id", sa.Integer(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["result_id"], ["result.id"], name=op.f("fk_log_result_id_result")),
        sa.PrimaryKeyConstraint("result_id", name=op.f("pk_log")),
    )
    op.create_table(
        "test",
        sa.Column("result_id", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("nodeid_id", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.String(length=8), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("message_id", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["message_id"], ["shared_text.id"], name=op.f("fk_test_message_id_shared_text")),
        sa.ForeignKeyConstraint(["nodeid_id"], ["nodeid.id"], name=op.f("fk_test_nodeid_id_nodeid")),
        sa.ForeignKeyConstraint(["result_id"], ["result.id"], name=op.f("fk_test_result_id_result")),
        sa.PrimaryKeyConstraint("result_id", "position", name=op.f("pk_test")),
        sqlite_with_rowid=False,
    )
    op.create_index(
        "ix_test_failed",
        "test",
        ["result_id", "nodeid_id", "outcome"],
        unique=False,
        sqlite_where=sa.text("outcome IN ('failed', 'error')"),
        postgresql_where=sa.text("outcome IN ('failed', 'error')"),
    )
