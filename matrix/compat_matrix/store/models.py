"""The tables.

A change here needs a migration. In a checkout, with a store at the last schema::

    Store.open("old.db").close()  # before the change
    python -c "from compat_matrix.store.schema import draft; draft('old.db', 'what changes')"  # after it

then look over what alembic wrote into ``migrations/versions`` and set `schema.HEAD`.
"""

from __future__ import annotations

import zlib
from datetime import datetime, timezone

from sqlalchemy import (
    Boolean,
    Column,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
    text,
)

#: The condition of the index of failed tests. SQLite takes that index only where a query has the same words.
FAILED = "outcome IN ('failed', 'error')"


class Utc(TypeDecorator[datetime]):
    """A moment; SQLite keeps no time zone, so that all of them are in UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value and value.astimezone(timezone.utc)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value.astimezone(timezone.utc)


class Packed(TypeDecorator[str]):
    """Text, compressed. Any text: what a test prints may have lone surrogates and NULs, which databases refuse."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:
        return None if value is None else zlib.compress(value.encode("utf-8", "surrogatepass"))

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> str | None:
        return None if value is None else zlib.decompress(value).decode("utf-8", "surrogatepass")


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

#: Long texts that many rows share: messages, pins, environments, axes. The digest is that of the text.
TEXT = Table(
    "shared_text",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("digest", String(32), nullable=False, unique=True),
    Column("content", Packed, nullable=False),
)

#: The names of tests. The digest is unique in place of the name, which may be longer than an index takes.
NODEID = Table(
    "nodeid",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("digest", String(32), nullable=False, unique=True),
    Column("name", Text, nullable=False),
)

CELL = Table(
    "cell",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(200), nullable=False, unique=True),
    Column("python", String(40), nullable=False),
    Column("transformers", String(40), nullable=False),
    Column("torch", String(40), nullable=False),
    Column("flash_attention", String(20), nullable=False),
    Column("device", String(20), nullable=False),
)

RUN = Table(
    "run",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(40), nullable=False, unique=True),
    Column("started", Utc, nullable=False, index=True),
    Column("finished", Utc),
    Column("state", String(40), nullable=False),
    Column("label", Text, nullable=False),
    Column("command", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("revision", Text, nullable=False),
    Column("axes_id", ForeignKey("shared_text.id")),
    Column("partial", Boolean, nullable=False, server_default=false()),
)

#: The cells of a run, those that can't exist with the reason.
PLANNED = Table(
    "planned",
    metadata,
    Column("run_id", ForeignKey("run.id"), primary_key=True),
    Column("cell_id", ForeignKey("cell.id"), primary_key=True),
    Column("position", Integer, nullable=False),
    Column("excluded", Text),
    sqlite_with_rowid=False,
)

#: The last columns count the tests by outcome, so that a summary needs none of them.
RESULT = Table(
    "result",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", Integer, nullable=False),
    Column("cell_id", Integer, nullable=False, index=True),
    Column("attempt", Integer, nullable=False),
    Column("verdict", String(20), nullable=False),
    Column("kind", String(20)),
    Column("reason", Text, nullable=False),
    Column("started", Utc, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("environment_id", ForeignKey("shared_text.id")),
    Column("pins_id", ForeignKey("shared_text.id")),
    Column("command_id", ForeignKey("shared_text.id")),
    *(
        Column(outcome, Integer, nullable=False)
        for outcome in ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
    ),
    UniqueConstraint("run_id", "cell_id", "attempt"),
    ForeignKeyConstraint(["run_id", "cell_id"], ["planned.run_id", "planned.cell_id"]),
)

TEST = Table(
    "test",
    metadata,
    Column("result_id", ForeignKey("result.id"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("nodeid_id", ForeignKey("nodeid.id"), nullable=False),
    Column("outcome", String(8), nullable=False),
    Column("seconds", Float, nullable=False),
    Column("message_id", ForeignKey("shared_text.id")),
    sqlite_with_rowid=False,
)
Index(
    "ix_test_failed",
    TEST.c.result_id,
    TEST.c.nodeid_id,
    TEST.c.outcome,
    sqlite_where=text(FAILED),
    postgresql_where=text(FAILED),
)

LOG = Table(
    "log",
    metadata,
    Column("result_id", ForeignKey("result.id"), primary_key=True),
    Column("content", Packed, nullable=False),
)
