"""One HTTP connection: uvicorn's, with a limit on the wait for the head of a request.

Without it a client that sends half a head, or nothing, holds one of `max_connections` for ever. The
body's time is limited by `stream.read_body`, an answer's by `request_timeout_s`.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class _Connection(H11Protocol):
    head_timeout_s: float
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """The time counts from the first look; more bytes of the same head do not extend it."""
        if self.conn.their_state is not h11.IDLE:
            self._unwatch()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def connection_class(head_timeout_s: float) -> type[asyncio.Protocol]:
    """A protocol for `uvicorn.Config.http`."""
    return type("Connection", (_Connection,), {"head_timeout_s": head_timeout_s})
