"""Routes, limits and error shapes, in process: no sockets, an engine with a script."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import pytest
from byte_model import byte_model
from fake_engine import FakeEngine, endless

from headrace.config import ServerConfig
from headrace.server.app import create_app
from headrace.server.metrics import Metrics
from headrace.server.models import ModelTable
from headrace.service import Service

MakeService = Callable[..., Service]
HELLO = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
TEXT = {"model": "bytes", "prompt": "hi"}


def ask(
    services: dict[str, Service] | ModelTable,
    talk: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]],
    config: ServerConfig | None = None,
) -> None:
    """Run `talk` with a client of an app over `services`."""

    async def run() -> None:
        app = create_app(services, config or ServerConfig())
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await talk(client)

    asyncio.run(run())


def events(text: str) -> list[Any]:
    """The data of each server-sent event, parsed."""
    lines = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def test_chat_and_completion(make_service: MakeService) -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        chat = (await client.post("/v1/chat/completions", json=HELLO)).json()
        assert chat["object"] == "chat.completion"
        assert chat["choices"][0]["message"]["content"] == "USER: HI\n"
        assert chat["usage"]["completion_tokens"] == 10
        text = (await client.post("/v1/completions", json=TEXT)).json()
        assert text["object"] == "text_completion"
        assert text["choices"][0]["text"] == "HI"
        assert text["id"] != chat["id"]

    ask({"bytes": make_service()}, talk)


def test_streams_end_with_done_and_usage(make_service: MakeService) -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        body = TEXT | {"stream": True, "stream_options": {"include_usage": True}}
        response = await client.post("/v1/completions", json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, last = events(response.text)
        assert last == "[DONE]"
        assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == "HI"
        assert chunks[-1]["usage"]["total_tokens"] == 5
        assert len({chunk["id"] for chunk in chunks}) == 1

    ask({"bytes": make_service()}, talk)


def test_prompts_and_choices_are_numbered(make_service: MakeService) -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        body = TEXT | {"prompt": ["a", "b"], "n": 2}
        choices = (await client.post("/v1/completions", json=body)).json()["choices"]
        assert [c["index"] for c in choices] == [0, 1, 2, 3]
        assert [c["text"] for c in choices] == ["A", "A#1", "B", "B#1"]
        response = await client.post("/v1/completions", json=body | {"stream": True})
        texts = dict.fromkeys(range(4), "")
        for chunk in events(response.text)[:-1]:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert list(texts.values()) == ["A", "A#1", "B", "B#1"]

    ask({"bytes": make_service()}, talk)


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/chat/completions", HELLO | {"model": "gpt"}, 404, "model_not_found", "model"),
        ("/v1/chat/completions", HELLO | {"n_predict": 1}, 400, "unknown_parameter", "n_predict"),
        ("/v1/chat/completions", HELLO | {"top_p": 3}, 400, "invalid_request", "top_p"),
        ("/v1/completions", TEXT | {"echo": True}, 400, "unsupported_parameter", "echo"),
        ("/v1/completions", TEXT | {"prompt": ""}, 400, "invalid_request", "prompt"),
        ("/v1/completions", TEXT | {"prompt": "\ud800"}, 400, "invalid_request", None),
        (
            "/v1/completions",
            TEXT | {"prompt": "x" * 2000},
            400,
            "context_length_exceeded",
            "prompt",
        ),
        (
            "/v1/completions",
            TEXT | {"max_tokens": 2000, "stream": True},
            400,
            "context_length_exceeded",
            "max_tokens",
        ),
        ("/v1/embeddings", {}, 404, "not_found", None),
    ],
)
def test_refusals(
    make_service: MakeService, path: str, body: Any, status: int, code: str, param: str | None
) -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        response = await client.post(path, content=json.dumps(body))
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (status, code, param)
        assert error["type"] == "invalid_request_error"
        assert error["message"]

    ask({"bytes": make_service()}, talk)


def test_methods_and_malformed_bodies(make_service: MakeService) -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        response = await client.get("/v1/completions")
        assert response.status_code == 405
        assert response.headers["allow"] == "POST"
        assert response.json()["error"]["code"] == "method_not_allowed"
        for raw in (b"", b"{", b"\xff", b"[]", b'{"a": NaN}', b"[" * 100_000):
            response = await client.post("/v1/completions", content=raw)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "invalid_request"

    ask({"bytes": make_service()}, talk)


def test_a_body_too_large_is_refused_with_the_number(make_service: MakeService) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 50

    async def talk(client: httpx.AsyncClient) -> None:
        for content in (b" " * 101, chunks()):
            response = await client.post("/v1/completions", content=content)
            assert response.status_code == 413
            assert "100 bytes" in response.json()["error"]["message"]

    ask({"bytes": make_service()}, talk, ServerConfig(max_body_bytes=100))


def test_models_are_listed(make_service: MakeService) -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        listed = (await client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["bytes"]
        assert (await client.get("/v1/models/bytes")).json() == listed["data"][0]
        missing = await client.get("/v1/models/other/name")
        assert missing.status_code == 404
        assert "served: bytes" in missing.json()["error"]["message"]

    ask({"bytes": make_service()}, talk)


def test_health_means_a_token(make_service: MakeService) -> None:
    service = make_service()

    async def talk(client: httpx.AsyncClient) -> None:
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get("/health")).json()["models"]["bytes"]["kv_pages"] == 100
        service.close()
        for path in ("/ready", "/health"):
            response = await client.get(path)
            assert response.status_code == 503
            assert "closed" in response.json()["problems"]["bytes"]
        assert (await client.get("/live")).status_code == 200

    ask({"bytes": service}, talk)


def test_a_hung_engine_is_not_ready(make_service: MakeService) -> None:
    service = make_service(gate=threading.Semaphore(0))

    async def talk(client: httpx.AsyncClient) -> None:
        both = await asyncio.gather(client.get("/ready"), client.get("/health"))
        assert [response.status_code for response in both] == [503, 503]
        assert "no token within 0.05 s" in both[0].json()["problems"]["bytes"]

    ask({"bytes": service}, talk, ServerConfig(probe_timeout_s=0.05))
    engine = service.client
    assert isinstance(engine, FakeEngine)
    assert engine.wait_until_idle()
    assert len(engine.requests) == 1


def test_a_model_that_still_loads(make_service: MakeService) -> None:
    table = ModelTable(["bytes"], Metrics())

    async def talk(client: httpx.AsyncClient) -> None:
        assert (await client.get("/live")).status_code == 200
        for response in (
            await client.get("/ready"),
            await client.post("/v1/chat/completions", json=HELLO),
        ):
            assert response.status_code == 503
            assert "retry-after" in response.headers
        table.put("bytes", make_service())
        assert (await client.get("/ready")).status_code == 200
        assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 200

    ask(table, talk)


def test_a_full_queue_says_retry(make_service: MakeService) -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        for stream in (False, True):
            response = await client.post("/v1/completions", json=TEXT | {"stream": stream})
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "overloaded"
            assert "retry-after" in response.headers

    ask({"bytes": make_service(max_waiting=0)}, talk)


def test_an_error_after_the_first_byte_is_an_event(make_service: MakeService) -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/completions", json=TEXT | {"stream": True})
        assert response.status_code == 200
        *chunks, last = events(response.text)
        assert "".join(c["choices"][0]["text"] for c in chunks) == "ab"
        assert last["error"]["code"] == "engine_failure"
        assert last["error"]["type"] == "server_error"

    ask({"bytes": make_service(script=endless, fails_at=3)}, talk)


def test_an_answer_past_its_deadline_is_ended(make_service: MakeService) -> None:
    service = make_service(gate=threading.Semaphore(0))

    async def talk(client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/completions", json=TEXT)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        response = await client.post("/v1/completions", json=TEXT | {"stream": True})
        assert response.status_code == 200
        [error] = events(response.text)
        assert error["error"]["code"] == "deadline_exceeded"
        assert ": keep-alive\n\n" in response.text

    ask({"bytes": service}, talk, ServerConfig(request_timeout_s=0.1, keep_alive_s=0.02))
    engine = service.client
    assert isinstance(engine, FakeEngine)
    assert engine.wait_until_idle()


def test_a_bug_of_ours_keeps_its_insides(make_service: MakeService) -> None:
    def broken(request: object, index: int) -> list[int]:
        raise ZeroDivisionError("secret")

    async def talk(client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/completions", json=TEXT)
        assert response.status_code == 500
        assert "secret" not in response.text
        assert response.json()["error"]["code"] == "internal_error"

    ask({"bytes": make_service(script=broken)}, talk)


def test_metrics_are_prometheus_text(make_service: MakeService) -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        await client.post("/v1/completions", json=TEXT)
        await client.post("/v1/completions", json={})
        await client.get("/nowhere")
        response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        for line in (
            'headrace_http_responses_total{path="/v1/completions",status="200"} 1.0',
            'headrace_http_responses_total{path="/v1/completions",status="400"} 1.0',
            'headrace_http_responses_total{path="other",status="404"} 1.0',
            'headrace_requests_refused_total{code="invalid_request"} 1.0',
            'headrace_request_success_total{finished_reason="stop",model="bytes"} 1.0',
        ):
            assert line in response.text

    ask({"bytes": make_service()}, talk)


def test_two_models_side_by_side(make_service: MakeService) -> None:
    first = make_service()
    second = Service(byte_model(name="other"), FakeEngine(script=endless))

    async def talk(client: httpx.AsyncClient) -> None:
        for name, text in (("bytes", "HI"), ("other", "ab")):
            body = {"model": name, "prompt": "hi", "max_tokens": 2}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (name, text)

    ask({"bytes": first, "other": second}, talk)
    second.close()
