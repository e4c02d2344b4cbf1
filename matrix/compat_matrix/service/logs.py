"""Receiving a log: its beginning and its end are kept, whatever its length."""

from __future__ import annotations

from collections import deque


class Ends:
    """Keeps at most a number of bytes: of a longer log only the beginning and the end."""

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._kept = 0
        self._gone = 0

    def add(self, chunk: bytes) -> None:
        """Append to the log."""
        room = self._half - len(self._head)
        self._head += chunk[:room]
        if rest := chunk[room:]:
            self._tail.append(rest)
            self._kept += len(rest)
        while self._tail and self._kept - len(self._tail[0]) >= self._half:
            gone = self._tail.popleft()
            self._kept -= len(gone)
            self._gone += len(gone)

    def text(self) -> str:
        """The log, with a note in place of bytes that weren't kept."""
        tail = b"".join(self._tail)
        gone = self._gone + max(len(tail) - self._half, 0)
        if not gone:
            return _decoded(bytes(self._head) + tail)
        note = f"\n\n[... {gone} bytes of this log were not kept ...]\n\n"
        return f"{_decoded(_whole(bytes(self._head)))}{note}{_decoded(_begun(tail[-self._half :]))}"


def _whole(head: bytes) -> bytes:
    """Without an incomplete character at the end."""
    for length in (1, 2, 3):
        last = head[-length:][:1]
        if last >= b"\xc0":
            return head[:-length] if length < (2 if last < b"\xe0" else 3 if last < b"\xf0" else 4) else head
        if last < b"\x80":
            break
    return head


def _begun(tail: bytes) -> bytes:
    """Without an incomplete character at the beginning."""
    for length in range(4):
        if not 0x80 <= tail[length : length + 1].ljust(1)[0] < 0xC0:
            return tail[length:]
    return tail


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return content.decode("utf-8", "replace")
