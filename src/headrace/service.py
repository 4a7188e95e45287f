"""One loaded model with text on both sides: messages or prompts in, settled text out.

Not an HTTP server and not the engine: the service renders templates, tokenises, checks a request
before the engine sees it, and turns the engine's events into text through a bounded buffer, so the
engine's thread never waits for a reader. Streamed or not, one reader or many, an answer takes one
path (`_Choice`), hence the text is the same. A stop string, a closed stream, a cancelled task and a
reader too slow are all `abort`.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Self

from headrace.config import EngineConfig, ServerConfig
from headrace.engine.lifecycle import MemoryReport, load_engine
from headrace.errors import (
    ContextTooLong,
    EngineFailure,
    InvalidRequest,
    Overloaded,
    ReaderTooSlow,
)
from headrace.formats.checkpoint import open_checkpoint
from headrace.observe import Observer, Trace
from headrace.text.chat import ChatTemplate, check_length, encode_chat, load_chat_template
from headrace.text.detokenizer import Detokenizer, StopStrings
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from headrace.types import (
    Checkpoint,
    Completion,
    EngineClient,
    EngineStats,
    Event,
    FinishReason,
    Message,
    Request,
    SamplingParams,
    TextDelta,
    TokenLogprob,
    Usage,
)

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the service knows of a model: its name, its text tools and its limits.

    `vocab_size` is the engine's; a checkpoint may be padded past the tokenizer's last id, and a
    padding token has no text.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    max_context: int
    vocab_size: int
    memory: MemoryReport | None = None

    def token_bytes(self, token_id: int, /) -> bytes:
        """What the token adds to a text; nothing for control and padding tokens."""
        tokenizer = self.tokenizer
        return tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""

    def token_name(self, token_id: int, /) -> bytes:
        """As `token_bytes`, but a control token gives its written form."""
        if token_id >= self.tokenizer.vocab_size:
            return f"<padding {token_id}>".encode()
        return self.token_bytes(token_id) or self.tokenizer.token_text(token_id).encode()


class Service:
    """Prepares requests and streams answers of one model. Safe to use from several threads."""

    def __init__(
        self, model: ServedModel, client: EngineClient, limits: ServerConfig | None = None
    ) -> None:
        self.model = model
        self.client = client
        self.limits = limits or ServerConfig()
        self._observer: Observer | None = None

    def attach(self, observer: Observer) -> None:
        """Report requests and engine counters to `observer` from now on."""
        self._observer = observer
        observer.watch_engine(self.model.name, self.client.stats)

    def stats(self) -> EngineStats:
        """The engine's counters now."""
        return self.client.stats()

    def close(self) -> None:
        """Stop the engine; open answers end with an error."""
        self.client.close()

    # ---- requests

    def prepare_prompt(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Request:
        """A raw prompt as a request.

        Text is the whole program here, so special-token text in it counts, as in llama.cpp and
        vLLM; the model's own beginning token is added. Token ids are taken as they are. Without
        `max_tokens` an answer may fill what remains of the context.

        **Raises** `InvalidRequest`, `ContextTooLong`.
        """
        if isinstance(prompt, str):
            tokenizer = self.model.tokenizer
            check_length(tokenizer.least_tokens(prompt), self.model.max_context, "prompt")
            ids = tokenizer.encode(prompt, add_special=True, parse_special=True)
        else:
            ids = list(prompt)
            self._check_ids(ids, "prompt")
        return self._request(ids, params, request_id, "prompt")

    def prepare_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> Request:
        """Chat messages as a request, through the model's template; text in their content never
        becomes a special token. `variables` are further names that the template knows, such as
        enable_thinking.

        **Raises** `TemplateError`, `InvalidRequest`, `ContextTooLong`.
        """
        if not messages:
            raise InvalidRequest("messages is empty; send at least one", param="messages")
        model = self.model
        limit = model.max_context
        ids = encode_chat(
            model.tokenizer, model.template, messages, variables=variables, max_tokens=limit
        )
        return self._request(ids, params, request_id, "messages")

    def _request(
        self, ids: Sequence[int], params: SamplingParams | None, request_id: str | None, field: str
    ) -> Request:
        params = params or SamplingParams()
        if not ids:
            raise InvalidRequest(f"{field} is empty: there is no token to start from", param=field)
        self._check_ids([token for token, _ in params.logit_bias], "logit_bias")
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        params = replace(
            params,
            max_tokens=self._max_tokens(len(ids), params, field),
            seed=secrets.randbits(63) if params.seed is None else params.seed,
        )
        return Request(request_id or f"req-{secrets.token_hex(12)}", tuple(ids), params)

    def _check_ids(self, ids: Sequence[int], field: str) -> None:
        size = self.model.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise InvalidRequest(
                    f"{field} has the token id {token!r}; ids of {self.model.name} are integers "
                    f"from 0 to {size - 1}",
                    param=field,
                )

    def _max_tokens(self, num_prompt: int, params: SamplingParams, field: str) -> int:
        limit = self.model.max_context
        room = limit - num_prompt
        wanted = params.max_tokens
        if room < max(1, wanted or 1, params.min_tokens):
            asked = f" and max_tokens is {wanted}" if wanted is not None else ""
            raise ContextTooLong(
                f"the prompt has {num_prompt} tokens{asked}; the context of {self.model.name} "
                f"holds {limit} together. Shorten the prompt or ask for fewer tokens",
                param=field if room < 1 or wanted is None else "max_tokens",
            )
        return room if wanted is None else wanted

    # ---- answers

    def stream(self, *requests: Request) -> Stream:
        """Submit, and iterate over the text as it settles.

        With several requests, `index` of a delta counts choices across them in order.
        **Raises** what `EngineClient.submit` raises, here; while iterating `EngineFailure` and
        `ReaderTooSlow`.
        """
        return Stream(self._session(requests))

    def astream(self, *requests: Request) -> AsyncStream:
        """As `stream`, for the running event loop."""
        return AsyncStream(self._session(requests))

    def complete(self, *requests: Request) -> list[Completion]:
        """Run to the end; all requests at once, more than the queue holds in turns. The answers
        come in order, the choices of a request side by side."""
        with Stream(self._session(requests, is_patient=True)) as stream:
            return gather(requests, list(stream))

    async def acomplete(self, *requests: Request, is_patient: bool = False) -> list[Completion]:
        """As `complete`; cancelling the task aborts. Unless patient, a full queue is refused."""
        stream = AsyncStream(self._session(requests, is_patient=is_patient))
        try:
            return gather(requests, [delta async for delta in stream])
        finally:
            stream.close()

    async def probe(self) -> None:
        """Generate one token, as proof that the engine can. **Raises** when it cannot."""
        params = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
        probe = Request(f"probe-{secrets.token_hex(8)}", (0,), params)
        stream = AsyncStream(_Session(self, [probe], False, observer=None))
        try:
            async for _ in stream:
                pass
        finally:
            stream.close()

    def _session(self, requests: Sequence[Request], is_patient: bool = False) -> _Session:
        return _Session(self, requests, is_patient, self._observer)


def load_service(
    name: str, path: Path, config: EngineConfig | None = None, limits: ServerConfig | None = None
) -> Service:
    """Open the model at `path` and load the engine; `name` is what clients will call it.

    **Raises** `FormatError`, `UnsupportedModel`, `OutOfMemory`.
    """
    return load_checkpoint(name, open_checkpoint(path), config, limits)


def load_checkpoint(
    name: str,
    checkpoint: Checkpoint,
    config: EngineConfig | None = None,
    limits: ServerConfig | None = None,
) -> Service:
    """As `load_service`, for a model file that is already open."""
    tokenizer = load_tokenizer(checkpoint)
    template = load_chat_template(checkpoint)
    loaded = load_engine(checkpoint, config or EngineConfig(), eos_token_ids=tokenizer.eos_ids)
    engine = loaded.engine
    model = ServedModel(
        name, tokenizer, template, engine.max_context, engine.vocab_size, loaded.memory
    )
    return Service(model, engine, limits)


def gather(requests: Sequence[Request], deltas: Sequence[TextDelta]) -> list[Completion]:
    """Fold deltas into completions: in order of requests, `index` counting within each."""
    found: dict[int, list[TextDelta]] = {}
    for delta in deltas:
        found.setdefault(delta.index, []).append(delta)
    indexes = [index for request in requests for index in range(request.params.n)]
    return [_completion(index, found[place]) for place, index in enumerate(indexes)]


def _completion(index: int, deltas: Sequence[TextDelta]) -> Completion:
    last = deltas[-1]
    assert last.finish_reason is not None, "a stream ended before its choice"
    return Completion(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=last.finish_reason,
        usage=last.usage or Usage(),
        logprobs=tuple(item for delta in deltas for item in delta.logprobs),
    )


# ---- one choice


class _Choice:
    """Tokens of one choice in, text that can no longer change out. Pure.

    Three things hold text back: an unfinished character (the detokenizer), a possible beginning of
    a stop string, and the engine's end or stop token, which never shows. Stop strings count from
    the first token after `min_tokens`.
    """

    def __init__(self, place: int, request: Request, tokenizer: Tokenizer) -> None:
        self.place = place
        self.is_stopped = False
        self._request = request
        self._num_known = tokenizer.vocab_size
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(request.params.stop)
        self._num_tokens = 0
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def push(self, event: Event) -> TextDelta | None:
        """Take an event; a delta comes out when there is settled text or the choice has ended."""
        if not self.is_stopped:
            self._take(event)
        if event.finish_reason is not None:
            return self._end(event, event.finish_reason)
        return self._delta() if self._text and not self.is_stopped else None

    def _take(self, event: Event) -> None:
        has_end_token = event.finish_reason == "stop"
        for position, token in enumerate(event.token_ids):
            self._num_tokens += 1
            self._ids.append(token)
            self._logprobs += event.logprobs[position : position + 1]
            if has_end_token and position == len(event.token_ids) - 1:
                return
            if token < self._num_known:
                self._add_text(self._detokenizer.push((token,)))
            if self.is_stopped:
                return

    def _add_text(self, text: str) -> None:
        if self._num_tokens <= self._request.params.min_tokens:
            self._text += text
            return
        settled, matched = self._stops.push(text)
        self._text += settled
        self.is_stopped = matched is not None

    def _end(self, event: Event, reason: FinishReason) -> TextDelta:
        if not self.is_stopped:
            self._add_text(self._detokenizer.flush())
        if not self.is_stopped:
            self._text += self._stops.flush()
        usage = event.usage or Usage(prompt_tokens=len(self._request.prompt_token_ids))
        if self.is_stopped:
            reason = "stop"
            usage = replace(usage, completion_tokens=self._num_tokens)
        return replace(self._delta(), finish_reason=reason, usage=usage)

    def _delta(self) -> TextDelta:
        delta = TextDelta(self.place, self._text, tuple(self._ids), tuple(self._logprobs))
        self._text, self._ids, self._logprobs = "", [], []
        return delta


# ---- from the engine's thread to a reader


class _Buffer:
    """Events on their way to one reader. The engine's thread writes and never waits; past the
    limit the request is aborted and the reader told."""

    def __init__(self, limit: int, now_s: Callable[[], float]) -> None:
        self.has_overflowed = False
        self.is_closed = False
        self.wake: Callable[[], None] = _nothing
        self.on_overflow: Callable[[], None] = _nothing
        self._limit = limit
        self._now_s = now_s
        self._items: deque[tuple[Event, float]] = deque()

    def put(self, event: Event) -> None:
        """Called from the engine's thread."""
        if self.is_closed or self.has_overflowed:
            return
        if len(self._items) < self._limit:
            self._items.append((event, self._now_s()))
        else:
            self.has_overflowed = True
            self.on_overflow()
        self.wake()

    def take(self) -> tuple[Event, float] | None:
        """The oldest event and when it came, or None. **Raises** `ReaderTooSlow` at the gap."""
        if self._items:
            return self._items.popleft()
        if self.has_overflowed:
            raise ReaderTooSlow(
                f"the reader fell more than {self._limit} events behind; the answer was ended"
            )
        return None


def _nothing() -> None:
    """No one is waiting yet."""


def _no_clock() -> float:
    return 0.0


@dataclass(slots=True)
class _Open:
    """A choice that has not ended, and the times of its request."""

    choice: _Choice
    trace: Trace | None
    is_aborting: bool = field(default=False)


class _Session:
    """Submits requests and folds their events; used by one reader, which owns the waiting.

    Patient: what a full queue refuses is sent again whenever one of ours has ended.
    """

    def __init__(
        self,
        service: Service,
        requests: Sequence[Request],
        is_patient: bool,
        observer: Observer | None,
    ) -> None:
        self._service = service
        self._observer = observer
        self._is_patient = is_patient
        self._unsent = deque(requests)
        self._ids = tuple(request.id for request in requests)
        self._open: dict[tuple[str, int], _Open] = {}
        self._num_placed = 0
        limit = service.limits.max_buffered_events * max(1, len(requests))
        self.buffer = _Buffer(limit, observer.now_s if observer else _no_clock)
        self.buffer.on_overflow = self._abort_all

    @property
    def is_done(self) -> bool:
        return not self._open and not self._unsent

    def submit(self) -> None:
        """Send what has not been sent. **Raises** after aborting what had been."""
        try:
            while self._unsent:
                self._submit_one(self._unsent[0])
                self._unsent.popleft()
        except Overloaded:
            if not (self._is_patient and self._open):
                self.close()
                raise
        except BaseException:
            self.close()
            raise

    def _submit_one(self, request: Request) -> None:
        model = self._service.model
        trace = self._observer.trace(model.name) if self._observer else None
        self._service.client.submit(request, self.buffer.put)
        for index in range(request.params.n):
            choice = _Choice(self._num_placed, request, model.tokenizer)
            self._open[request.id, index] = _Open(choice, trace)
            self._num_placed += 1

    def handle(self, event: Event, at_s: float) -> TextDelta | None:
        """Fold one event. **Raises** `EngineFailure` when it reports one."""
        entry = self._open.get((event.request_id, event.index))
        if entry is None:
            return None
        if event.finish_reason == "error":
            self.close()
            raise EngineFailure(event.error or "the engine failed this request")
        delta = entry.choice.push(event)
        if entry.trace:
            entry.trace.tokens(event.index, len(event.token_ids), at_s)
        if event.finish_reason is not None:
            self._ended(event, entry, delta, at_s)
        elif entry.choice.is_stopped and not entry.is_aborting:
            entry.is_aborting = True
            self._service.client.abort(event.request_id, event.index)
        return delta

    def _ended(self, event: Event, entry: _Open, delta: TextDelta | None, at_s: float) -> None:
        del self._open[event.request_id, event.index]
        if entry.trace and delta and delta.finish_reason:
            entry.trace.finished(delta.finish_reason, at_s)
        self.submit()

    def close(self) -> None:
        """Abort what is open; nothing arrives afterwards. Harmless when done."""
        self.buffer.is_closed = True
        if self._open:
            self._abort_all()
        for entry in self._open.values():
            if entry.trace:
                entry.trace.finished("abort", self._observer.now_s() if self._observer else 0.0)
        self._open.clear()
        self._unsent.clear()

    def _abort_all(self) -> None:
        for request_id in self._ids:
            self._service.client.abort(request_id)


class Stream(Iterator[TextDelta]):
    """Deltas of submitted requests, for a thread. Closing it (also by `with`, by an exception or
    by forgetting it) aborts what is still open."""

    def __init__(self, session: _Session) -> None:
        self._session = session
        self._ready = threading.Event()
        session.buffer.wake = self._ready.set
        session.submit()

    def __next__(self) -> TextDelta:
        session = self._session
        try:
            while not session.is_done:
                self._ready.clear()
                item = session.buffer.take()
                if item is None:
                    self._ready.wait()
                    continue
                delta = session.handle(*item)
                if delta is not None:
                    return delta
        except BaseException:
            session.close()
            raise
        raise StopIteration

    def close(self) -> None:
        """Abort what is open."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._session.close()


class _LoopWaker:
    """Wakes a reader in an event loop from another thread; one call in flight is enough, since it
    runs before the reader looks. Apart from the stream, so that a forgotten stream is freed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, when_gone: Callable[[], None]) -> None:
        self.ready = asyncio.Event()
        self._loop = loop
        self._when_gone = when_gone
        self._is_waking = False

    def wake(self) -> None:
        """Called from the engine's thread."""
        if self._is_waking:
            return
        self._is_waking = True
        try:
            self._loop.call_soon_threadsafe(self._set)
        except RuntimeError:  # the loop has closed: no reader is left
            self._when_gone()

    def _set(self) -> None:
        self._is_waking = False
        self.ready.set()


class AsyncStream(AsyncIterator[TextDelta]):
    """Deltas of submitted requests, for the event loop it was made in. Cancelling its reader,
    closing it or forgetting it aborts what is still open."""

    def __init__(self, session: _Session) -> None:
        self._session = session
        waker = _LoopWaker(asyncio.get_running_loop(), session.buffer.on_overflow)
        self._ready = waker.ready
        session.buffer.wake = waker.wake
        session.submit()

    async def __anext__(self) -> TextDelta:
        session = self._session
        try:
            while not session.is_done:
                self._ready.clear()
                item = session.buffer.take()
                if item is None:
                    await self._ready.wait()
                    continue
                delta = session.handle(*item)
                if delta is not None:
                    return delta
        except BaseException:
            session.close()
            raise
        raise StopAsyncIteration

    def close(self) -> None:
        """Abort what is open. Any thread may call it while no one reads."""
        self._session.close()

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
        self._session.close()

    def __del__(self) -> None:
        self._session.close()
