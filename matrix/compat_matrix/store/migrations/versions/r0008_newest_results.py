"""The newest result of each cell."""

from __future__ import annotations

import json
import zlib
from typing import Any

import sqlalchemy as sa
from alembic import op

from compat_matrix import versions
from compat_matrix.cells import Cell

revision = "0008"
down_revision = "0007"

_NEWEST = """
INSERT INTO newest (cell_id, run_id, result_id, versions)
SELECT cell_id, run_id, result_id, '{}' FROM (
    SELECT planned.cell_id, planned.run_id, result.id AS result_id, row_number() OVER (
        PARTITION BY planned.cell_id
        ORDER BY CASE WHEN result.verdict IN ('passed', 'flaky', 'known', 'failed') THEN 0
            WHEN result.verdict IS NOT NULL THEN 1 ELSE 2 END, result.id DESC, run.id DESC
    ) AS number
    FROM planned JOIN run ON run.id = planned.run_id LEFT JOIN result
        ON result.run_id = planned.run_id AND result.cell_id = planned.cell_id AND result.attempt = (
            SELECT max(attempt) FROM result AS later
            WHERE later.run_id = planned.run_id AND later.cell_id = planned.cell_id
        )
    WHERE NOT run.partial
) AS every WHERE number = 1
"""

_RESULTS = """
SELECT cell.id, cell.python, cell.transformers, cell.torch, environment.content, pins.content
FROM newest JOIN cell ON cell.id = newest.cell_id JOIN result ON result.id = newest.result_id
    LEFT JOIN shared_text AS environment ON environment.id = result.environment_id
    LEFT JOIN shared_text AS pins ON pins.id = result.pins_id
"""


def upgrade() -> None:
    """Create the table ``newest``, and fill it."""
    op.create_table(
        "newest",
        sa.Column("cell_id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("result_id", sa.Integer(), nullable=True),
        sa.Column("versions", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["cell_id"], ["cell.id"], name=op.f("fk_newest_cell_id_cell")),
        sa.ForeignKeyConstraint(["result_id"], ["result.id"], name=op.f("fk_newest_result_id_result")),
        sa.ForeignKeyConstraint(
            ["run_id", "cell_id"], ["planned.run_id", "planned.cell_id"], name=op.f("fk_newest_run_id_cell_id_planned")
        ),
        sa.PrimaryKeyConstraint("cell_id", name=op.f("pk_newest")),
    )
    connection = op.get_bind()
    connection.execute(sa.text(_NEWEST))
    for key, python, transformers, torch, environment, pins in connection.execute(sa.text(_RESULTS)).all():
        said = json.loads(_text(environment) or "{}")
        found = versions.exact(Cell(python, transformers, torch), said if isinstance(said, dict) else {}, _text(pins))
        values = {"key": key, "versions": json.dumps(found, sort_keys=True)}
        connection.execute(sa.text("UPDATE newest SET versions = :versions WHERE cell_id = :key"), values)


def _text(packed: Any) -> str:
    return zlib.decompress(packed).decode("utf-8", "surrogatepass") if packed else ""
