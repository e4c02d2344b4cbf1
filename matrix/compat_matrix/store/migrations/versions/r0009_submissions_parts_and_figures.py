"""Runs wait for a service as a whole, or are parts of one; axes of a project's own; newest results; figures."""

from __future__ import annotations

from datetime import datetime, timezone

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0004"

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Replace the tables of leases by ``submission``; create ``figure``, and ``newest``, which is filled after all migrations.

    Runs that waited for workers are interrupted, and can be resumed. Tokens of workers may still read.
    """
    run = sa.table("run", sa.column("id"), sa.column("state"), sa.column("finished", TIME))
    waited = sa.select(sa.column("run_id", sa.Integer)).select_from(sa.table("task"))
    ended = {"state": "interrupted", "finished": datetime.now(timezone.utc)}
    op.execute(sa.update(run).where(run.c.state == "running", run.c.id.in_(waited)).values(ended))
    for table in ("late", "upload", "lease", "task", "worker"):
        op.drop_table(table)
    for before, after in (("submit work", "submit"), ("work", "read")):
        op.execute(f"UPDATE token SET scopes = '{after}' WHERE scopes = '{before}'")
    op.create_table(
        "submission",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("run_id", sa.Integer, nullable=False),
        sa.Column("suite", sa.Text, nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("again", sa.Text, nullable=False),
        sa.Column("claim", sa.String(32)),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("seen", TIME),
        sa.Column("running", sa.Text, nullable=False),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"]),
        sa.UniqueConstraint("run_id"),
    )
    op.add_column("cell", sa.Column("extra", sa.Text, nullable=False, server_default=sa.text("''")))
    op.add_column("run", sa.Column("whole", sa.String(40), nullable=False, server_default=sa.text("''")))
    op.execute("UPDATE run SET whole = name")
    op.create_index("ix_run_whole", "run", ["whole"])
    op.drop_index("ix_run_started", table_name="run")  # runs are ordered by their ids
    op.create_table(
        "newest",
        sa.Column("cell_id", sa.Integer, primary_key=True),
        sa.Column("run_id", sa.Integer, nullable=False),
        sa.Column("result_id", sa.Integer),
        sa.Column("versions", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"]),
        sa.ForeignKeyConstraint(["result_id"], ["result.id"]),
        sa.ForeignKeyConstraint(["run_id", "cell_id"], ["planned.run_id", "planned.cell_id"]),
    )
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
