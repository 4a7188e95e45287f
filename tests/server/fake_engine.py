"""An engine without a model: one thread, one scripted token per open choice and step.

Token ids below 256 are bytes, `EOS` ends an answer. With a gate each step waits for a permit, so a
test decides when a token comes; without one the engine runs as fast as it can.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import cycle

from headrace.errors import EngineFailure, InvalidRequest, Overloaded
from headrace.types import EngineStats, Event, EventSink, Request, TokenLogprob, Usage

EOS = 256
VOCAB_SIZE = 257
WAIT_S = 10.0  # a test that waits longer than this has failed
Script = Callable[[Request, int], Iterable[int]]


def echo(request: Request, index: int) -> Iterable[int]:
    """The prompt back, shouted, with the choice's number behind it; then the end."""
    text = bytes(token for token in request.prompt_token_ids if token < 256)
    return [*text.upper(), *(f"#{index}".encode() if index else b""), EOS]


def endless(request: Request, index: int) -> Iterable[int]:
    """The alphabet, for ever."""
    return cycle(b"abcdefghijklmnopqrstuvwxyz")


@dataclass(slots=True)
class _Choice:
    request: Request
    index: int
    sink: EventSink
    tokens: Iterator[int]
    num_tokens: int = 0
    is_aborted: bool = False


@dataclass
class FakeEngine:
    """Implements `types.EngineClient`."""

    script: Script = echo
    gate: threading.Semaphore | None = None
    max_waiting: int = 1000
    cached_tokens: int = 0
    fails_at: int | None = None  # the step whose tokens are errors
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._open: dict[tuple[str, int], _Choice] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._num_steps = 0
        self._generated = 0
        self._aborted = 0
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, sink: EventSink) -> None:
        with self._changed:
            if self._is_closed:
                raise EngineFailure("the engine is closed")
            if len(self._open) + request.params.n > self.max_waiting:
                raise Overloaded(f"{len(self._open)} choices wait already")
            if (request.id, 0) in self._open:
                raise InvalidRequest(f"request id {request.id!r} is in use")
            self.requests.append(request)
            for index in range(request.params.n):
                tokens = iter(self.script(request, index))
                self._open[request.id, index] = _Choice(request, index, sink, tokens)
            self._changed.notify_all()

    def abort(self, request_id: str, index: int | None = None) -> None:
        with self._changed:
            for key, choice in self._open.items():
                if key[0] == request_id and index in (None, key[1]):
                    choice.is_aborted = True
            self._changed.notify_all()

    def stats(self) -> EngineStats:
        with self._changed:
            return EngineStats(
                num_running=len(self._open),
                num_pages=100,
                num_free_pages=100 - len(self._open),
                num_steps=self._num_steps,
                generated_tokens=self._generated,
                requests_aborted=self._aborted,
            )

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self.gate is not None:
            self.gate.release()
        self._thread.join(WAIT_S)

    def wait_until_idle(self) -> bool:
        """Whether every choice ended in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, WAIT_S)

    def wait_for_requests(self, count: int) -> bool:
        """Whether that many requests were submitted in time."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.requests) >= count, WAIT_S)

    # ---- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._is_closed)
                self._end_aborted()
            if self.gate is not None:
                self._wait_at_gate()
            with self._changed:
                self._end_aborted()
                if self._is_closed:
                    break
                self._step()
        with self._changed:
            for choice in list(self._open.values()):
                self._end(choice, (), "error", "the engine was closed")

    def _wait_at_gate(self) -> None:
        assert self.gate is not None
        while not self.gate.acquire(timeout=0.01):
            with self._changed:
                self._end_aborted()
                if self._is_closed or not self._open:
                    return

    def _end_aborted(self) -> None:
        for choice in [c for c in self._open.values() if c.is_aborted]:
            self._aborted += 1
            self._end(choice, (), "abort")

    def _step(self) -> None:
        self._num_steps += 1
        for choice in list(self._open.values()):
            if self._num_steps == self.fails_at:
                self._end(choice, (), "error", "the step failed")
                continue
            token = next(choice.tokens)
            self._generated += 1
            choice.num_tokens += 1
            if token == EOS and not choice.request.params.ignore_eos:
                self._end(choice, (token,), "stop")
            elif choice.num_tokens == choice.request.params.max_tokens:
                self._end(choice, (token,), "length")
            else:
                choice.sink(
                    Event(choice.request.id, choice.index, (token,), _logprobs(choice, token))
                )

    def _end(self, choice: _Choice, tokens: tuple[int, ...], reason: str, error: str = "") -> None:
        del self._open[choice.request.id, choice.index]
        usage = Usage(len(choice.request.prompt_token_ids), choice.num_tokens, self.cached_tokens)
        logprobs = _logprobs(choice, tokens[0]) if tokens else ()
        choice.sink(
            Event(
                choice.request.id,
                choice.index,
                tokens,
                logprobs,
                finish_reason=reason,  # type: ignore[arg-type]  # a literal in every caller
                usage=usage,
                error=error or None,
            )
        )
        self._changed.notify_all()


def _logprobs(choice: _Choice, token: int) -> tuple[TokenLogprob, ...]:
    wanted = choice.request.params.logprobs
    if wanted is None:
        return ()
    return (TokenLogprob(token, -0.5, ((token, -0.5), (0, -1.0))[:wanted]),)
