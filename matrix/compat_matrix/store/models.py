"""The tables. A change here needs a migration in ``migrations/versions``, and another `database.HEAD`."""

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

#: The number of bytes of the longest text, before it is packed.
MOST = 256 * 2**20


class Utc(TypeDecorator[datetime]):
    """A time. SQLite stores no time zone, so all times are in UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """The time in UTC."""
        return value and value.astimezone(timezone.utc)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """The time in UTC, with its time zone."""
        return value and (value.astimezone(timezone.utc) if value.tzinfo else value.replace(tzinfo=timezone.utc))


class Plain(TypeDecorator[str]):
    """Text, without the characters that databases refuse: lone surrogates and NUL are replaced."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """The text without these characters."""
        return value and value.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


class Packed(TypeDecorator[str]):
    """Compressed text, which may contain any character."""

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
    """The text that `pack` compressed.

    Raises:
        zlib.error: it has none, or is too large.
    """
    if not isinstance(content, bytes):  # of a foreign store
        raise zlib.error(f"a text can't be unpacked: it is {content!r:.40}")
    if len(content) > MOST // 1032:  # of at most 1,032 bytes each byte is one
        unpacker, rest, size = zlib.decompressobj(), content, 0
        while rest:
            size += len(unpacker.decompress(rest, 2**20))
            rest = unpacker.unconsumed_tail
            if size > MOST:
                raise zlib.error(f"a text has more than {MOST // 2**20} MiB")
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
    Column("name", Plain, nullable=False),
)

#: Transformers and torch are empty without the axis. `extra` is `Cell.own`.
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
    Column("extra", Text, nullable=False, server_default=text("''")),
)

#: `whole` is the name of the first of the runs that are parts of one. Times are those of the machine that ran it, which may be
#: wrong; the order of runs and results is that of their ids, in which the store received them.
RUN = Table(
    "run",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(40), nullable=False, unique=True),
    Column("started", Utc, nullable=False),
    Column("finished", Utc),
    Column("state", String(40), nullable=False),
    Column("label", Plain, nullable=False),
    Column("command", Plain, nullable=False),
    Column("host", Plain, nullable=False),
    Column("revision", Plain, nullable=False),
    Column("axes_id", ForeignKey("shared_text.id")),
    Column("partial", Boolean, nullable=False, server_default=false()),
    Column("whole", String(40), nullable=False, index=True, server_default=text("''")),
)

#: The cells of a run; excluded ones have a reason.
PLANNED = Table(
    "planned",
    metadata,
    Column("run_id", ForeignKey("run.id"), primary_key=True),
    Column("cell_id", ForeignKey("cell.id"), primary_key=True),
    Column("position", Integer, nullable=False),
    Column("excluded", Plain),
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
    Column("reason", Plain, nullable=False),
    Column("started", Utc, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("environment_id", ForeignKey("shared_text.id")),
    Column("pins_id", ForeignKey("shared_text.id")),
    Column("command_id", ForeignKey("shared_text.id")),
    *(
        Column(outcome, Integer, nullable=False)
        for outcome in ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
    ),
    *(Column(outcome, Integer, nullable=False, server_default="0") for outcome in ("flaky", "known")),
    UniqueConstraint("run_id", "cell_id", "attempt"),
    ForeignKeyConstraint(["run_id", "cell_id"], ["planned.run_id", "planned.cell_id"]),
)

#: For each cell its newest result in whole runs: one whose tests ran if there is any, else one that was not run; without a
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

#: The numbers that tests recorded.
FIGURE = Table(
    "figure",
    metadata,
    Column("result_id", ForeignKey("result.id"), primary_key=True),
    Column("name", String(100), primary_key=True),
    Column("nodeid_id", ForeignKey("nodeid.id"), nullable=False),
    Column("value", Float, nullable=False),
    Column("unit", String(40), nullable=False),
    Column("better", String(6)),
    sqlite_with_rowid=False,
)

LOG = Table(
    "log",
    metadata,
    Column("result_id", ForeignKey("result.id"), primary_key=True),
    Column("content", Packed, nullable=False),
)

# The service's tables: tokens and submissions.

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

#: The runs that wait for a service or are executed by one, in the order of `id`.
#:
#: `again`: the cells to repeat, with their attempts so far, as JSON. `claim`, `host` and `seen`: the service that executes the
#: run, and when it last said so; null while the run waits. `running`: the cells that run now, with their beginnings, as JSON.
#: `tries`: how often its execution began since its last result. `reason`: why the last one failed.
SUBMISSION = Table(
    "submission",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("run.id"), nullable=False, unique=True),
    Column("suite", Text, nullable=False),
    Column("fingerprint", String(64), nullable=False),
    Column("again", Text, nullable=False),
    Column("claim", String(32)),
    Column("host", Text, nullable=False, default=""),
    Column("seen", Utc),
    Column("running", Text, nullable=False, default="{}"),
    Column("tries", Integer, nullable=False, default=0),
    Column("reason", Plain, nullable=False, default=""),
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
