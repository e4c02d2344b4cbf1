"""Runs wait for a service as a whole: submissions take the place of tasks, leases, workers and late results."""

from __future__ import annotations

from datetime import datetime, timezone

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create ``submission`` and drop the tables of workers, which stores of that time have.

    Runs that waited for workers are interrupted, and can be resumed. Tokens of workers may still read.
    """
    if sa.inspect(op.get_bind()).has_table("task"):
        run = sa.table("run", sa.column("id"), sa.column("state"), sa.column("finished", sa.DateTime(timezone=True)))
        waited = sa.select(sa.column("run_id", sa.Integer)).select_from(sa.table("task"))
        ended = {"state": "interrupted", "finished": datetime.now(timezone.utc)}
        op.execute(sa.update(run).where(run.c.state == "running", run.c.id.in_(waited)).values(ended))
    for table in ("late", "upload", "lease", "task", "worker"):
        op.drop_table(table, if_exists=True)
    token = sa.table("token", sa.column("scopes"))
    for before, after in (("submit work", "submit"), ("work", "read")):
        op.execute(sa.update(token).where(token.c.scopes == before).values(scopes=after))
    op.create_table(
        "submission",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("run_id", sa.Integer, nullable=False),
        sa.Column("suite", sa.Text, nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("again", sa.Text, nullable=False),
        sa.Column("claim", sa.String(32)),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("seen", sa.DateTime(timezone=True)),
        sa.Column("running", sa.Text, nullable=False),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"]),
        sa.UniqueConstraint("run_id"),
    )
