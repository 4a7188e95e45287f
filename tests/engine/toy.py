"""A toy decoder and backend for engine tests: instant, deterministic, and strict about pages.

The logits of a position are a hash of all tokens before it, read back through the page table from a
paged pool that also remembers positions. So a wrong page, position, row or order changes the answer
or trips an assertion. `expected` computes the same answer from a plain list, without engine, pages
or batches. Any backend with the same two functions can stand in (see `Stack`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.ops import PAGE_SIZE, CompiledForward, KVSpec, Limits, StepArrays
from headrace.config import EngineConfig
from headrace.engine.loop import Capacity, Engine
from headrace.engine.pages import PagePool
from headrace.engine.prefix import PrefixCache
from headrace.engine.sampler import History, draw, draw_rule
from headrace.types import Event, Request, SamplingParams

VOCAB = 64
EOS = 0
TIMEOUT_S = 30.0


def logits_after(tokens: Sequence[int]) -> NDArray[np.float32]:
    """The toy's logits: seeded by a hash of the whole sequence; the end token is a bit unlikely."""
    state = 17
    for token in tokens:
        state = (state * 1_000_003 + int(token) + 1) % (2**61 - 1)
    lanes = (np.arange(VOCAB, dtype=np.uint64) + np.uint64(1)) * np.uint64(state | 1)
    lanes ^= lanes >> np.uint64(29)
    lanes *= np.uint64(0xBF58476D1CE4E5B9)
    row = ((lanes >> np.uint64(40)).astype(np.float64) / 2**24 * 6.0).astype(np.float32)
    row[EOS] -= 0.1
    return row


@dataclass(frozen=True)
class ToySpec:
    vocab_size: int = VOCAB
    context_length: int = 4096


class ToyModel:
    """What the engine asks of a model."""

    spec = ToySpec()

    def forward(self, ops: Any, batch: Any) -> Any:
        raise AssertionError("the toy backend does not run ops")

    def kv_spec(self, num_pages: int, dtype: Any) -> KVSpec:
        return KVSpec(1, 1, 1, num_pages, dtype)


@dataclass
class ToyOps:
    """Compiles to a function that checks the step and hashes. `before` runs at each step's start
    with the sequences of the step (tests wait or raise there)."""

    before: Callable[[list[list[int]]], None] | None = None
    poison: Callable[[list[int]], float | None] | None = None
    num_steps: int = 0
    largest_batch: int = 0
    num_tokens: int = 0
    name: str = "toy"

    def kv_pool(self, spec: KVSpec) -> NDArray[np.int64]:
        return np.full((spec.num_pages, PAGE_SIZE, 2), -1, dtype=np.int64)

    def compile(self, forward: Any, kv: NDArray[np.int64], limits: Limits) -> CompiledForward:
        def run(step: StepArrays) -> NDArray[np.float32]:
            self.num_steps += 1
            self.num_tokens += len(step.token_ids)
            self.largest_batch = max(self.largest_batch, len(step.context_lens))
            check_step(step, len(kv), limits)
            ends = step.cu_seqlens.tolist()
            write(kv, step)
            sequences = [read(kv, step, s) for s in range(len(step.context_lens))]
            if self.before is not None:
                self.before(sequences)
            rows = []
            for row in step.rows.tolist():
                s = next(i for i in range(len(ends)) if ends[i + 1] > row)
                known = sequences[s][: int(step.positions[row]) + 1]
                rows.append(self._poisoned(known))
            return np.array(rows, dtype=np.float32).reshape(-1, VOCAB)

        return run

    def _poisoned(self, known: list[int]) -> NDArray[np.float32]:
        row = logits_after(known)
        bad = self.poison(known) if self.poison is not None else None
        if bad is not None:
            row[5] = bad
        return row


