"""The newest result of each cell."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Create the table ``newest``. It is filled after all migrations, because its contents follow from the results."""
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
