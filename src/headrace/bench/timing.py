"""Runs token requests on a headrace engine and notes when each token came.

Below the service: no text, no HTTP, so that figures are the engine's. Tokens are random and every
answer ignores end tokens, hence lengths are exact. Also used by the scripts of the repository's
`bench/`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from headrace.config import EngineConfig, store_config
from headrace.errors import EngineFailure
from headrace.formats.store import resolve
from headrace.observe import monotonic_s
from headrace.service import Service, load_service
from headrace.types import EngineClient, Event, Request, SamplingParams

TIMEOUT_S = 600.0


@dataclass
class Trace:
    """One request as its sink saw it; times are seconds of `observe.monotonic_s`."""

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
        self._random = np.random.default_rng(seed)
        self._vocab_size = vocab_size

    def make(self, length: int) -> tuple[int, ...]:
        """A prompt of `length` tokens."""
        return tuple(self._random.integers(self._vocab_size, size=length).tolist())


def greedy(prompt: Sequence[int], max_tokens: int, name: str) -> Request:
    """Exactly `max_tokens` tokens, greedily."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(name, tuple(prompt), params)


def run(client: EngineClient, requests: Sequence[Request]) -> list[Trace]:
    """Submit all at once and wait for every end.

    **Raises** `EngineFailure` when a request fails, and after ten minutes.
    """
    traces: list[Trace] = []
    done = threading.Semaphore(0)
    for request in requests:
        trace = Trace(monotonic_s())
        traces.append(trace)
        client.submit(request, _Sink(trace, done))
    deadline_s = monotonic_s() + TIMEOUT_S
    for _ in requests:
        if not done.acquire(timeout=max(0.0, deadline_s - monotonic_s())):
            raise EngineFailure(f"no answer within {TIMEOUT_S:.0f} s")
    failures = [trace.failure for trace in traces if trace.failure]
    if failures:
        raise EngineFailure(f"{len(failures)} requests failed: {failures[0]}")
    return traces


class _Sink:
    """Called on the engine's thread."""

    def __init__(self, trace: Trace, done: threading.Semaphore) -> None:
        self._trace = trace
        self._done = done

    def __call__(self, event: Event) -> None:
        now_s = monotonic_s()
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
    begin_s, end_s = full_batch_span(traces)
    return _count(traces, begin_s, end_s) / (end_s - begin_s)


def full_batch_span(traces: Sequence[Trace]) -> tuple[float, float]:
    """From the last of the first tokens to the first of the last."""
    begin_s = max(trace.token_times_s[0] for trace in traces)
    return begin_s, min(trace.token_times_s[-1] for trace in traces)


def window_rates(traces: Sequence[Trace], num_windows: int) -> list[float]:
    """Tokens per second over all in consecutive windows of equally many steps, while every request
    was decoding; steps that are left over are dropped from the beginning. Fewer steps than windows:
    one window a step."""
    begin_s, end_s = full_batch_span(traces)
    edges = [t for t in traces[0].token_times_s if begin_s <= t <= end_s]
    num_steps = len(edges) - 1
    steps = max(1, num_steps // num_windows)
    edges = edges[max(0, num_steps - num_windows * steps) :: steps]
    return [_count(traces, a, b) / (b - a) for a, b in pairwise(edges)]


def _count(traces: Sequence[Trace], begin_s: float, end_s: float) -> int:
    return sum(begin_s < t <= end_s for trace in traces for t in trace.token_times_s)


def span_s(traces: Sequence[Trace]) -> float:
    """First submission to last token."""
    begin_s = min(trace.submitted_s for trace in traces)
    return max(trace.token_times_s[-1] for trace in traces) - begin_s
