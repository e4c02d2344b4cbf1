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

#: The condition of the index of failed tests. SQLite uses the index only if a query has the same condition literally.
FAILED = "outcome IN ('failed', 'error')"


class Utc(TypeDecorator[datetime]):
    """A time. SQLite stores no time zone, so all times are in UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """The time in UTC."""
        return value and value.astimezone(timezone.utc)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """The time in UTC, with its time zone."""
        if value is None:
            return None
        return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value.astimezone(timezone.utc)


class Packed(TypeDecorator[str]):
    """Compressed text. It may contain lone surrogates and NULs, which databases refuse in text."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:
        """The text, compressed."""
        return None if value is None else pack(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> str | None:
        """The text, decompressed."""
        return None if value is None else unpack(value)


def pack(text: str) -> bytes:
    """Compress text."""
    return zlib.compress(text.encode("utf-8", "surrogatepass"))


def unpack(content: bytes) -> str:
    """The text that `pack` compressed."""
    return zlib.decompress(content).decode("utf-8", "surrogatepass")


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

#: Long texts that many rows share: messages, pins, environments, axes; with the digest of the text.
TEXT = Table(
    "shared_text",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("digest", String(32), nullable=False, unique=True),
    Column("content", Packed, nullable=False),
)

#: The names of tests. The digest is unique instead of the name, which may be too long for an index.
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

#: The cells of a run; excluded ones have a reason.
PLANNED = Table(
    "planned",
    metadata,
    Column("run_id", ForeignKey("run.id"), primary_key=True),
    Column("cell_id", ForeignKey("cell.id"), primary_key=True),
    Column("position", Integer, nullable=False),
    Column("excluded", Text),
    sqlite_with_rowid=False,
)

#: The last columns count the tests by outcome, so that a summary needs no other table.
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

#: For each cell its newest result in whole runs: one that passed or failed if there is any, else one that was not run; without a
#: result, its newest plan. `versions` are the exact versions of a result as JSON. Changed by `inserts`, with the results.
NEWEST = Table(
    "newest",
    metadata,
    Column("cell_id", ForeignKey("cell.id"), primary_key=True),
    Column("run_id", Integer, nullable=False),
    Column("result_id", ForeignKey("result.id")),
    Column("versions", Text, nullable=False),
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

# The service's tables: tasks, workers, leases and tokens.

#: The tokens for writing. The token itself isn't stored.
TOKEN = Table(
    "token",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(100), nullable=False, unique=True),
    Column("digest", String(64), nullable=False, unique=True),
    Column("scopes", String(100), nullable=False),
    Column("created", Utc, nullable=False),
    Column("expires", Utc),
    Column("revoked", Utc),
    Column("used", Utc),
)

WORKER = Table(
    "worker",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(100), nullable=False, unique=True),
    Column("token", String(100), nullable=False),
    Column("began", Utc, nullable=False),
    Column("seen", Utc, nullable=False, index=True),
    Column("machine", Text, nullable=False),
)

#: A cell to run. `lease`, `worker` and `until` are those of its current lease, or null.
#: `low` and `high` are compute capabilities, as in sm_90. The task with the lowest `rank` is leased first.
TASK = Table(
    "task",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("run.id"), nullable=False),
    Column("cell_id", ForeignKey("cell.id"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("suite", Text, nullable=False),
    Column("fingerprint", String(64), nullable=False),
    Column("python", String(40), nullable=False),
    Column("gpus", Integer, nullable=False),
    Column("memory", Float, nullable=False),
    Column("low", Integer, nullable=False),
    Column("high", Integer, nullable=False),
    Column("labels", Text, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("state", String(20), nullable=False),
    Column("tries", Integer, nullable=False),
    Column("lease", String(64), unique=True),
    Column("worker", String(100)),
    Column("until", Utc),
    UniqueConstraint("run_id", "cell_id", "attempt"),
    Index("ix_task_state", "state", "rank", "id"),
    Index("ix_task_state_until", "state", "until"),
)

#: All leases; `how` it ended is null while it is open. Knowing an `id` allows reporting for it, so it must not be shown.
LEASE = Table(
    "lease",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("task_id", ForeignKey("task.id"), nullable=False, index=True),
    Column("worker", String(100), nullable=False),
    Column("token", String(100), nullable=False),
    Column("begun", Utc, nullable=False),
    Column("ended", Utc),
    Column("how", String(20)),
)

#: The log of a lease whose result hasn't arrived yet, compressed as by `Packed`.
UPLOAD = Table(
    "upload",
    metadata,
    Column("lease", ForeignKey("lease.id"), primary_key=True),
    Column("received", Utc, nullable=False),
    Column("content", LargeBinary, nullable=False),
)

#: Results that were reported after their lease had expired. They are kept, but don't count.
LATE = Table(
    "late",
    metadata,
    Column("lease", ForeignKey("lease.id"), primary_key=True),
    Column("task_id", ForeignKey("task.id"), nullable=False, index=True),
    Column("received", Utc, nullable=False),
    Column("verdict", String(20), nullable=False),
    Column("kind", String(20)),
    Column("reason", Text, nullable=False),
    Column("started", Utc, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("content", Packed, nullable=False),
    Column("log", LargeBinary),
)

# The tables of `watch`.

#: Texts by name, such as the atlas as JSON; the newest of a name is the current one.
DOCUMENT = Table(
    "document",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(100), nullable=False, index=True),
    Column("made", Utc, nullable=False),
    Column("content", Packed, nullable=False),
)

RELEASE_SEEN = Table(
    "release_seen",
    metadata,
    Column("distribution", String(100), primary_key=True),
    Column("version", String(100), primary_key=True),
    Column("seen", Utc, nullable=False),
    sqlite_with_rowid=False,
)
