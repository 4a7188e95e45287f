"""A real uvicorn on a loopback port and the official `openai` client in front of it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import openai
import pytest
from fake_engine import WAIT_S, FakeEngine, endless
from serving import Address, base_url, serving

from headrace.config import ServerConfig
from headrace.service import Service

MakeService = Callable[..., Service]


@contextmanager
def official_client(address: Address) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url(address), api_key="none", max_retries=0) as client:
        yield client


def engine_of(service: Service) -> FakeEngine:
    assert isinstance(service.client, FakeEngine)
    return service.client


_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
)
HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hé"}]


def test_the_official_client_chats(make_service: MakeService) -> None:
    with serving({"bytes": make_service()}) as address, official_client(address) as client:
        answer = client.chat.completions.create(
            model="bytes", messages=HELLO, logprobs=True, top_logprobs=1, seed=1
        )
        assert answer.choices[0].message.content == "USER: Hé\n"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 11
        assert answer.choices[0].logprobs is not None
        text = ""
        for chunk in client.chat.completions.create(
            model="bytes", messages=HELLO, stream=True, stream_options={"include_usage": True}
        ):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            last = chunk
        assert text == answer.choices[0].message.content
        assert last.usage == answer.usage


def test_the_official_client_completes(make_service: MakeService) -> None:
    with serving({"bytes": make_service()}) as address, official_client(address) as client:
        answer = client.completions.create(model="bytes", prompt=["a", "b"], logprobs=1)
        assert [choice.text for choice in answer.choices] == ["A", "B"]
        chunks = client.completions.create(model="bytes", prompt=[104, 105], stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "HI"
        extra = client.completions.create(
            model="bytes", prompt="abc", max_tokens=4, extra_body={"ignore_eos": True, "top_k": 1}
        )
        assert extra.choices[0].finish_reason == "length"
        assert [model.id for model in client.models.list()] == ["bytes"]
        assert client.models.retrieve("bytes").owned_by == "headrace"


def test_the_official_client_understands_refusals(make_service: MakeService) -> None:
    with serving({"bytes": make_service()}) as address, official_client(address) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="gpt-4", messages=HELLO)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            client.completions.create(model="bytes", prompt="x" * 2000)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as unknown:
            client.completions.create(model="bytes", prompt="x", extra_body={"n_predict": 3})
        assert unknown.value.param == "n_predict"
        assert "max_tokens" in unknown.value.message


def test_an_error_in_a_stream_reaches_the_official_client(make_service: MakeService) -> None:
    service = make_service(script=endless, fails_at=3)
    with serving({"bytes": service}) as address, official_client(address) as client:
        chunks = client.completions.create(model="bytes", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="the step failed"):
            list(chunks)


def test_leaving_a_stream_frees_the_slot(make_service: MakeService) -> None:
    service = make_service(script=endless, gate=threading.Semaphore(3))
    with serving({"bytes": service}) as address, official_client(address) as client:
        with client.completions.create(model="bytes", prompt="x", stream=True) as chunks:
            assert next(iter(chunks)).choices[0].text == "a"
        assert engine_of(service).wait_until_idle()
        assert service.stats().requests_aborted == 1
        assert service.stats().generated_tokens <= 3


def test_leaving_before_the_answer_frees_the_slot(make_service: MakeService) -> None:
    service = make_service(script=endless, gate=threading.Semaphore(0))
    body = json.dumps({"model": "bytes", "prompt": "x"}).encode()
    head = _HEAD % len(body)
    with serving({"bytes": service}) as address:
        with socket.create_connection(address) as sock:
            sock.sendall(head + body)
            assert engine_of(service).wait_for_requests(1)
        assert engine_of(service).wait_until_idle()
        assert service.stats().requests_aborted == 1
        assert service.stats().generated_tokens == 0


def test_leaving_inside_the_body_harms_nobody(make_service: MakeService) -> None:
    with serving({"bytes": make_service()}) as address, official_client(address) as client:
        with socket.create_connection(address) as sock:
            sock.sendall(_HEAD % 99 + b"{")
        assert client.completions.create(model="bytes", prompt="a").choices[0].text == "A"


def test_a_reader_that_does_not_read_is_cut_off(make_service: MakeService) -> None:
    """The kernel's buffers fill, then ours; the engine never waits, and others are served."""
    service = make_service(ServerConfig(max_buffered_events=50), script=_flood)
    body = json.dumps({"model": "bytes", "prompt": "x", "stream": True, "logprobs": 20}).encode()
    head = _HEAD % len(body)
    with serving({"bytes": service}) as address:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.connect(address)
            sock.sendall(head + body)
            assert engine_of(service).wait_for_requests(1)
            assert engine_of(service).wait_until_idle()
            sock.settimeout(WAIT_S)
            received = b"".join(iter(lambda: sock.recv(1 << 16), b""))
        assert b"reader_too_slow" in received
        assert b"[DONE]" not in received


def _flood(request: object, index: int) -> Iterator[int]:
    while True:
        yield ord("x")


def test_many_clients_at_once(make_service: MakeService) -> None:
    service = make_service()

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        chunks = await client.completions.create(model="bytes", prompt=f"p{number}", stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def all_at_once(address: Address) -> list[str]:
        url = base_url(address)
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(16)))

    with serving({"bytes": service}) as address:
        assert asyncio.run(all_at_once(address)) == [f"P{number}" for number in range(16)]
    assert engine_of(service).wait_until_idle()
