"""The schema of 0.1.0 and 0.2.0. The names of constraints follow the convention in `models`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = None

TIME = sa.DateTime(timezone=True)


def _id() -> sa.Column[int]:
    return sa.Column("id", sa.Integer, primary_key=True)


def _columns(kind: Any, *names: str, **more: Any) -> Iterator[sa.Column[Any]]:
    """Columns of the same type, not null by default."""
    return (sa.Column(name, kind, **{"nullable": False, **more}) for name in names)


def upgrade() -> None:
    """Create the tables of results, of the service, which leased cells to workers, and of `watch`."""
    op.create_table(
        "cell",
        _id(),
        *_columns(sa.String(200), "name", unique=True),
        *_columns(sa.String(40), "python", "transformers", "torch"),
        *_columns(sa.String(20), "flash_attention", "device"),
    )
    for table, column, kind in (("nodeid", "name", sa.Text), ("shared_text", "content", sa.LargeBinary)):
        op.create_table(table, _id(), *_columns(sa.String(32), "digest", unique=True), *_columns(kind, column))
    op.create_table(
        "run",
        _id(),
        *_columns(sa.String(40), "name"),
        *_columns(TIME, "started", index=True),
        *_columns(TIME, "finished", nullable=True),
        *_columns(sa.String(40), "state"),
        *_columns(sa.Text, "label", "command", "host", "revision"),
        *_columns(sa.Integer, "axes_id", nullable=True),
        sa.ForeignKeyConstraint(["axes_id"], ["shared_text.id"]),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "planned",
        *_columns(sa.Integer, "run_id", "cell_id", primary_key=True),
        *_columns(sa.Integer, "position"),
        *_columns(sa.Text, "excluded", nullable=True),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"]),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"]),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "result",
        _id(),
        *_columns(sa.Integer, "run_id"),
        *_columns(sa.Integer, "cell_id", index=True),
        *_columns(sa.Integer, "attempt"),
        *_columns(sa.String(20), "verdict"),
        *_columns(sa.String(20), "kind", nullable=True),
        *_columns(sa.Text, "reason"),
        *_columns(TIME, "started"),
        *_columns(sa.Float, "seconds"),
        *_columns(sa.Integer, "environment_id", "pins_id", "command_id", nullable=True),
        *_columns(sa.Integer, "passed", "failed", "error", "skipped", "xfailed", "xpassed"),
        *(sa.ForeignKeyConstraint([name], ["shared_text.id"]) for name in ("command_id", "environment_id", "pins_id")),
        sa.ForeignKeyConstraint(["run_id", "cell_id"], ["planned.run_id", "planned.cell_id"]),
        sa.UniqueConstraint("run_id", "cell_id", "attempt"),
    )
    op.create_table(
        "log",
        sa.Column("result_id", sa.Integer, sa.ForeignKey("result.id"), primary_key=True),
        *_columns(sa.LargeBinary, "content"),
    )
    op.create_table(
        "test",
        *_columns(sa.Integer, "result_id", "position", primary_key=True),
        *_columns(sa.Integer, "nodeid_id"),
        *_columns(sa.String(8), "outcome"),
        *_columns(sa.Float, "seconds"),
        *_columns(sa.Integer, "message_id", nullable=True),
        sa.ForeignKeyConstraint(["message_id"], ["shared_text.id"]),
        sa.ForeignKeyConstraint(["nodeid_id"], ["nodeid.id"]),
        sa.ForeignKeyConstraint(["result_id"], ["result.id"]),
        sqlite_with_rowid=False,
    )
    bad = sa.text("outcome IN ('failed', 'error')")
    columns = ["result_id", "nodeid_id", "outcome"]
    op.create_index("ix_test_failed", "test", columns, sqlite_where=bad, postgresql_where=bad)
    op.add_column("run", sa.Column("partial", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_table(
        "token",
        _id(),
        *_columns(sa.String(100), "name"),
        *_columns(sa.String(64), "digest"),
        *_columns(sa.String(100), "scopes"),
        *_columns(TIME, "created"),
        *_columns(TIME, "expires", "revoked", "used", nullable=True),
        sa.UniqueConstraint("digest"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "worker",
        _id(),
        *_columns(sa.String(100), "name", "token"),
        *_columns(TIME, "began"),
        *_columns(TIME, "seen", index=True),
        *_columns(sa.Text, "machine"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "task",
        _id(),
        *_columns(sa.Integer, "run_id", "cell_id", "attempt"),
        *_columns(sa.Text, "suite"),
        *_columns(sa.String(64), "fingerprint"),
        *_columns(sa.String(40), "python"),
        *_columns(sa.Integer, "gpus"),
        *_columns(sa.Float, "memory"),
        *_columns(sa.Integer, "low", "high"),
        *_columns(sa.Text, "labels"),
        *_columns(sa.Integer, "rank"),
        *_columns(sa.String(20), "state"),
        *_columns(sa.Integer, "tries"),
        *_columns(sa.String(64), "lease", nullable=True),
        *_columns(sa.String(100), "worker", nullable=True),
        *_columns(TIME, "until", nullable=True),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"]),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"]),
        sa.UniqueConstraint("lease"),
        sa.UniqueConstraint("run_id", "cell_id", "attempt"),
    )
    op.create_index("ix_task_state", "task", ["state", "rank", "id"])
    op.create_index("ix_task_state_until", "task", ["state", "until"])
    op.create_table(
        "lease",
        *_columns(sa.String(64), "id", primary_key=True),
        *_columns(sa.Integer, "task_id", index=True),
        *_columns(sa.String(100), "worker", "token"),
        *_columns(TIME, "begun"),
        *_columns(TIME, "ended", nullable=True),
        *_columns(sa.String(20), "how", nullable=True),
        sa.ForeignKeyConstraint(["task_id"], ["task.id"]),
    )
    op.create_table(
        "late",
        *_columns(sa.String(64), "lease", primary_key=True),
        *_columns(sa.Integer, "task_id", index=True),
        *_columns(TIME, "received"),
        *_columns(sa.String(20), "verdict"),
        *_columns(sa.String(20), "kind", nullable=True),
        *_columns(sa.Text, "reason"),
        *_columns(TIME, "started"),
        *_columns(sa.Float, "seconds"),
        *_columns(sa.LargeBinary, "content"),
        *_columns(sa.LargeBinary, "log", nullable=True),
        sa.ForeignKeyConstraint(["lease"], ["lease.id"]),
        sa.ForeignKeyConstraint(["task_id"], ["task.id"]),
    )
    op.create_table(
        "upload",
        *_columns(sa.String(64), "lease", primary_key=True),
        *_columns(TIME, "received"),
        *_columns(sa.LargeBinary, "content"),
        sa.ForeignKeyConstraint(["lease"], ["lease.id"]),
    )
    op.create_table(
        "document",
        _id(),
        *_columns(sa.String(100), "name", index=True),
        *_columns(TIME, "made"),
        *_columns(sa.LargeBinary, "content"),
    )
    op.create_table(
        "release_seen",
        *_columns(sa.String(100), "distribution", "version", primary_key=True),
        *_columns(TIME, "seen"),
        sqlite_with_rowid=False,
    )