def check_step(step: StepArrays, num_pages: int, limits: Limits) -> None:
    """What `StepArrays` promises."""
    assert all(
        getattr(step, name).dtype == np.int32
        for name in ("token_ids", "positions", "cu_seqlens", "context_lens", "page_table", "rows")
    )
    assert 0 < len(step.token_ids) == len(step.positions) <= limits.max_tokens
    assert len(step.context_lens) <= limits.max_seqs
    assert step.cu_seqlens[-1] == len(step.token_ids)
    written: list[int] = []
    for s, length in enumerate(step.context_lens.tolist()):
        assert length <= limits.max_context
        first, last = int(step.cu_seqlens[s]), int(step.cu_seqlens[s + 1])
        expected = np.arange(length - (last - first), length)
        assert np.array_equal(step.positions[first:last], expected)
        used = step.page_table[s, : -(-length // PAGE_SIZE)].tolist()
        assert all(0 <= page < num_pages for page in used)
        assert np.all(step.page_table[s, len(used) :] == -1), "unused entries are -1"
        written += used[(length - (last - first)) // PAGE_SIZE :]
    assert len(set(written)) == len(written), "two writers of a page"


def write(kv: NDArray[np.int64], step: StepArrays) -> None:
    """Store tokens and positions where the page table says."""
    for s in range(len(step.context_lens)):
        for row in range(int(step.cu_seqlens[s]), int(step.cu_seqlens[s + 1])):
            position = int(step.positions[row])
            page = int(step.page_table[s, position // PAGE_SIZE])
            kv[page, position % PAGE_SIZE] = (position, step.token_ids[row])


def read(kv: NDArray[np.int64], step: StepArrays, s: int) -> list[int]:
    """All tokens of a sequence, through its pages."""
    length = int(step.context_lens[s])
    used = step.page_table[s, : -(-length // PAGE_SIZE)]
    entries = kv[used].reshape(-1, 2)[:length]
    assert np.array_equal(entries[:, 0], np.arange(length)), "a page from another place"
    return [int(t) for t in entries[:, 1]]


def expected(
    prompt: Sequence[int], params: SamplingParams, choice: int = 0, context: int = 4096
) -> list[int]:
    """The naive loop: whole sequence in, one token out, until it ends."""
    tokens, seed = list(prompt), params.seed
    ends = frozenset(() if params.ignore_eos else (EOS,)) | frozenset(params.stop_token_ids)
    rule = draw_rule(params, seed if seed is not None else 0, choice, ends, len(prompt))
    history = History(tuple(prompt)) if rule.has_penalties else None
    limit = context if params.max_tokens is None else len(prompt) + params.max_tokens
    while len(tokens) < limit:
        token = draw(logits_after(tokens), rule, len(tokens), history).token_id
        tokens.append(token)
        if history is not None:
            history.push(token)
        if token in ends:
            break
    return tokens[len(prompt) :]


class Gate:
    """Holds the engine inside a step until opened; tells when a step is in."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, sequences: list[list[int]]) -> None:
        self.entered.set()
        assert self.opened.wait(TIMEOUT_S)


class Collector:
    """A sink that remembers, and can be waited for."""

    def __init__(self, num_choices: int = 1) -> None:
        self.events: list[Event] = []
        self._left = num_choices
        self._done = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if event.finish_reason is not None:
            self._left -= 1
            if self._left == 0:
                self._done.set()

    def wait(self) -> list[Event]:
        """All events, once every choice has ended."""
        assert self._done.wait(TIMEOUT_S), f"no end; got {self.events}"
        return self.events

    def tokens(self, choice: int = 0) -> list[int]:
        """The answer of one choice."""
        return [t for e in self.wait() if e.index == choice for t in e.token_ids]

    def last(self, choice: int = 0) -> Event:
        """Its final event."""
        last = [e for e in self.wait() if e.index == choice][-1]
        assert last.finish_reason is not None
        return last


class FailingCache(PrefixCache):
    """No page at the `nth` call of `take`."""

    nth = 0
    num_takes = 0

    def take(self) -> int | None:
        self.num_takes += 1
        return None if self.num_takes == self.nth else super().take()


class ToyEngine(Engine):
    """An engine whose page allocation can be made to fail."""

    failing_take = 0

    def _make_cache(self, num_pages: int) -> PrefixCache:
        cache = FailingCache(PagePool(num_pages), PAGE_SIZE, is_enabled=self._config.prefix_cache)
        cache.nth = self.failing_take
        return cache

    @property
    def num_takes(self) -> int:
        cache = self._scheduler.cache
        assert isinstance(cache, FailingCache)
        return cache.num_takes

    def check(self) -> None:
        """Nothing leaked (call it when nothing is open)."""
        self._scheduler.check_invariants()
        stats = self.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
        assert not self._requests
        assert not self._runner._sequences
        assert len(self._runner._free_rows) == self._config.max_running


@dataclass(frozen=True)
class Setup:
    """Numbers of an engine under test."""

    num_pages: int = 64
    max_context: int = 512
    step_tokens: int = 64
    max_running: int = 8
    max_waiting: int = 100
    prefix_cache: bool = True
    failing_take: int = 0
    ops: ToyOps = field(default_factory=ToyOps)


@contextmanager
def engine(setup: Setup) -> Iterator[ToyEngine]:
    """A running toy engine; checked for leaks and closed at the end."""
    config = EngineConfig(
        backend="reference",
        step_tokens=setup.step_tokens,
        max_running=setup.max_running,
        max_waiting=setup.max_waiting,
        prefix_cache=setup.prefix_cache,
    )
    kind = type("ToyEngine", (ToyEngine,), {"failing_take": setup.failing_take})
    capacity = Capacity(setup.num_pages, setup.max_context)
    it = kind(ToyModel(), setup.ops, config, capacity=capacity, eos_token_ids=(EOS,))
    try:
        yield it
    finally:
        it.close()
        it.check()


def ask(
    it: Engine, name: str, prompt: Sequence[int], params: SamplingParams | None = None
) -> Collector:
    """Submit, and return the sink."""
    params = params or SamplingParams(temperature=0.0, max_tokens=20)
    sink = Collector(params.n)
    it.submit(Request(name, tuple(prompt), params), sink)
    return sink


def ask_together(
    it: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[Collector]:
    """Submit all before the first step ends, so that they do share steps."""
    gate, forward = Gate(), it._runner._forward

    def gated(step: StepArrays) -> NDArray[np.float32]:
        gate([])
        return forward(step)

    it._runner._forward = gated
    sinks = [ask(it, str(index), prompt, params) for index, prompt in enumerate(prompts)]
    gate.opened.set()
    return sinks
