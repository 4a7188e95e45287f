"""The HTTP front: routes, limits, errors, health; the only place that awaits on behalf of a client.

Not a dialect: bodies are read and answers shaped by `openai.py`, bytes move in `stream.py`. A
handler reads a bounded body, prepares a request off the event loop, and ties the answer to the
connection, so that a client that leaves frees its slot. Every error of ours becomes the dialect's
error object; anything else is a bug, is logged, and answers 500 without its insides.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.config import ServerConfig
from headrace.errors import HeadraceError, InvalidRequest
from headrace.observe import unix_time_s
from headrace.server import openai, stream
from headrace.server.body import decode_json
from headrace.server.connection import connection_class
from headrace.server.metrics import Metrics
from headrace.server.models import ModelTable, Prober
from headrace.server.shutdown import LAST_WORDS_S, Server
from headrace.service import AsyncStream, Service
from headrace.types import Request as EngineRequest

_log = logging.getLogger(__name__)
_RETRY_AFTER_S = "2"
# nginx's word for "the client closed the request"; nobody is left to read it.
_CLIENT_GONE = 499


def create_app(services: Mapping[str, Service] | ModelTable, config: ServerConfig) -> FastAPI:
    """The application over loaded services, or over a table that is still being filled."""
    table = _table(services)
    app = FastAPI(title="headrace", docs_url=None, redoc_url=None, openapi_url=None)
    front = _Front(table, config)
    routes: tuple[tuple[str, str, Callable[..., object]], ...] = (
        ("POST", "/v1/chat/completions", front.chat),
        ("POST", "/v1/completions", front.completions),
        ("GET", "/v1/models", front.models),
        ("GET", "/v1/models/{name:path}", front.model),
        ("GET", "/live", front.live),
        ("GET", "/ready", front.ready),
        ("GET", "/health", front.health),
        ("GET", "/metrics", front.metrics),
    )
    for method, path, handler in routes:
        app.add_api_route(path, handler, methods=[method], response_model=None)
    app.add_exception_handler(HeadraceError, front.refuse)
    app.add_exception_handler(HTTPException, front.refuse_route)
    app.add_exception_handler(ClientDisconnect, front.gone)
    app.add_exception_handler(Exception, front.fail)
    app.add_middleware(_CountResponses, metrics=table.metrics)
    return app


def _table(services: Mapping[str, Service] | ModelTable) -> ModelTable:
    if isinstance(services, ModelTable):
        return services
    table = ModelTable(services, Metrics())
    for name, service in services.items():
        table.put(name, service)
    return table


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request that has been parsed, rendered, tokenised and checked."""

    service: Service
    envelope: openai.Envelope
    requests: tuple[EngineRequest, ...]
    num_choices: int
    is_stream: bool
    include_usage: bool


