"""The queue of the service, its workers and its tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create the tables of the service."""
    op.create_table(
        "token",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.String(length=100), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked", sa.DateTime(timezone=True), nullable=True),
        sa.Column("used", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_token")),
        sa.UniqueConstraint("digest", name=op.f("uq_token_digest")),
        sa.UniqueConstraint("name", name=op.f("uq_token_name")),
    )
    op.create_table(
        "worker",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("token", sa.String(length=100), nullable=False),
        sa.Column("began", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen", sa.DateTime(timezone=True), nullable=False),
        sa.Column("machine", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_worker")),
        sa.UniqueConstraint("name", name=op.f("uq_worker_name")),
    )
    op.create_index(op.f("ix_worker_seen"), "worker", ["seen"], unique=False)

    op.create_table(
        "task",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("cell_id", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("suite", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("python", sa.String(length=40), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("memory", sa.Float(), nullable=False),
        sa.Column("low", sa.Integer(), nullable=False),
        sa.Column("high", sa.Integer(), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("lease", sa.String(length=64), nullable=True),
        sa.Column("worker", sa.String(length=100), nullable=True),
        sa.Column("until", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"], name=op.f("fk_task_cell_id_cell")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_task_run_id_run")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_task")),
        sa.UniqueConstraint("lease", name=op.f("uq_task_lease")),
        sa.UniqueConstraint("run_id", "cell_id", "attempt", name=op.f("uq_task_run_id_cell_id_attempt")),
    )
    op.create_index("ix_task_state", "task", ["state", "rank", "id"], unique=False)
    op.create_index("ix_task_state_until", "task", ["state", "until"], unique=False)

    op.create_table(
        "lease",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("task_id", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=100), nullable=False),
        sa.Column("token", sa.String(length=100), nullable=False),
        sa.Column("begun", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended", sa.DateTime(timezone=True), nullable=True),
        sa.Column("how", sa.String(length=20), nullable=True),
        sa.ForeignKeyConstraint(["task_id"], ["task.id"], name=op.f("fk_lease_task_id_task")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_lease")),
    )
    op.create_index(op.f("ix_lease_task_id"), "lease", ["task_id"], unique=False)

    op.create_table(
        "late",
        sa.Column("lease", sa.String(length=64), nullable=False),
        sa.Column("task_id", sa.Integer(), nullable=False),
        sa.Column("received", sa.DateTime(timezone=True), nullable=False),
        sa.Column("verdict", sa.String(length=20), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("log", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["lease"], ["lease.id"], name=op.f("fk_late_lease_lease")),
        sa.ForeignKeyConstraint(["task_id"], ["task.id"], name=op.f("fk_late_task_id_task")),
        sa.PrimaryKeyConstraint("lease", name=op.f("pk_late")),
    )
    op.create_index(op.f("ix_late_task_id"), "late", ["task_id"], unique=False)

    op.create_table(
        "upload",
        sa.Column("lease", sa.String(length=64), nullable=False),
        sa.Column("received", sa.DateTime(timezone=True), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["lease"], ["lease.id"], name=op.f("fk_upload_lease_lease")),
        sa.PrimaryKeyConstraint("lease", name=op.f("pk_upload")),
    )
