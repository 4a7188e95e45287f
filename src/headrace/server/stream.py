"""Answers on the wire while a client may leave: server-sent events, and waiting for the whole.

Knows no dialect and no model: frames come in as bytes. Two tasks share a connection: one writes,
one listens for the disconnect; whichever ends first ends both, and the answer is closed at that
moment, which frees its slot in the engine. A third sends comment lines into silence, so that
proxies keep the connection, and notices a reader that takes nothing.
Source: WHATWG HTML, server-sent events; ASGI HTTP 2.4.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Message, Receive, Scope, Send

from headrace.errors import BodyTooLarge, DeadlineExceeded, HeadraceError

T = TypeVar("T")
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
# Waiting to hand a last word to a reader that may not be reading.
_LAST_WORD_S = 5.0


def frame(data: bytes) -> bytes:
    """One event. `data` is JSON on a single line."""
    return b"data: " + data + b"\n\n"


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The request body. **Raises** `BodyTooLarge`, `DeadlineExceeded`."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(f"{declared} bytes", max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large("longer", max_bytes)
    except TimeoutError:
        raise DeadlineExceeded(f"the body had not arrived after {timeout_s:g} s") from None
    return bytes(body)


def _too_large(given: str, max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is {given}; this server takes up to {max_bytes} bytes")


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, T], timeout_s: float
) -> T | None:
    """The result of `work`, or None if the client left; then `work` has been cancelled.

    **Raises** what `work` raises, and `DeadlineExceeded`.
    """
    job = asyncio.create_task(work)
    watcher = asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({job, watcher}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            return job.result()
        if watcher.done():
            return None
        raise _late(timeout_s)
    finally:
        await _end(job, watcher)


def _late(timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the answer took longer than {timeout_s:g} s and was ended")


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStreamResponse(Response):
    """Sends frames as they come. `close` is called exactly when no one reads any more."""

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        close: Callable[[], None],
        render_error: Callable[[HeadraceError], bytes],
        *,
        keep_alive_s: float,
        timeout_s: float,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._close = close
        self._render_error = render_error
        self._keep_alive_s = keep_alive_s
        self._timeout_s = timeout_s
        self._num_sent = 0
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI side: whichever of the three tasks ends first ends all."""
        writer = asyncio.create_task(self._write(send))
        watcher = asyncio.create_task(disconnected(receive))
        ticker = asyncio.create_task(self._tick(send))
        try:
            await asyncio.wait({writer, watcher, ticker}, return_when=asyncio.FIRST_COMPLETED)
            for task in (writer, ticker):
                if task.done():
                    task.result()
        except OSError:  # the connection broke, or the last word was not taken in time
            pass
        finally:
            self._close()
            await _end(writer, watcher, ticker)

    async def _write(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                async for data in self._frames:
                    await self._hand_over(data, send)
        except TimeoutError:
            self._close()
            await self._last_word(_late(self._timeout_s), send)
        except HeadraceError as error:
            await self._last_word(error, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _hand_over(self, data: bytes, send: Send) -> None:
        self._is_sending = True
        await send(_body(data))
        self._is_sending = False
        self._num_sent += 1

    async def _last_word(self, error: HeadraceError, send: Send) -> None:
        async with asyncio.timeout(_LAST_WORD_S):
            await send(_body(frame(self._render_error(error))))

    async def _tick(self, send: Send) -> None:
        """Breaks silence; returns when a frame has waited through a whole tick for the reader."""
        while True:
            before = self._num_sent, self._is_sending
            await asyncio.sleep(self._keep_alive_s)
            if before != (self._num_sent, self._is_sending):
                continue
            if self._is_sending:
                return
            async with asyncio.timeout(self._keep_alive_s):
                await send(_body(KEEP_ALIVE))


def _body(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}
