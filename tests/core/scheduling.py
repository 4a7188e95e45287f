"""A world for the scheduler: jobs of every kind, a memory behind the pages, a clock of its own.

`World.step` plays runner and model: it keeps page tables only from what plans say, reads every
earlier token of a job back through them, and writes where the plan says. So a wrong page, a lost
preemption notice or a page shared with a writer is seen at once. The "model" is a hash of the whole
sequence, so any wrong token changes the answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from headrace.engine.pages import PagePool
from headrace.engine.prefix import PrefixCache
from headrace.engine.program import TOKENS, Job, Stage
from headrace.engine.scheduler import Outcome, Plan, Scheduler, Work
from headrace.types import Event, SamplingParams

VOCAB = 50
END = 0  # the token that ends an answer


def next_token(tokens: list[int]) -> int:
    """The world's model."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCAB


def answer(prompt: list[int], limit: int) -> list[int]:
    """What a token job must produce, computed without an engine."""
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(next_token(tokens))
        if tokens[-1] == END:
            break
    return tokens[len(prompt) :]


def make_job(job_id: int, *stages: Stage, tokens: list[int] | None = None) -> Job:
    """A job with any stages."""
    prompt = list(tokens or [])
    return Job(
        id=job_id,
        request_id=str(job_id),
        index=0,
        params=SamplingParams(),
        seed=0,
        stages=stages,
        tokens=prompt,
        num_prompt=len(prompt),
        stage=stages[0],
    )


def token_job(job_id: int, prompt: list[int], num_new: int) -> Job:
    """A chat."""
    goal = len(prompt)
    stage = Stage(TOKENS, goal, goal + num_new, is_paged=True, is_growing=True)
    return make_job(job_id, stage, tokens=prompt)


def image_job(job_id: int, num_steps: int, cost: int) -> Job:
    """Encode (whole), denoise (single steps), decode (single)."""
    return make_job(
        job_id,
        Stage(("text",), 5, 5, is_whole=True),
        Stage(("dit", cost), num_steps, num_steps, unit_cost=cost, is_single=True),
        Stage(("vae",), 1, 1, is_single=True),
    )


class FailingCache(PrefixCache):
    """Says "no page left" at the calls of `take` whose number is in `failing`."""

    def __init__(self, pool: PagePool, page_size: int, failing: frozenset[int] = frozenset()):
        super().__init__(pool, page_size)
        self.failing = failing
        self.num_takes = 0

    def take(self) -> int | None:
        self.num_takes += 1
        return None if self.num_takes in self.failing else super().take()


