"""The tables, as the SQL in ``migrations/versions`` leaves them.

A change of them is a further revision there: a file of SQL and a module with its name; and another `database.HEAD`.
"""

import zlib
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from itertools import accumulate
from pathlib import Path
from typing import Any

from sqlalchemy import DateTime, Dialect, LargeBinary, MetaData, Text, TypeDecorator, create_engine, event
from sqlalchemy.pool import NullPool

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
        return value and value.astimezone(timezone.utc)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], datetime | None] | None:
        """SQLite's text is read in one step: SQLAlchemy takes four, and a page has hundreds of times."""
        if dialect.name != "sqlite":
            return super().result_processor(dialect, coltype)
        return lambda text: text and datetime.fromisoformat(f"{text}+00:00")


class Plain(TypeDecorator[str]):
    """Text, without the characters that databases refuse: lone surrogates and NUL are replaced."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """The text without these characters."""
        return value and value.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def pieces(packed: bytes) -> Iterator[bytes]:
    """Decompressed text in pieces, none of them large."""
    unpacker = zlib.decompressobj()
    while packed:
        yield unpacker.decompress(packed, 64 * 2**10)
        packed = unpacker.unconsumed_tail
    yield unpacker.flush()


class Packed(TypeDecorator[str]):
    """Compressed text, which may contain any character."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:
        """The text, compressed."""
        return None if value is None else zlib.compress(value.encode("utf-8", "surrogatepass"))

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> str | None:
        """The decompressed text. A store may come from anywhere, so what it holds is checked.

        Raises:
            zlib.error: the value isn't compressed text, or is larger than `MOST` bytes when it is decompressed.
        """
        if value is None:
            return None
        if not isinstance(value, bytes):
            raise zlib.error(f"a text can't be unpacked: it is {value!r:.40}")
        may_be_long = len(value) > MOST // 1032  # of at most 1,032 bytes each byte is one
        if may_be_long and any(size > MOST for size in accumulate(map(len, pieces(value)))):
            raise zlib.error(f"a text has more than {MOST // 2**20} MiB")
        return zlib.decompress(value).decode("utf-8", "surrogatepass")


#: The types of columns by those of SQLite. Other columns have the types that they have there.
_TYPES: dict[str, TypeDecorator[Any]] = {"DATETIME": Utc(), "TEXT": Plain(), "BLOB": Packed()}


def _reflected() -> MetaData:
    found = MetaData()

    @event.listens_for(found, "column_reflect")
    def typed(_: object, __: object, column: dict[str, Any]) -> None:
        column["type"] = _TYPES.get(str(column["type"]), column["type"])

    with create_engine("sqlite://", poolclass=NullPool).connect() as connection:
        for path in sorted(Path(__file__).parent.glob("migrations/versions/*.sql")):
            connection.connection.executescript(path.read_text(encoding="utf-8"))
        found.reflect(connection)
    return found


metadata = _reflected()

#: Long texts that many rows share: messages, pins, environments, axes; with the digest of the text.
TEXT = metadata.tables["shared_text"]

#: The names of tests. The digest is unique instead of the name, which may be too long for an index.
NODEID = metadata.tables["nodeid"]

#: Transformers and torch are empty without the axis. `extra` is `Cell.own`.
CELL = metadata.tables["cell"]

#: `whole` is the name of the first of the runs that are parts of one. Times are those of the machine that ran it, which may be
#: wrong; the order of runs and results is that of their ids, in which the store received them.
RUN = metadata.tables["run"]

#: The cells of a run; excluded ones have a reason.
PLANNED = metadata.tables["planned"]

#: The last columns count the tests by outcome, so that a summary needs no other table.
RESULT = metadata.tables["result"]

#: For each cell its newest result in whole runs: one whose tests ran if there is any, else one that was not run; without a
#: result, its newest plan. `versions` are the exact versions of a result as JSON. Changed by `inserts`, with the results.
NEWEST = metadata.tables["newest"]

TEST = metadata.tables["test"]

#: The numbers that tests recorded.
FIGURE = metadata.tables["figure"]

LOG = metadata.tables["log"]

#: The service's tokens, and the sessions of people who signed in with one. Their texts aren't stored.
TOKEN = metadata.tables["token"]

#: The runs that wait for a service or are executed by one, in the order of `id`.
#:
#: `again`: the cells to repeat, with their attempts so far, as JSON. `claim`, `host` and `seen`: the service that executes the
#: run, and when it last said so; null while the run waits, and `host` empty. `running`: the cells that run now, with their
#: beginnings and the ends of their logs, as JSON. `tries`: how often its execution began since its last result. `reason`: why the last one failed.
SUBMISSION = metadata.tables["submission"]

#: Texts by name, of which the newest is the current one: those of `adopt`, such as the atlas as JSON, and the ``project`` whose runs
#: the store has.
DOCUMENT = metadata.tables["document"]
