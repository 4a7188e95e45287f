"""Who moves, how far, on which pages: continuous batching without arrays or clock. PURE.

The same calls give the same plans: no time, randomness, input or output. `schedule` decides and
reserves in one call; `commit` moves the cursors when the forward is done; `abort` is legal at any
moment, and pages that a running forward may write are kept until its commit. One plan is one
forward of one component (`StageKey`); keys take turns by measured seconds, handed in by the loop
(start-time fair queuing, Goyal et al. 1996: idle or blocked time is not credit).

Order inside a key is first come, first served: running jobs in order of admission, then waiting
ones. When pages run out, the job admitted last gives way and is recomputed later. A waiting job
whose next page a running one is just computing waits for it, so a shared prompt is computed once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.engine.prefix import Key, Node, PrefixCache
from headrace.engine.program import Job, StageKey
from headrace.errors import ContextTooLong, InvalidRequest
from headrace.types import Event, FinishReason, TokenLogprob


class Work(NamedTuple):
    """One job's share of a step: units `start : start + num_units`, token ids for token stages.

    `new_pages` go to the job's page table from index `first_page` on; the runner keeps the rest.
    `wants_output`: the last unit ends what is known, so the update rule must produce.
    """

    job_id: int
    stage: int
    start: int
    num_units: int
    tokens: tuple[int, ...]
    first_page: int
    new_pages: tuple[int, ...]
    wants_output: bool


class Plan(NamedTuple):
    """One forward of one component. `preempted` jobs lost their pages since the last plan."""

    key: StageKey
    works: tuple[Work, ...]
    preempted: tuple[int, ...] = ()


class Outcome(NamedTuple):
    """What the update rule did for one work: units accepted and appended, perhaps the end."""

    accepted: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    reason: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class _Lane:
    """Jobs of one key, and the seconds the key has been served."""

    key: StageKey
    budget: int
    served: float = 0.0
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    blocked: Job | None = None  # found no room for its pages when last tried

    @property
    def is_active(self) -> bool:
        return bool(self.waiting or self.running)

    def blocks(self, job: Job) -> bool:
        """True when the first job here is older than `job` and waits for pages."""
        first = self.waiting[0] if self.waiting else None
        return first is not None and first is self.blocked and first.id < job.id


@dataclass(slots=True, eq=False)
class _Draft:
    """A plan being filled."""

    left: int
    works: list[Work] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)


class Scheduler:
    """Moves jobs through their stages under a unit budget per step.

    `step_units` is the budget of a step; `budgets` overrides it for single keys. All pages come
    from `cache`, which the scheduler owns from here on.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        step_units: int,
        max_running: int,
        budgets: Mapping[StageKey, int] | None = None,
    ) -> None:
        assert step_units > 0, "a step needs a budget"
        assert max_running > 0, "a step needs a job"
        self.cache = cache
        self.num_running = 0
        self.num_waiting = 0
        self.num_preemptions = 0
        self._step_units = step_units
        self._max_running = max_running
        self._budgets = dict(budgets or {})
        self._jobs: dict[int, Job] = {}
        self._lanes: dict[StageKey, _Lane] = {}
        self._virtual = 0.0  # served seconds of the key chosen last: where newcomers start
        self._flying: Plan | None = None
        self._limbo: list[list[int]] = []  # pages of aborted jobs that the flying plan may write
        self._preempted: list[int] = []
        self._admissions = 0
        self._num_paged = 0  # running jobs that hold pages

    @property
    def has_work(self) -> bool:
        """True while any accepted job has not ended."""
        return bool(self._jobs)

    def budget_of(self, key: StageKey) -> int:
        """Units a step of `key` may cost."""
        return self._budgets.get(key, self._step_units)

    # ---- inputs

    def check(self, job: Job) -> None:
        """Refuse what can never fit, however empty the engine is. Reads constants only.

        **Raises** `ContextTooLong`, `InvalidRequest`.
        """
        size, total = self.cache.page_size, self.cache.pool.num_pages
        for stage in job.stages:
            need = -(-self._most_units(stage.limit, stage.is_growing) // size)
            if stage.is_paged and need > total:
                raise ContextTooLong(
                    f"{stage.limit} tokens need {need} KV pages of {size}, the pool has {total}; "
                    "ask for fewer tokens or give the engine more KV memory"
                )
            budget = self.budget_of(stage.key)
            cost = stage.unit_cost * (stage.goal if stage.is_whole else 1)
            if cost > budget:
                raise InvalidRequest(
                    f"one step of {stage.key} costs {cost} units, a step holds {budget}"
                )

    def add(self, job: Job) -> None:
        """Queue a job. **Raises** what `check` raises."""
        self.check(job)
        assert job.id not in self._jobs, f"job {job.id} added twice"
        self._jobs[job.id] = job
        self._enter_stage(job, at=0)
        self._lane(job).waiting.append(job)
        self.num_waiting += 1

    def abort(
        self, job_id: int, reason: FinishReason = "abort", error: str | None = None
    ) -> Event | None:
        """End a job now; its pages are free once no running forward can write them."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return None
        lane = self._lanes[job.stage.key]
        if job.is_running:
            self._stop_running(lane, job)
        else:
            lane.waiting.remove(job)
            self.num_waiting -= 1
        if self._flying is not None and any(w.job_id == job_id for w in self._flying.works):
            self._limbo.append(job.pages)
            job.pages = []
        else:
            self._release(job)
        return job.event(reason, error=error)

    # ---- one step

    def schedule(self) -> Plan | None:
        """The next forward, with its pages reserved; None when no job can move."""
        assert self._flying is None, "schedule before the last plan was committed"
        skipped: list[_Lane] = []
        for lane in self._turns():
            draft = self._fill(lane)
            if draft.works:
                self._virtual = max(self._virtual, lane.served)
                for other in skipped:  # a key that could not move earns no credit
                    other.served = max(other.served, self._virtual)
                self._flying = Plan(lane.key, tuple(draft.works), tuple(self._preempted))
                self._preempted.clear()
                return self._flying
            skipped.append(lane)
        return None

    def commit(self, plan: Plan, outcomes: Sequence[Outcome], seconds: float) -> list[Event]:
        """Move the cursors by what the forward did, publish full pages, end what ended.

        `outcomes` are in the order of `plan.works`; `seconds` is what the step took.
        """
        assert plan is self._flying, "commit of a plan that is not running"
        self._flying = None
        self._lanes[plan.key].served += seconds
        for pages in self._limbo:
            self.cache.release(pages)
        self._limbo.clear()
        events = []
        for work, outcome in zip(plan.works, outcomes, strict=True):
            job = self._jobs.get(work.job_id)
            if job is not None:  # else aborted while the forward ran
                event = self._advance(job, work, outcome)
                if event is not None:
                    events.append(event)
        return events

    def fail(self, plan: Plan, error: str, seconds: float) -> list[Event]:
        """The forward raised: end its jobs with `error`, publish nothing."""
        return self.commit(
            plan, [Outcome(0, reason="error", error=error)] * len(plan.works), seconds
        )

    # ---- choosing

    def _turns(self) -> list[_Lane]:
        active = [lane for lane in self._lanes.values() if lane.is_active]
        if len(active) > 1:
            active.sort(key=lambda lane: lane.served)  # stable: ties in order of arrival
        return active

    def _fill(self, lane: _Lane) -> _Draft:
        draft = _Draft(lane.budget)
        for job in tuple(lane.running):
            if not job.is_running:
                continue  # preempted below by an older job
            count = self._count(job, draft.left)
            if count and self._reserve_or_preempt(job, job.done + count, draft):
                self._plan_work(job, count, draft)
        if lane.waiting:
            self._admit(lane, draft)
        return draft

    def _admit(self, lane: _Lane, draft: _Draft) -> None:
        coming = self._coming(draft.jobs)
        deferred: list[Job] = []
        while lane.waiting and draft.left > 0 and self.num_running < self._max_running:
            job = lane.waiting[0]
            if job.stage.is_paged and self._find_prefix(job, coming):
                deferred.append(lane.waiting.popleft())
                continue
            count = self._count(job, draft.left)
            if count == 0 or not self._has_room(lane, job, count):
                self._release(job)
                break
            lane.waiting.popleft()
            self._start_running(lane, job)
            self._plan_work(job, count, draft)
            coming.update(self._coming([job]))
        lane.waiting.extendleft(reversed(deferred))

    def _count(self, job: Job, left: int) -> int:
        stage, want = job.stage, job.goal - job.done
        if stage.is_single:
            want = 1
        if stage.is_whole:
            return want if want * stage.unit_cost <= left else 0
        return min(want, left // stage.unit_cost)

    def _plan_work(self, job: Job, count: int, draft: _Draft) -> None:
        start, end, first_page = job.done, job.done + count, job.num_sent
        new_pages: tuple[int, ...] = ()
        if first_page < len(job.pages):
            new_pages = tuple(job.pages[first_page:])
            job.num_sent = len(job.pages)
        tokens = tuple(job.tokens[start:end])
        wants = end == job.goal
        draft.works.append(Work(job.id, job.at, start, count, tokens, first_page, new_pages, wants))
        draft.jobs.append(job)
        draft.left -= count * job.stage.unit_cost

    # ---- prefixes

    def _find_prefix(self, job: Job, coming: Mapping[tuple[Node, Key], Job]) -> bool:
        """Take the cached prefix, or return True when it is worth waiting for more of it.

        The last token is never taken from the cache: its forward gives the first logits. Waiting is
        bounded, because the job waited for moves in this very step.
        """
        cache, size = self.cache, self.cache.page_size
        node, pages = (
            cache.match(job.tokens, job.goal - 1) if cache.is_enabled else (cache.root, [])
        )
        start = len(pages) * size
        if coming and start + size < job.goal:
            owner = coming.get((node, tuple(job.tokens[start : start + size])))
            if owner is not None:
                return True
        cache.share(pages)
        job.pages, job.node, job.done = pages, node, start
        job.num_published, job.num_sent = len(pages), 0
        return False

    def _coming(self, jobs: Sequence[Job]) -> dict[tuple[Node, Key], Job]:
        """The page each of `jobs` will publish next, if all its tokens are known."""
        size, coming = self.cache.page_size, {}
        for job in jobs:
            end = (job.num_published + 1) * size
            if self.cache.is_enabled and job.node is not None and end <= job.goal:
                coming[job.node, tuple(job.tokens[end - size : end])] = job
        return coming

    def _publish(self, job: Job) -> None:
        """Offer the pages that `done` has passed; where the tree has one already, use that."""
        size = self.cache.page_size
        while (job.num_published + 1) * size <= job.done:
            assert job.node is not None
            index = job.num_published
            key = tuple(job.tokens[index * size : (index + 1) * size])
            job.node = self.cache.publish(job.node, key, job.pages[index])
            if job.node.page != job.pages[index]:
                job.pages[index] = job.node.page
                job.num_sent = min(job.num_sent, index)
            job.num_published = index + 1

    # ---- pages

    def _reserve(self, job: Job, num_units: int) -> bool:
        if not job.stage.is_paged:
            return True
        need = -(-num_units // self.cache.page_size) - len(job.pages)
        for _ in range(need):
            page = self.cache.take()
            if page is None:
                return False
            job.pages.append(page)
        return True

    def _has_room(self, lane: _Lane, job: Job, count: int) -> bool:
        """Reserve for admission. Beside running jobs, all that is known of the newcomer and one
        page for each of them must fit: otherwise it would soon be preempted. Nobody overtakes an
        older job that found no room, so the running ones end and it gets all it needs."""
        if not job.stage.is_paged:
            return True
        if any(other.blocks(job) for other in self._lanes.values() if other is not lane):
            return False
        need = -(-job.goal // self.cache.page_size) - len(job.pages)
        is_tight = need + self._num_paged > self.cache.num_available
        has_room = not (self._num_paged and is_tight) and self._reserve(job, job.done + count)
        lane.blocked = None if has_room else job
        return has_room

    def _reserve_or_preempt(self, job: Job, num_units: int, draft: _Draft) -> bool:
        while not self._reserve(job, num_units):
            victim = self._victim(draft) or job
            self._preempt(victim)
            if victim is job:
                return False
        return True

    def _victim(self, draft: _Draft) -> Job | None:
        """The paged job admitted last that is not in the plan already."""
        planned = {job.id for job in draft.jobs}
        running = (job for lane in self._lanes.values() for job in lane.running)
        candidates = [j for j in running if j.stage.is_paged and j.id not in planned]
        return max(candidates, key=lambda j: j.admission, default=None)

    def _preempt(self, job: Job) -> None:
        lane = self._lanes[job.stage.key]
        self._stop_running(lane, job)
        self._release(job)
        lane.waiting.appendleft(job)
        self.num_waiting += 1
        self.num_preemptions += 1
        self._preempted.append(job.id)

    def _release(self, job: Job) -> None:
        self.cache.release(job.pages)
        job.pages, job.node = [], None
        job.done = job.num_sent = job.num_published = 0

    # ---- moving between queues

    def _start_running(self, lane: _Lane, job: Job) -> None:
        self._admissions += 1
        job.admission = self._admissions
        job.is_running = True
        if job.num_cached < 0:
            job.num_cached = job.done
        lane.running.append(job)
        self.num_running += 1
        self.num_waiting -= 1
        self._num_paged += job.stage.is_paged

    def _stop_running(self, lane: _Lane, job: Job) -> None:
        lane.running.remove(job)
        job.is_running = False
        self.num_running -= 1
        self._num_paged -= job.stage.is_paged

    def _enter_stage(self, job: Job, at: int) -> None:
        job.at, job.stage = at, job.stages[at]
        job.done, job.goal = 0, job.stage.goal
        job.node = None

    def _lane(self, job: Job) -> _Lane:
        key = job.stage.key
        lane = self._lanes.get(key)
        if lane is None:
            self._forget_lanes()
            lane = _Lane(key, self.budget_of(key))
            self._lanes[key] = lane
        if not lane.is_active:  # a key that was idle may not cash in the time it did not use
            lane.served = max(lane.served, self._virtual)
        return lane

    def _forget_lanes(self) -> None:
        """Idle keys that owe nothing are as good as new ones (keys may carry shapes: many)."""
        flying = self._flying.key if self._flying is not None else None
        for key, lane in list(self._lanes.items()):
            if not lane.is_active and lane.served <= self._virtual and key != flying:
                del self._lanes[key]

    # ---- the end of a work

    def _advance(self, job: Job, work: Work, outcome: Outcome) -> Event | None:
        assert outcome.accepted <= work.num_units, "more units accepted than planned"
        stage, tokens, reason = job.stage, outcome.tokens, outcome.reason
        job.done += outcome.accepted
        if tokens:
            job.tokens.extend(tokens)
            job.goal += len(tokens)
        if stage.is_paged and self.cache.is_enabled and job.done > 0:
            self._publish(job)
        if reason is None and stage.is_growing and job.goal >= stage.limit:
            reason = "length"
        if reason is not None or job.done == job.goal:
            reason = self._end_stage(job, reason)
        if not tokens and reason is None:
            return None
        usage = None if reason is None else job.usage()
        return Event(
            job.request_id, job.index, tokens, outcome.logprobs, reason, usage, outcome.error
        )

    def _end_stage(self, job: Job, reason: FinishReason | None) -> FinishReason | None:
        """Release what the stage held; the job waits for its next stage or is over."""
        self._stop_running(self._lanes[job.stage.key], job)
        self._release(job)
        if reason != "error" and job.at + 1 < len(job.stages):
            self._enter_stage(job, job.at + 1)
            self._lane(job).waiting.appendleft(job)
            self.num_waiting += 1
            return None
        del self._jobs[job.id]
        return reason or "stop"

    # ---- invariants

    @staticmethod
    def _most_units(limit: int, is_growing: bool) -> int:
        return limit - 1 if is_growing else limit  # the last token drawn is never computed

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls. O(jobs + pages)."""
        jobs = self._jobs.values()
        self.cache.check([*(job.pages for job in jobs), *self._limbo])
        running = [job for lane in self._lanes.values() for job in lane.running]
        waiting = [job for lane in self._lanes.values() for job in lane.waiting]
        assert len(running) == self.num_running <= self._max_running
        assert len(waiting) == self.num_waiting
        assert {j.id for j in (*running, *waiting)} == set(self._jobs)
        assert len(running) + len(waiting) == len(self._jobs)
        assert all(job.is_running for job in running)
        assert not any(job.is_running or job.pages for job in waiting)
        assert not self._limbo or self._flying is not None
        for job in jobs:
            self._check_path(job)

    def _check_path(self, job: Job) -> None:
        assert 0 <= job.done <= job.goal
        assert job.num_sent <= len(job.pages)
        node, size = job.node, self.cache.page_size
        for index in range(job.num_published - 1, -1, -1):
            assert node is not None
            assert node.page == job.pages[index]
            assert node.key == tuple(job.tokens[index * size : (index + 1) * size])
            node = node.parent
        unpublished = job.pages[job.num_published :]
        counts = self.cache.pool.counts
        assert all(counts[page] == 1 for page in unpublished), "two writers of a page"