@dataclass
class World:
    """A scheduler, its memory, and everything that happened."""

    scheduler: Scheduler
    costs: dict[str, float] = field(default_factory=dict)  # seconds per unit of cost, by component
    plans: list[Plan] = field(default_factory=list)
    ends: dict[int, Event] = field(default_factory=dict)
    said: dict[int, list[int]] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    memory: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    now: float = 0.0

    def add(self, job: Job) -> None:
        self.scheduler.add(job)
        self.jobs[job.id] = job

    def abort(self, job_id: int) -> None:
        event = self.scheduler.abort(job_id)
        if event is not None:
            self.ends[job_id] = event

    def step(self, abort_in_flight: int | None = None) -> Plan | None:
        """Schedule, run, perhaps abort while running, commit; invariants at every border."""
        plan = self.scheduler.schedule()
        self.scheduler.check_invariants()
        if plan is None:
            return None
        self.plans.append(plan)
        self._check_plan(plan)
        outcomes = [self._run(work) for work in plan.works]
        if abort_in_flight is not None:
            self.abort(abort_in_flight)
            self.scheduler.check_invariants()
            written = (p for w in plan.works for p in self.tables.get(w.job_id, []))
            assert all(self.scheduler.cache.pool.counts[p] > 0 for p in written)
        cost = sum(w.num_units * self.jobs[w.job_id].stages[w.stage].unit_cost for w in plan.works)
        seconds = cost * self.costs.get(str(plan.key[0]), 1.0)
        self.now += seconds
        for event in self.scheduler.commit(plan, outcomes, seconds):
            self._note(event)
        self.scheduler.check_invariants()
        return plan

    def drain(self, most_steps: int) -> None:
        """Run until nothing is left; more than `most_steps` is a failure. Empties the cache."""
        self.finish(most_steps)
        self.check_empty()

    def finish(self, most_steps: int) -> None:
        """`drain` without a look at the cache."""
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                break
            assert self.step() is not None, "work, but no plan"
        assert not self.scheduler.has_work, f"jobs left after {most_steps} steps"

    def check_empty(self) -> None:
        """Everything returned to zero, and every accepted job ended exactly once."""
        cache = self.scheduler.cache
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert cache.pool.num_free + cache.num_idle == cache.pool.num_pages
        cache.clear()
        assert cache.pool.num_free == cache.pool.num_pages
        assert cache.num_cached == 0
        assert set(self.ends) == set(self.jobs)

    def check_answers(self) -> None:
        """Jobs that were not aborted said what they must say."""
        for job_id, job in self.jobs.items():
            event, said = self.ends[job_id], self.said.get(job_id, [])
            if job.stages[0].is_growing:
                wanted = answer(job.tokens[: job.num_prompt], job.stages[0].limit)
                assert said == wanted[: len(said)]
                if event.finish_reason != "abort":
                    assert said == wanted
                    assert event.finish_reason == ("stop" if said[-1] == END else "length")
            if event.finish_reason != "abort":
                assert event.usage is not None
                assert event.usage.completion_tokens == len(said)

    # ---- the runner

    def _run(self, work: Work) -> Outcome:
        job = self.jobs[work.job_id]
        stage = job.stages[work.stage]
        if not stage.is_paged:
            return Outcome(work.num_units)
        table = self.tables.setdefault(job.id, [])
        assert work.first_page <= len(table), "pages the runner never heard of"
        if work.new_pages:
            table[work.first_page :] = work.new_pages
        self._write(work, table)
        seen = [self._read(table, position) for position in range(work.start + work.num_units)]
        assert seen == job.tokens[: len(seen)], "the cache holds another sequence"
        if not work.wants_output:
            return Outcome(work.num_units)
        token = next_token(seen)
        return Outcome(work.num_units, (token,), reason="stop" if token == END else None)

    def _write(self, work: Work, table: list[int]) -> None:
        size = self.scheduler.cache.page_size
        assert len(work.tokens) == work.num_units
        for offset, token in enumerate(work.tokens):
            position = work.start + offset
            page = table[position // size]
            assert self.scheduler.cache.pool.counts[page] == 1, "two users of a page being written"
            self.memory[page, position % size] = (position, token)

    def _read(self, table: list[int], position: int) -> int:
        size = self.scheduler.cache.page_size
        where, token = self.memory[table[position // size], position % size]
        assert where == position, "a page at another place than it was written for"
        return token

    # ---- checks

    def _check_plan(self, plan: Plan) -> None:
        for job_id in plan.preempted:
            self.tables.pop(job_id, None)
        budget = 0
        assert plan.works
        assert len({work.job_id for work in plan.works}) == len(plan.works)
        for work in plan.works:
            job = self.jobs[work.job_id]
            stage = job.stages[work.stage]
            assert job.is_running
            assert stage.key == plan.key
            assert work.num_units > 0
            assert work.start == job.done
            assert not stage.is_single or work.num_units == 1
            assert not stage.is_whole or (work.start, work.num_units) == (0, stage.goal)
            assert work.wants_output == (work.start + work.num_units == job.goal)
            budget += work.num_units * stage.unit_cost
        assert budget <= self.scheduler.budget_of(plan.key)

    def _note(self, event: Event) -> None:
        job_id = int(event.request_id)
        self.said.setdefault(job_id, []).extend(event.token_ids)
        if event.finish_reason is not None:
            assert job_id not in self.ends, "a job ended twice"
            self.ends[job_id] = event
            self.tables.pop(job_id, None)


def world(
    num_pages: int = 40,
    page_size: int = 4,
    *,
    step_units: int = 16,
    max_running: int = 6,
    failing: frozenset[int] = frozenset(),
    is_cached: bool = True,
) -> World:
    """An empty world."""
    cache = FailingCache(PagePool(num_pages), page_size, failing)
    cache.is_enabled = is_cached
    return World(Scheduler(cache, step_units=step_units, max_running=max_running))


def prompts(rng: random.Random, page_size: int) -> list[list[int]]:
    """A few prompts that share prefixes; whole pages long or nearly so, since edges hide there."""
    base = [rng.randrange(1, VOCAB) for _ in range(6 * page_size)]
    made = []
    for _ in range(5):
        keep = rng.choice([0, page_size - 1, page_size, 2 * page_size, 3 * page_size + 1])
        total = max(1, rng.choice([keep, keep + 1, 2 * page_size, 3 * page_size, 5]))
        tail = [rng.randrange(1, VOCAB) for _ in range(max(0, total - keep))]
        made.append((base[:keep] + tail)[:total])
    return made
