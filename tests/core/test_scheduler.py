"""The scheduler's invariants on random traces, and its promises one by one."""

from __future__ import annotations

import random

import pytest
from scheduling import FailingCache, World, answer, image_job, make_job, prompts, token_job, world

from headrace.engine.program import Stage
from headrace.engine.scheduler import Outcome
from headrace.errors import ContextTooLong, InvalidRequest

NUM_TRACES = 120  # about a second; ten thousand were run once, see docs/LOG.md


def trace(seed: int) -> World:
    """A random life: arrivals of every kind, aborts at rest and in flight, a tight pool."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4])
    it = world(
        num_pages=rng.choice([8, 12, 30]) * 4 // page_size,
        page_size=page_size,
        step_units=rng.choice([8, 9, 16, 40]),
        max_running=rng.choice([1, 2, 5]),
        is_cached=rng.random() < 0.85,
    )
    pool = prompts(rng, page_size)
    capacity = it.scheduler.cache.pool.num_pages * page_size
    for job_id in range(rng.randrange(5, 25)):
        if rng.random() < 0.15:
            it.add(image_job(job_id, rng.randrange(1, 5), rng.choice([3, 8])))
        else:
            prompt = rng.choice(pool)
            it.add(token_job(job_id, prompt, rng.randrange(1, capacity - len(prompt) + 2)))
        for _ in range(rng.choice([0, 0, 1, 3])):
            victim = rng.randrange(job_id + 1) if rng.random() < 0.1 else None
            it.step(victim)
        if rng.random() < 0.1:
            it.abort(rng.randrange(job_id + 1))
            it.scheduler.check_invariants()
    it.drain(most_steps=4000)
    it.check_answers()
    return it


@pytest.mark.parametrize("seed", range(NUM_TRACES))
def test_random_traces_keep_every_invariant(seed: int) -> None:
    trace(seed)


def test_traces_reach_the_rare_paths() -> None:
    """The generator matters more than the assertions: it must preempt, evict, abort and hit."""
    worlds = [trace(seed) for seed in range(40)]
    ends = [event for it in worlds for event in it.ends.values()]
    assert sum(it.scheduler.num_preemptions for it in worlds) > 20
    assert sum(it.scheduler.cache.num_evicted for it in worlds) > 20
    assert sum(e.usage.cached_tokens > 0 for e in ends if e.usage is not None) > 20
    assert {e.finish_reason for e in ends} == {"stop", "length", "abort"}


def test_same_inputs_same_plans() -> None:
    for seed in range(10):
        assert trace(seed).plans == trace(seed).plans


@pytest.mark.parametrize("seed", [3, 5, 11])
def test_every_failing_page_allocation_is_survived(seed: int) -> None:
    total = tight_life(seed, frozenset())
    assert total > 20
    for nth in range(1, total + 1):
        tight_life(seed, frozenset({nth}))


def tight_life(seed: int, failing: frozenset[int]) -> int:
    """Chats in a tight pool; some allocations find no page. Returns how many were tried."""
    rng = random.Random(seed)
    it = world(num_pages=14, page_size=4, step_units=16, max_running=4, failing=failing)
    pool = prompts(rng, 4)
    for job_id in range(14):
        it.add(token_job(job_id, rng.choice(pool), rng.randrange(4, 30)))
        it.step()
    for _ in range(400):
        if it.scheduler.has_work:
            it.step()
    it.check_empty()
    it.check_answers()
    cache = it.scheduler.cache
    assert isinstance(cache, FailingCache)
    return cache.num_takes


def test_prefill_is_chunked_and_decodes_go_on() -> None:
    it = world(num_pages=60, step_units=8, max_running=4)
    short = next([t, 1] for t in range(1, 50) if len(answer([t, 1], 30)) > 15)
    it.add(token_job(0, short, 20))
    it.step()
    it.add(token_job(1, list(range(1, 31)), 4))
    counts = []
    while 1 not in it.said:
        plan = it.step()
        assert plan is not None
        assert [w.job_id for w in plan.works] == [0, 1]
        counts.append([w.num_units for w in plan.works])
    assert counts == [[1, 7]] * 4 + [[1, 2]]


def test_pool_exhaustion_recomputes_the_youngest_and_changes_no_answer() -> None:
    it = world(num_pages=8, page_size=4, step_units=16, max_running=4, is_cached=False)
    seeds = [p for p in range(1, 50) if len(answer([p, 2, 3], 30)) > 24][:3]
    for job_id, first in enumerate(seeds):
        it.add(token_job(job_id, [first, 2, 3], 27))
    it.step()
    it.add(token_job(3, [seeds[0], 2, 3], 27))
    it.drain(most_steps=300)
    it.check_answers()
    told = [j for plan in it.plans for j in plan.preempted]
    assert len(told) == it.scheduler.num_preemptions > 0
    assert 0 not in told, "the oldest gave way"
    assert list(it.ends) == [0, 1, 2, 3], "a later arrival overtook a preempted job"


def test_a_newcomer_leaves_each_running_job_a_page() -> None:
    """It would fit to the last page, and then be preempted at once."""
    it = world(num_pages=6, page_size=4, step_units=40, max_running=4, is_cached=False)
    first = next(p for p in range(1, 50) if len(answer([p] * 7, 12)) == 5)
    it.add(token_job(0, [first] * 7, 5))
    it.step()
    it.add(token_job(1, [2] * 16, 1))
    it.drain(most_steps=20)
    assert it.scheduler.num_preemptions == 0
    assert list(it.ends) == [0, 1]


# ---- prefixes


def test_a_shared_prompt_is_computed_once() -> None:
    """Sixteen choices at once: the first computes, the others wait and then run their tails."""
    it = world(num_pages=200, page_size=4, step_units=64, max_running=32)
    prompt = [1 + i % 40 for i in range(203)]
    for job_id in range(16):
        it.add(token_job(job_id, prompt, 2))
    it.drain(most_steps=20)
    it.check_answers()
    computed = sum(w.num_units for plan in it.plans for w in plan.works)
    tail = 203 - 50 * 4
    assert computed <= 203 + 15 * tail + 16 * 2
    cached = [it.ends[j].usage.cached_tokens for j in range(16)]  # type: ignore[union-attr]
    assert cached == [0] + [200] * 15


def test_who_waits_for_a_prefix_keeps_the_place_and_stops_nobody() -> None:
    it = world(num_pages=100, page_size=4, step_units=64, max_running=2)
    shared = [1 + i % 40 for i in range(21)]
    long = next(t for t in range(1, 50) if len(answer([t] * 9, 30)) > 15)
    it.add(token_job(0, shared, 1))
    it.add(token_job(1, shared, 1))
    for job_id in (2, 3, 4):
        it.add(token_job(job_id, [long] * 9, 20))
    first, second = it.step(), it.step()
    assert first is not None
    assert second is not None
    assert [w.job_id for w in first.works] == [0, 2]
    assert [w.job_id for w in second.works] == [2, 1]
    it.drain(most_steps=100)


def test_waiting_for_a_prefix_ends_when_its_owner_is_aborted() -> None:
    it = world(num_pages=100, page_size=4, step_units=8, max_running=4)
    prompt = [1 + i % 40 for i in range(41)]
    it.add(token_job(0, prompt, 2))
    it.add(token_job(1, prompt, 2))
    first = it.step(abort_in_flight=0)
    assert first is not None
    assert [w.job_id for w in first.works] == [0]
    second = it.step()
    assert second is not None
    assert [w.job_id for w in second.works] == [1]
    it.drain(most_steps=10)
    it.check_answers()


def test_whole_prompt_in_the_cache_still_gives_logits() -> None:
    it = world(num_pages=20, page_size=4)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12]
    it.add(token_job(0, prompt, 1))
    it.finish(10)
    it.add(token_job(1, prompt, 1))
    it.drain(most_steps=3)
    usage = it.ends[1].usage
    assert usage is not None
    assert usage.cached_tokens == 4
    assert it.said[0] == it.said[1]


def test_no_cache_no_hits() -> None:
    it = world(is_cached=False)
    for job_id in range(3):
        it.add(token_job(job_id, [5, 6, 7, 8, 9, 10, 11, 12], 2))
    it.drain(most_steps=20)
    assert all(e.usage is not None and e.usage.cached_tokens == 0 for e in it.ends.values())


# ---- refusals and aborts


def test_what_never_fits_is_refused_with_numbers() -> None:
    it = world(num_pages=4, page_size=4, step_units=8)
    with pytest.raises(ContextTooLong, match=r"18 tokens need 5 KV pages of 4, the pool has 4"):
        it.scheduler.add(token_job(0, [1] * 10, 8))
    it.add(token_job(1, [1] * 10, 7))  # the last token is never computed: 16 fit
    it.drain(most_steps=20)


def test_a_unit_above_the_budget_is_refused() -> None:
    it = world(step_units=8)
    with pytest.raises(InvalidRequest, match="costs 9 units, a step holds 8"):
        it.scheduler.add(image_job(0, 4, 9))
    with pytest.raises(InvalidRequest, match="costs 9 units, a step holds 8"):
        it.scheduler.add(make_job(0, Stage(("bert",), 9, 9, is_whole=True)))


def test_abort_of_the_unknown_and_the_ended_is_nothing() -> None:
    it = world()
    assert it.scheduler.abort(7) is None
    it.add(token_job(0, [1], 1))
    it.drain(most_steps=3)
    assert it.scheduler.abort(0) is None


def test_pages_of_a_job_aborted_in_flight_wait_for_the_commit() -> None:
    it = world(num_pages=10, page_size=4)
    it.add(token_job(0, [1] * 12, 5))
    plan = it.scheduler.schedule()
    assert plan is not None
    free = it.scheduler.cache.pool.num_free
    event = it.scheduler.abort(0)
    assert event is not None
    assert event.finish_reason == "abort"
    assert it.scheduler.cache.pool.num_free == free, "a page was freed under a running forward"
    it.scheduler.commit(plan, [Outcome(12, (3,))], 0.1)
    assert it.scheduler.cache.pool.num_free == 10


def test_a_failed_step_ends_its_jobs_only() -> None:
    it = world(max_running=1)
    it.add(token_job(0, [1] * 9, 5))
    it.add(token_job(1, [2] * 9, 5))
    plan = it.scheduler.schedule()
    assert plan is not None
    events = it.scheduler.fail(plan, "boom", 0.1)
    assert [(e.request_id, e.finish_reason, e.error) for e in events] == [("0", "error", "boom")]
    assert it.scheduler.cache.num_cached == 0, "pages of unknown contents were published"
    it.ends[0] = events[0]
    it.drain(most_steps=10)
    assert it.said[1] == answer([2] * 9, 14)