class _Front:
    """The handlers."""

    def __init__(self, table: ModelTable, config: ServerConfig) -> None:
        self._table = table
        self._config = config
        self._prober = Prober(config.probe_timeout_s)

    # ---- answers

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, self._prepare_chat)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, self._prepare_completion)

    async def _answer(self, request: Request, prepare: Callable[[bytes], _Prepared]) -> Response:
        config = self._config
        raw = await stream.read_body(request, config.max_body_bytes, config.body_timeout_s)
        prepared = await asyncio.to_thread(prepare, raw)
        if prepared.is_stream:
            return self._streamed(prepared)
        work = prepared.service.acomplete(*prepared.requests)
        answers = await stream.while_connected(request.receive, work, config.request_timeout_s)
        if answers is None:
            return Response(status_code=_CLIENT_GONE)
        names = prepared.service.model
        return _json(openai.render_answer(prepared.envelope, answers, prepared.num_choices, names))

    def _streamed(self, prepared: _Prepared) -> Response:
        deltas = prepared.service.astream(*prepared.requests)
        return stream.EventStreamResponse(
            _frames(prepared, deltas),
            deltas.close,
            lambda error: _dump(openai.render_error(error)),
            keep_alive_s=self._config.keep_alive_s,
            timeout_s=self._config.request_timeout_s,
        )

    def _prepare_chat(self, raw: bytes) -> _Prepared:
        asked = openai.parse_chat(decode_json(raw))
        service = self._table.get(asked.model).service
        envelope = _envelope("chat", asked.model)
        request = service.prepare_chat(
            asked.messages,
            asked.params,
            request_id=envelope.id,
            variables=asked.template_variables,
        )
        return _Prepared(
            service, envelope, (request,), asked.params.n, asked.is_stream, asked.include_usage
        )

    def _prepare_completion(self, raw: bytes) -> _Prepared:
        config = self._config
        asked = openai.parse_completion(decode_json(raw), config.max_prompts, config.max_choices)
        service = self._table.get(asked.model).service
        envelope = _envelope("completion", asked.model)
        requests = tuple(
            service.prepare_prompt(prompt, asked.params, request_id=f"{envelope.id}-{i}")
            for i, prompt in enumerate(asked.prompts)
        )
        return _Prepared(
            service, envelope, requests, asked.params.n, asked.is_stream, asked.include_usage
        )

    # ---- models and health

    async def models(self) -> Response:
        """GET /v1/models."""
        return _json(openai.render_models(self._describe(name) for name in self._table.loaded))

    async def model(self, name: str) -> Response:
        """GET /v1/models/{id}."""
        self._table.get(name)
        return _json(self._describe(name))

    def _describe(self, name: str) -> openai.Json:
        entry = self._table.get(name)
        return openai.render_model(name, entry.created, entry.service.model.max_context)

    async def live(self) -> Response:
        """GET /live: the process answers."""
        return _json({"status": "alive"})

    async def ready(self) -> Response:
        """GET /ready: every model can generate a token now."""
        problems = await self._problems()
        if problems:
            return _unready({"status": "not ready", "problems": problems})
        return _json({"status": "ready"})

    async def health(self) -> Response:
        """GET /health: as /ready, with the engines' numbers."""
        problems = await self._problems()
        models = {}
        for name, entry in self._table.loaded.items():
            stats = entry.service.stats()
            models[name] = {
                "waiting": stats.num_waiting,
                "running": stats.num_running,
                "kv_pages": stats.num_pages,
                "kv_free_pages": stats.num_free_pages,
                "kv_cached_pages": stats.num_cached_pages,
            }
        report = {"status": "unhealthy" if problems else "ok", "models": models}
        return _unready(report | {"problems": problems}) if problems else _json(report)

    async def _problems(self) -> dict[str, str]:
        loaded = self._table.loaded
        found = await asyncio.gather(*(self._prober.problem(e.service) for e in loaded.values()))
        problems = {name: text for name, text in zip(loaded, found, strict=True) if text}
        return problems | {name: "loading" for name in self._table.names if name not in loaded}

    async def metrics(self) -> Response:
        """GET /metrics."""
        metrics = self._table.metrics
        return Response(metrics.render(), media_type=metrics.content_type)

    # ---- errors

    async def refuse(self, request: Request, error: Exception) -> Response:
        """An error of ours, before the first byte of an answer."""
        assert isinstance(error, HeadraceError), "registered for HeadraceError"
        self._table.metrics.refused.labels(error.code).inc()
        response = _json(openai.render_error(error), error.status)
        if error.status == 503:
            response.headers["Retry-After"] = _RETRY_AFTER_S
        return response

    async def refuse_route(self, request: Request, error: Exception) -> Response:
        """A path or method that does not exist."""
        assert isinstance(error, HTTPException), "registered for HTTPException"
        refusal = HeadraceError(f"{request.method} {request.url.path[:200]}: {error.detail}")
        refusal.status = error.status_code
        refusal.code = {404: "not_found", 405: "method_not_allowed"}.get(
            error.status_code, "http_error"
        )
        response = await self.refuse(request, refusal)
        response.headers.update(error.headers or {})
        return response

    async def gone(self, request: Request, error: Exception) -> Response:
        """The client left while it sent its body."""
        return Response(status_code=_CLIENT_GONE)

    async def fail(self, request: Request, error: Exception) -> Response:
        """A bug of ours: the server logs it, the client learns no insides."""
        return await self.refuse(request, HeadraceError("internal error; see the server's log"))


