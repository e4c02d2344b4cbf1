"""The schema of 0.1.0 and 0.2.0."""

from __future__ import annotations

import re
from pathlib import Path

from alembic import op

revision = "0004"
down_revision = None

#: PostgreSQL's words for SQLite's, as patterns.
POSTGRESQL = {
    r"\bid INTEGER": "id SERIAL",
    "DATETIME": "TIMESTAMP WITH TIME ZONE",
    "BLOB": "BYTEA",
    "DEFAULT 0": "DEFAULT false",
    "WITHOUT ROWID": "",
}


def upgrade() -> None:
    """Create the tables of results, of the service, which leased cells to workers, and of `watch`."""
    sql = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
    if op.get_bind().dialect.name == "postgresql":
        for pattern, word in POSTGRESQL.items():
            sql = re.sub(pattern, word, sql)
    for statement in sql.split(";")[:-1]:
        op.execute(statement)
