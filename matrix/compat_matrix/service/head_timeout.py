"""uvicorn's HTTP protocol with a time limit for the head of a request."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

#: Seconds for the whole head of a request. uvicorn waits forever, and the number of connections is limited.
HEAD = 20.0


class HeadTimeout(H11Protocol):
    """Closes a connection that doesn't send the whole head of a request in time."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for the head of the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Stop the time limit if the head is complete, else start it unless it runs."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limit."""
        super().connection_lost(exc)
        self._forget()

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:  # the head is complete
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD, self._over)

    def _over(self) -> None:
        self._deadline = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
