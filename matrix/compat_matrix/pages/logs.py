"""The log of a result, read in pieces: it may be larger than a page or than the memory."""

import codecs
from collections.abc import Iterator

from sqlalchemy import LargeBinary, select, type_coerce

from ..cells import Cell
from ..store import Store, queries
from ..store.models import LOG, RESULT, pieces
from ..words import clean

#: The number of bytes at the end of a log that a page shows.
TAIL = 100_000

_PIECE = 64 * 2**10
_PACKED = select(type_coerce(LOG.c.content, LargeBinary)).join(RESULT, RESULT.c.id == LOG.c.result_id)


def packed_log(store: Store, run: str, cell: Cell, attempt: int | None) -> bytes | None:
    """A log as it is stored; None if there is none."""
    query = queries.of_result(_PACKED, attempt is not None)
    return next((row.content for row in store.rows(query, **queries.named(run, cell, attempt))), None)


def end(packed: bytes) -> tuple[str, int, int]:
    """The end of a log as printable text, the number of bytes before it, and of all."""
    tail, size = b"", 0
    for piece in pieces(packed):
        size += len(piece)
        tail = (tail + piece)[-TAIL:]
    return clean(tail.decode("utf-8", "replace")), size - len(tail), size


def plain(packed: bytes) -> Iterator[bytes]:
    """A whole log as UTF-8 without control sequences: a terminal that receives it only prints it."""
    decode = codecs.getincrementaldecoder("utf-8")("surrogatepass").decode
    rest = ""
    for piece in pieces(packed):
        # Neither a terminal sequence nor a line ending of two characters is split, unless there is no other place to split.
        text, newline, after = (rest + decode(piece)).rpartition("\n")
        if len(after) > _PIECE:
            text, newline, after = text + newline + after, "", ""
        if text or newline:
            yield clean(text + newline).encode()
        rest = after
    yield clean(rest).encode()


def shortened(text: str, most: int = 20_000) -> str:
    """A text of a result, without its middle if it is too long for a page."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n\n[{len(text) - 2 * half} characters are left out]\n\n{text[-half:]}"
