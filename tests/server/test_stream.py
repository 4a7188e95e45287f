"""The event stream against scripted ASGI channels: who ends it, and that it always closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.errors import DeadlineExceeded, EngineFailure, HeadraceError
from headrace.server.stream import EventStreamResponse, disconnected, frame, while_connected

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
LONG_S = 10.0


@dataclass
class Channel:
    """One connection: what was sent, when the client leaves, how many sends it takes."""

    room: int = 1000
    leaves: asyncio.Event = field(default_factory=asyncio.Event)
    sent: list[Message] = field(default_factory=list)
    num_closed: int = 0

    async def receive(self) -> Message:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if len(self.sent) >= self.room:
            await asyncio.Event().wait()
        self.sent.append(message)

    def close(self) -> None:
        self.num_closed += 1

    @property
    def text(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def play(
    channel: Channel,
    frames: AsyncIterator[bytes],
    send: Send | None = None,
    keep_alive_s: float = LONG_S,
    timeout_s: float = LONG_S,
) -> None:
    response = EventStreamResponse(
        frames,
        channel.close,
        lambda error: error.code.encode(),
        keep_alive_s=keep_alive_s,
        timeout_s=timeout_s,
    )
    async with asyncio.timeout(LONG_S):
        await response({"type": "http"}, channel.receive, send or channel.send)


async def counting(error: HeadraceError | None = None) -> AsyncIterator[bytes]:
    for number in range(3):
        yield frame(b"%d" % number)
    if error is not None:
        raise error


async def silent() -> AsyncIterator[bytes]:
    yield frame(b"0")
    await asyncio.Event().wait()


def run(work: Callable[[Channel], Awaitable[None]], **fields: Any) -> Channel:
    async def inside() -> Channel:
        channel = Channel(**fields)
        await work(channel)
        return channel

    return asyncio.run(inside())


def test_frames_then_the_end() -> None:
    channel = run(lambda c: play(c, counting()))
    assert channel.text == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    assert channel.sent[0]["status"] == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in channel.sent[0]["headers"]
    assert not channel.sent[-1]["more_body"]
    assert channel.num_closed == 1


def test_an_error_is_the_last_event() -> None:
    channel = run(lambda c: play(c, counting(EngineFailure("x"))))
    assert channel.text.endswith(b"data: 2\n\ndata: engine_failure\n\n")
    assert not channel.sent[-1]["more_body"]


def test_a_client_that_leaves_closes_the_stream() -> None:
    async def leave(channel: Channel) -> None:
        task = asyncio.create_task(play(channel, silent()))
        while len(channel.sent) < 2:
            await asyncio.sleep(0)
        assert channel.num_closed == 0
        channel.leaves.set()
        await task

    channel = run(leave)
    assert channel.num_closed == 1
    assert channel.sent[-1]["more_body"]


def test_a_reader_that_takes_nothing_is_left() -> None:
    channel = run(lambda c: play(c, counting(), keep_alive_s=0.01), room=2)
    assert channel.num_closed == 1
    assert channel.text == b"data: 0\n\n"


def test_silence_is_broken_and_ended_at_the_deadline() -> None:
    channel = run(lambda c: play(c, silent(), keep_alive_s=0.01, timeout_s=0.1))
    assert channel.text.startswith(b"data: 0\n\n: keep-alive\n\n")
    assert channel.text.endswith(b"data: deadline_exceeded\n\n")
    assert channel.num_closed >= 1


def test_a_broken_connection_is_no_error() -> None:
    async def broken(message: Message) -> None:
        raise BrokenPipeError

    channel = run(lambda c: play(c, counting(), send=broken))
    assert channel.num_closed == 1


def test_a_bug_is_not_hidden() -> None:
    async def bug() -> AsyncIterator[bytes]:
        yield frame(str(1 // 0).encode())

    closed: list[Channel] = []

    async def work(channel: Channel) -> None:
        closed.append(channel)
        await play(channel, bug())

    with pytest.raises(ZeroDivisionError):
        run(work)
    assert closed[0].num_closed == 1


# ---- whole answers


async def soon(log: list[str]) -> int:
    log.append("begun")
    return 7


async def never(log: list[str]) -> int:
    try:
        await asyncio.Event().wait()
    finally:
        log.append("cancelled")
    return 0


def test_an_answer_while_the_client_waits() -> None:
    log: list[str] = []

    async def work(channel: Channel) -> None:
        assert await while_connected(channel.receive, soon(log), LONG_S) == 7

    run(work)
    assert log == ["begun"]


def test_an_answer_nobody_waits_for_is_cancelled() -> None:
    log: list[str] = []

    async def work(channel: Channel) -> None:
        task = asyncio.create_task(while_connected(channel.receive, never(log), LONG_S))
        await asyncio.sleep(0)
        channel.leaves.set()
        assert await task is None

    run(work)
    assert log == ["cancelled"]


def test_an_answer_past_its_deadline_is_cancelled() -> None:
    log: list[str] = []

    async def work(channel: Channel) -> None:
        with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
            await while_connected(channel.receive, never(log), 0.01)

    run(work)
    assert log == ["cancelled"]


def test_only_a_disconnect_counts() -> None:
    messages: Iterator[Message] = iter([{"type": "http.request"}, {"type": "http.disconnect"}])

    async def receive() -> Message:
        return next(messages)

    asyncio.run(disconnected(receive))
    assert next(messages, None) is None
