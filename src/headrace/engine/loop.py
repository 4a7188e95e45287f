"""The engine: one thread that schedules, runs and commits, beside its callers.

`submit` and `abort` leave a note in an inbox and return; the thread reads it at the next step
border. One step is `schedule -> run -> commit`; each event goes to its request's sink, on this
thread. An exception of a step ends the jobs of that step and nothing else; an exception of a sink
ends its own request. With nothing to do the thread waits on a condition, it does not spin.

Not here: text (`service.py`), what a step is (`scheduler.py`), arrays (`runner.py`).
"""

from __future__ import annotations

import atexit
import secrets
import threading
from collections import deque
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol, Self

from headrace.backends.ops import PAGE_SIZE, Batch, KVSpec, Limits, Ops
from headrace.config import EngineConfig
from headrace.engine.pages import PagePool
from headrace.engine.prefix import PrefixCache
from headrace.engine.program import Job, check_request, token_jobs
from headrace.engine.runner import Runner
from headrace.engine.scheduler import Scheduler
from headrace.errors import EngineFailure, InvalidRequest, Overloaded
from headrace.types import EngineStats, Event, EventSink, Request

MAX_STALLS = 8  # steps in a row without a plan before the engine calls itself broken


class TokenModelSpec(Protocol):
    """What the engine needs to know of a decoder."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...


class TokenModel(Protocol):
    """A decoder on some backend: its sizes, its forward and the shape of its KV pool."""

    @property
    def spec(self) -> TokenModelSpec: ...

    def forward(self, ops: Ops, batch: Batch) -> Any: ...

    def kv_spec(self, num_pages: int, dtype: Any) -> KVSpec: ...


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the KV pool holds: `num_pages` pages, hence sequences of up to `max_context` tokens."""

    num_pages: int
    max_context: int


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has not ended; `sink` is None once it raised."""

    request_id: str
    sink: EventSink | None
    jobs: dict[int, Job]  # open choices, by index
    was_aborted: bool = False
    has_failed: bool = False


class Engine:
    """Answers token requests with one model; implements `types.EngineClient`."""

    def __init__(
        self,
        model: TokenModel,
        ops: Ops,
        config: EngineConfig,
        *,
        capacity: Capacity,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.max_context = capacity.max_context
        self.vocab_size = model.spec.vocab_size
        self._config = config
        kv = ops.kv_pool(model.kv_spec(capacity.num_pages, config.kv_dtype))
        limits = Limits(
            config.step_tokens, config.max_running, config.max_running, capacity.max_context
        )
        self._runner = Runner(
            ops.compile(model.forward, kv, limits),
            max_running=config.max_running,
            max_context=capacity.max_context,
            eos_token_ids=eos_token_ids,
        )
        self._scheduler = Scheduler(
            self._make_cache(capacity.num_pages),
            step_units=config.step_tokens,
            max_running=config.max_running,
        )
        self._requests: dict[str, _Open] = {}
        self._inbox: deque[_Open | tuple[str, int | None]] = deque()
        self._num_inbox = 0  # choices in the inbox
        self._next_job = 0
        self._failure: str | None = None
        self._is_closing = False
        self._num_stalls = 0
        self._counts = _Counts()
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside native code must not meet a dying interpreter

    def _make_cache(self, num_pages: int) -> PrefixCache:
        return PrefixCache(PagePool(num_pages), PAGE_SIZE, is_enabled=self._config.prefix_cache)

    # ---- callers' side: any thread

    def submit(self, request: Request, sink: EventSink) -> None:
        """Validate and queue; see `EngineClient`. `max_waiting` counts choices not yet running."""
        self._refuse_fork()
        limit = check_request(request, self.vocab_size, self.max_context)
        seed = request.params.seed
        seed = secrets.randbits(64) if seed is None else seed
        jobs = token_jobs(request, 0, seed, limit)
        self._scheduler.check(jobs[0])
        with self._wake:
            self._refuse(request)
            for job in jobs:
                job.id = self._next_job
                self._next_job += 1
            entry = _Open(request.id, sink, {job.index: job for job in jobs})
            self._requests[request.id] = entry
            self._inbox.append(entry)
            self._num_inbox += len(jobs)
            self._wake.notify()

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one choice of it, at the next step border; unknown and ended ids are
        ignored."""
        if not self._thread.is_alive():
            return  # all have ended; or this is a fork, whose lock nobody may ever give back
        with self._wake:
            if request_id in self._requests:
                self._inbox.append((request_id, index))
                self._wake.notify()

    def stats(self) -> EngineStats:
        """A snapshot; values may be of neighbouring steps."""
        scheduler, counts = self._scheduler, self._counts
        cache = scheduler.cache
        return EngineStats(
            num_waiting=scheduler.num_waiting + self._num_inbox,
            num_running=scheduler.num_running,
            num_pages=cache.pool.num_pages,
            num_free_pages=cache.pool.num_free,
            num_cached_pages=cache.num_idle,
            page_size=cache.page_size,
            num_steps=counts.num_steps,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            generated_tokens=counts.generated_tokens,
            requests_finished=counts.requests_finished,
            requests_aborted=counts.requests_aborted,
            requests_failed=counts.requests_failed,
            step_seconds=counts.step_seconds,
        )

    def close(self) -> None:
        """End the running step, then all open requests (with an "error" event) and the thread."""
        if self._thread.is_alive():  # not so in a fork, whose lock nobody may ever give back
            with self._wake:
                self._is_closing = True
                self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _refuse_fork(self) -> None:
        if not self._thread.is_alive() and not self._is_closing:
            raise EngineFailure(
                "the engine runs in the process that made it, and this is a fork of it; load the "
                "model here, or use it there"
            )

    def _refuse(self, request: Request) -> None:
        if self._failure is not None:
            raise EngineFailure(f"the engine stopped: {self._failure}; load the model again")
        if self._is_closing:
            raise EngineFailure("the engine is closed; load the model again")
        if request.id in self._requests:
            raise InvalidRequest(f"request id {request.id!r} is in use; choose another", param="id")
        num_waiting = self._scheduler.num_waiting + self._num_inbox
        if num_waiting + request.params.n > self._config.max_waiting:
            raise Overloaded(
                f"{num_waiting} choices wait already and at most {self._config.max_waiting} may; "
                "retry later"
            )

    # ---- engine's side: its own thread

    def _run(self) -> None:
        try:
            while self._read_inbox():
                self._step()
        except Exception as error:  # a bug of ours: stop loudly, answer everybody
            self._failure = f"{type(error).__name__}: {error}"
        self._end_all(f"the engine stopped: {self._failure or 'it was closed'}")

    def _read_inbox(self) -> bool:
        """Wait for work, take the notes in; False when closing."""
        with self._wake:
            while not (self._inbox or self._scheduler.has_work or self._is_closing):
                self._wake.wait()
            if self._is_closing:
                return False
            notes = tuple(self._inbox)
            self._inbox.clear()
            self._num_inbox = 0
        for note in notes:
            if isinstance(note, tuple):
                request_id, index = note
                self._abort(self._requests.get(request_id), index)
            else:
                self._open(note)
        return True

    def _open(self, entry: _Open) -> None:
        for job in entry.jobs.values():
            self._runner.open(job)
            self._scheduler.add(job)

    def _abort(self, entry: _Open | None, index: int | None = None) -> None:
        jobs = tuple(entry.jobs.values()) if entry is not None else ()
        for job in (job for job in jobs if index in (None, job.index)):
            event = self._scheduler.abort(job.id)
            if event is not None:
                self._deliver([event])

    def _step(self) -> None:
        plan = self._scheduler.schedule()
        if plan is None:
            self._stall()
            return
        self._num_stalls = 0
        started = monotonic()
        try:
            outcomes = self._runner.run(plan)
        except Exception as error:  # ends the jobs of this step, not the engine
            seconds = self._count_step(started)
            text = f"the step failed: {type(error).__name__}: {error}"
            events = self._scheduler.fail(plan, text, seconds)
            self._scheduler.check_invariants()
        else:
            events = self._scheduler.commit(plan, outcomes, self._count_step(started))
        self._deliver(events)

    def _count_step(self, started: float) -> float:
        seconds = monotonic() - started
        self._counts.num_steps += 1
        self._counts.step_seconds += seconds
        return seconds

    def _stall(self) -> None:
        """Work without a plan: cannot last, since what never fits is refused at submit."""
        self._num_stalls += 1
        assert self._num_stalls < MAX_STALLS or not self._scheduler.has_work, "no job can move"

    def _deliver(self, events: list[Event]) -> None:
        broken = []
        for event in events:
            entry = self._requests.get(event.request_id)
            if entry is None or event.index not in entry.jobs:
                continue  # ended by a sink that raised, while the engine shut down
            self._counts.generated_tokens += len(event.token_ids)
            if event.finish_reason is not None:
                self._end_choice(entry, event)
            if entry.sink is not None and not _give(entry.sink, event):
                entry.sink = None
                broken.append(entry)
        for entry in broken:
            entry.was_aborted = True
            self._abort(entry)

    def _end_choice(self, entry: _Open, event: Event) -> None:
        self._runner.close(entry.jobs.pop(event.index).id)
        counts = self._counts
        if event.usage is not None:
            counts.prompt_tokens += event.usage.prompt_tokens
            counts.cached_tokens += event.usage.cached_tokens
        entry.was_aborted |= event.finish_reason == "abort"
        entry.has_failed |= event.finish_reason == "error"
        if not entry.jobs:
            with self._wake:
                del self._requests[entry.request_id]
            counts.requests_failed += entry.has_failed
            counts.requests_aborted += entry.was_aborted and not entry.has_failed
            counts.requests_finished += not (entry.was_aborted or entry.has_failed)

    def _end_all(self, text: str) -> None:
        with self._wake:
            self._is_closing = True
            self._inbox.clear()
            self._num_inbox = 0
            entries = tuple(self._requests.values())
        for entry in entries:
            for job in tuple(entry.jobs.values()):
                if self._failure is None:
                    self._scheduler.abort(job.id)
                self._deliver([job.event("error", error=text)])
        self._runner.shut()


@dataclass(slots=True, eq=False)
class _Counts:
    """Counters behind `EngineStats`; written by the engine's thread only."""

    num_steps: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0


def _give(sink: EventSink, event: Event) -> bool:
    """False when the sink raised: its request is aborted, nobody else is concerned."""
    try:
        sink(event)
    except Exception:
        return False
    return True