async def _frames(prepared: _Prepared, deltas: AsyncStream) -> AsyncIterator[bytes]:
    chunks = openai.Chunks(
        prepared.envelope,
        prepared.num_choices,
        prepared.include_usage,
        prepared.service.model,
    )
    for chunk in chunks.open(prepared.num_choices * len(prepared.requests)):
        yield stream.frame(_dump(chunk))
    try:
        async for delta in deltas:
            for chunk in chunks.delta(delta):
                yield stream.frame(_dump(chunk))
    except HeadraceError:
        raise
    except Exception:
        _log.exception("a stream failed")
        raise HeadraceError("internal error; see the server's log") from None
    for chunk in chunks.close():
        yield stream.frame(_dump(chunk))
    yield stream.DONE


def _envelope(kind: openai.Kind, model: str) -> openai.Envelope:
    prefix = {"chat": "chatcmpl", "completion": "cmpl"}[kind]
    return openai.Envelope(f"{prefix}-{secrets.token_hex(12)}", model, unix_time_s(), kind)


def _dump(value: openai.Json) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Half a surrogate pair can only come back in an error message; JSON writes it the same way.
    return text.encode("utf-8", "backslashreplace")


def _json(value: openai.Json, status: int = 200) -> Response:
    return Response(_dump(value), status_code=status, media_type="application/json")


def _unready(value: openai.Json) -> Response:
    response = _json(value, 503)
    response.headers["Retry-After"] = _RETRY_AFTER_S
    return response


class _CountResponses:
    """ASGI middleware: counts responses by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")
                self._metrics.http.labels(path, message["status"]).inc()
            await send(message)

        await self._app(scope, receive, counting)


# ---- running


Listening = Callable[[str, int], None]
Loader = Callable[[], Service]


def serve(
    services: Mapping[str, Service], config: ServerConfig, on_listening: Listening | None = None
) -> None:
    """Serve loaded models until SIGTERM or Ctrl-C, then close them."""
    loaders = {name: _constant(service) for name, service in services.items()}
    serve_loading(loaders, config, on_listening)


def _constant(service: Service) -> Loader:
    return lambda: service


def serve_loading(
    loaders: Mapping[str, Loader], config: ServerConfig, on_listening: Listening | None = None
) -> None:
    """Listen at once and load in the background; /ready turns 200 when all models can answer.

    On SIGTERM or Ctrl-C open answers may finish for `shutdown_timeout_s`, or until the second
    signal. **Raises** what a loader raises; `InvalidRequest` when the address cannot be had.
    """
    table = ModelTable(loaders, Metrics())
    with _listen(config) as sock:
        server = make_server(table, config)
        loading = _Loading(table, loaders, server)
        if on_listening is not None:
            host, port = sock.getsockname()[:2]
            on_listening(host, port)
        try:
            with _quiet_signals():
                loading.start()
                server.run(sockets=[sock])
        finally:
            for entry in table.loaded.values():
                entry.service.close()
    if loading.failure is not None:
        raise loading.failure


class _Loading(threading.Thread):
    """Loads models one after the other; the first failure stops the server."""

    def __init__(
        self, table: ModelTable, loaders: Mapping[str, Loader], server: uvicorn.Server
    ) -> None:
        super().__init__(name="load", daemon=True)
        self.failure: BaseException | None = None
        self._table = table
        self._loaders = loaders
        self._server = server

    def run(self) -> None:
        try:
            for name, load in self._loaders.items():
                self._table.put(name, load())
        except BaseException as error:
            self.failure = error
            self._server.should_exit = True


def make_server(
    services: Mapping[str, Service] | ModelTable, config: ServerConfig
) -> uvicorn.Server:
    """A uvicorn server that has not been started; logs go to stderr."""
    table = _table(services)
    settings = uvicorn.Config(
        create_app(table, config),
        http=connection_class(config.head_timeout_s),
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        limit_concurrency=config.max_connections,
        timeout_graceful_shutdown=int(config.shutdown_timeout_s) + LAST_WORDS_S,
    )
    return Server(settings, table, config.shutdown_timeout_s)


def _listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise InvalidRequest(
            f"cannot listen on {config.host}:{config.port}: {error}; choose another with "
            "--host and --port",
            param="port",
        ) from None


@contextmanager
def _quiet_signals() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more; swallow that one, to close in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(name, lambda *_: None) for name in names]
    try:
        yield
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)
