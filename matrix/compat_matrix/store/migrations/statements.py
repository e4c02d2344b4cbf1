"""The SQL of the revisions, written for SQLite."""

import re
from pathlib import Path

from alembic import op

#: PostgreSQL's words for SQLite's, as patterns.
POSTGRESQL = {
    r"\bid INTEGER": "id SERIAL",
    "DATETIME": "TIMESTAMP WITH TIME ZONE",
    "BLOB": "BYTEA",
    "BOOLEAN DEFAULT 0": "BOOLEAN DEFAULT false",
    "WITHOUT ROWID": "",
}


def execute(revision: str) -> None:
    """Execute the statements in the file beside a revision's module."""
    sql = Path(revision).with_suffix(".sql").read_text(encoding="utf-8")
    if op.get_bind().dialect.name == "postgresql":
        for pattern, word in POSTGRESQL.items():
            sql = re.sub(pattern, word, sql)
    for statement in sql.split(";")[:-1]:
        op.execute(statement)
