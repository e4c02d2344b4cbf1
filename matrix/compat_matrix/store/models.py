"""The tables. A change here needs a migration in ``migrations/versions``, and another `database.HEAD`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

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


def _id() -> Column[int]:
    return Column("id", Integer, primary_key=True)


def _columns(kind: Any, *names: str, **more: Any) -> Iterator[Column[Any]]:
    """Columns of the same type, not null by default."""
    return (Column(name, kind, **{"nullable": False, **more}) for name in names)


def _reference(name: str, to: str, **more: Any) -> Column[int]:
    return Column(name, ForeignKey(f"{to}.id"), **more)


def _of_planned() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(["run_id", "cell_id"], ["planned.run_id", "planned.cell_id"])


#: Long texts that many rows share: messages, pins, environments, axes; with the digest of the text.
TEXT = Table("shared_text", metadata, _id(), *_columns(String(32), "digest", unique=True), *_columns(Packed, "content"))

#: The names of tests. The digest is unique instead of the name, which may be too long for an index.
NODEID = Table("nodeid", metadata, _id(), *_columns(String(32), "digest", unique=True), *_columns(Plain, "name"))

#: Transformers and torch are empty without the axis. `extra` is `Cell.own`.
CELL = Table(
    "cell",
    metadata,
    _id(),
    *_columns(String(200), "name", unique=True),
    *_columns(String(40), "python", "transformers", "torch"),
    *_columns(String(20), "flash_attention", "device"),
    *_columns(Text, "extra", server_default=text("''")),
)

#: `whole` is the name of the first of the runs that are parts of one. Times are those of the machine that ran it, which may be
#: wrong; the order of runs and results is that of their ids, in which the store received them.
RUN = Table(
    "run",
    metadata,
    _id(),
    *_columns(String(40), "name", unique=True),
    *_columns(Utc, "started"),
    *_columns(Utc, "finished", nullable=True),
    *_columns(String(40), "state"),
    *_columns(Plain, "label", "command", "host", "revision"),
    _reference("axes_id", "shared_text"),
    *_columns(Boolean, "partial", server_default=false()),
    *_columns(String(40), "whole", index=True, server_default=text("''")),
)

#: The cells of a run; excluded ones have a reason.
PLANNED = Table(
    "planned",
    metadata,
    _reference("run_id", "run", primary_key=True),
    _reference("cell_id", "cell", primary_key=True),
    *_columns(Integer, "position"),
    *_columns(Plain, "excluded", nullable=True),
    sqlite_with_rowid=False,
)

#: The last columns count the tests by outcome, so that a summary needs no other table.
RESULT = Table(
    "result",
    metadata,
    _id(),
    *_columns(Integer, "run_id"),
    *_columns(Integer, "cell_id", index=True),
    *_columns(Integer, "attempt"),
    *_columns(String(20), "verdict"),
    *_columns(String(20), "kind", nullable=True),
    *_columns(Plain, "reason"),
    *_columns(Utc, "started"),
    *_columns(Float, "seconds"),
    *(_reference(name, "shared_text") for name in ("environment_id", "pins_id", "command_id")),
    *_columns(Integer, "passed", "failed", "error", "skipped", "xfailed", "xpassed"),
    *_columns(Integer, "flaky", "known", server_default="0"),
    UniqueConstraint("run_id", "cell_id", "attempt"),
    _of_planned(),
)

#: For each cell its newest result in whole runs: one whose tests ran if there is any, else one that was not run; without a
#: result, its newest plan. `versions` are the exact versions of a result as JSON. Changed by `inserts`, with the results.
NEWEST = Table(
    "newest",
    metadata,
    _reference("cell_id", "cell", primary_key=True),
    *_columns(Integer, "run_id"),
    _reference("result_id", "result"),
    *_columns(Text, "versions"),
    _of_planned(),
)

TEST = Table(
    "test",
    metadata,
    _reference("result_id", "result", primary_key=True),
    *_columns(Integer, "position", primary_key=True),
    _reference("nodeid_id", "nodeid", nullable=False),
    *_columns(String(8), "outcome"),
    *_columns(Float, "seconds"),
    _reference("message_id", "shared_text"),
    sqlite_with_rowid=False,
)
Index(
    "ix_test_failed",
    *(TEST.c[name] for name in ("result_id", "nodeid_id", "outcome")),
    sqlite_where=text(FAILED),
    postgresql_where=text(FAILED),
)

#: The numbers that tests recorded.
FIGURE = Table(
    "figure",
    metadata,
    _reference("result_id", "result", primary_key=True),
    *_columns(String(100), "name", primary_key=True),
    _reference("nodeid_id", "nodeid", nullable=False),
    *_columns(Float, "value"),
    *_columns(String(40), "unit"),
    *_columns(String(6), "better", nullable=True),
    sqlite_with_rowid=False,
)

LOG = Table("log", metadata, _reference("result_id", "result", primary_key=True), *_columns(Packed, "content"))

#: The service's tokens for writing. The token itself isn't stored.
TOKEN = Table(
    "token",
    metadata,
    _id(),
    *_columns(String(100), "name", unique=True),
    *_columns(String(64), "digest", unique=True),
    *_columns(String(100), "scopes"),
    *_columns(Utc, "created"),
    *_columns(Utc, "expires", "revoked", "used", nullable=True),
)

#: The runs that wait for a service or are executed by one, in the order of `id`.
#:
#: `again`: the cells to repeat, with their attempts so far, as JSON. `claim`, `host` and `seen`: the service that executes the
#: run, and when it last said so; null while the run waits. `running`: the cells that run now, with their beginnings, as JSON.
#: `tries`: how often its execution began since its last result. `reason`: why the last one failed.
SUBMISSION = Table(
    "submission",
    metadata,
    _id(),
    _reference("run_id", "run", nullable=False, unique=True),
    *_columns(Text, "suite"),
    *_columns(String(64), "fingerprint"),
    *_columns(Text, "again"),
    *_columns(String(32), "claim", nullable=True),
    *_columns(Text, "host", default=""),
    *_columns(Utc, "seen", nullable=True),
    *_columns(Text, "running", default="{}"),
    *_columns(Integer, "tries", default=0),
    *_columns(Plain, "reason", default=""),
)

#: Texts of `watch` by name, such as the atlas as JSON; the newest of a name is the current one.
DOCUMENT = Table(
    "document",
    metadata,
    _id(),
    *_columns(String(100), "name", index=True),
    *_columns(Utc, "made"),
    *_columns(Packed, "content"),
)

#: The releases that `watch` saw.
RELEASE_SEEN = Table(
    "release_seen",
    metadata,
    *_columns(String(100), "distribution", "version", primary_key=True),
    *_columns(Utc, "seen"),
    sqlite_with_rowid=False,
)
