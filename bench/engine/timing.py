"""Runs token requests on a headrace engine and notes when each token came.

Below the service: no text, no HTTP, so that figures are the engine's. Tokens are random and every
answer ignores end tokens, hence lengths are exact. Shared by the scripts of this folder and by
`bench/peers`.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.config import EngineConfig, store_config
from headrace.formats.store import resolve
from headrace.service import Service, load_service
from headrace.types import EngineClient, Event, Request, SamplingParams

TIMEOUT_S = 600.0


@dataclass
class Trace:
    """One request as its sink saw it; times are `time.perf_counter` seconds."""

    submitted_s: float
    token_times_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    failure: str | None = None

    @property
    def ttft_s(self) -> float:
        """Submission to first token."""
        return self.token_times_s[0] - self.submitted_s


def load(name_or_path: str, **options: Any) -> Service:
    """A model with an engine; options are fields of `EngineConfig`."""
    found = resolve(name_or_path, store_config())
    return load_service(found.id, found.path, EngineConfig(**options))


class Prompts:
    """Random token ids, never the same twice."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size

    def make(self, length: int) -> tuple[int, ...]:
        """A prompt of `length` tokens."""
        return tuple(self._random.randrange(self._vocab_size) for _ in range(length))


def greedy(prompt: Sequence[int], max_tokens: int, name: str) -> Request:
    """Exactly `max_tokens` tokens, greedily."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(name, tuple(prompt), params)


def run(client: EngineClient, requests: Sequence[Request]) -> list[Trace]:
    """Submit all at once and wait for every end.

    **Raises** `RuntimeError` when a request fails, and after ten minutes.
    """
    traces: list[Trace] = []
    done = threading.Semaphore(0)
    for request in requests:
        trace = Trace(time.perf_counter())
        traces.append(trace)
        client.submit(request, _Sink(trace, done))
    deadline_s = time.perf_counter() + TIMEOUT_S
    for _ in requests:
        if not done.acquire(timeout=max(0.0, deadline_s - time.perf_counter())):
            raise RuntimeError(f"no answer within {TIMEOUT_S:.0f} s")
    failures = [trace.failure for trace in traces if trace.failure]
    if failures:
        raise RuntimeError(f"{len(failures)} requests failed: {failures[0]}")
    return traces


class _Sink:
    """Called on the engine's thread."""

    def __init__(self, trace: Trace, done: threading.Semaphore) -> None:
        self._trace = trace
        self._done = done

    def __call__(self, event: Event) -> None:
        now_s = time.perf_counter()
        self._trace.token_times_s += [now_s] * len(event.token_ids)
        if event.finish_reason is None:
            return
        if event.usage:
            self._trace.cached_tokens = event.usage.cached_tokens
        if event.finish_reason != "length":
            self._trace.failure = f"ended by {event.finish_reason}: {event.error}"
        self._done.release()


def full_batch_rate(traces: Sequence[Trace]) -> float:
    """Tokens per second over all, while every request was decoding."""
    begin_s = max(trace.token_times_s[0] for trace in traces)
    end_s = min(trace.token_times_s[-1] for trace in traces)
    count = sum(begin_s < t <= end_s for trace in traces for t in trace.token_times_s)
    return count / (end_s - begin_s)


def span_s(traces: Sequence[Trace]) -> float:
    """First submission to last token."""
    begin_s = min(trace.submitted_s for trace in traces)
    return max(trace.token_times_s[-1] for trace in traces) - begin_s


def spread(values: Sequence[float]) -> str:
    """Median and extremes, for a table."""
    return f"{statistics.median(values):.4g} ({min(values):.4g}-{max(values):.4g})"
