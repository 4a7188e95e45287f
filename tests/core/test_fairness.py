"""Directed fairness: random short traces do not punish unfairness, these do."""

from __future__ import annotations

from scheduling import World, answer, image_job, make_job, token_job, world

from headrace.engine.program import Stage


def seconds_by_component(it: World) -> dict[str, float]:
    served: dict[str, float] = {}
    for plan in it.plans:
        cost = sum(w.num_units * it.jobs[w.job_id].stages[w.stage].unit_cost for w in plan.works)
        name = str(plan.key[0])
        served[name] = served.get(name, 0.0) + cost * it.costs.get(name, 1.0)
    return served


def long_prompt() -> list[int]:
    return next([t, 2, 3] for t in range(1, 200) if len(answer([t % 49 + 1, 2, 3], 80)) > 70)


def denoise(job_id: int, num_steps: int, cost: int = 1) -> Stage:
    return Stage(("dit",), num_steps, num_steps, unit_cost=cost, is_single=True)


def test_seconds_not_units_are_shared() -> None:
    """A denoise step costs a hundred decode steps of time: a chat gets a hundred turns for one."""
    it = world(num_pages=100, step_units=16, max_running=4)
    it.costs = {"llm": 0.01, "dit": 1.0}
    prompt = long_prompt()
    it.add(token_job(0, prompt, 70))
    it.add(make_job(1, denoise(1, 50)))
    while 0 not in it.ends:
        it.step()
    num_denoise = sum(plan.key == ("dit",) for plan in it.plans)
    assert 1 <= num_denoise <= 2


def test_two_busy_keys_get_equal_time() -> None:
    it = world(num_pages=100, step_units=16, max_running=4)
    it.costs = {"llm": 0.25, "dit": 1.0}
    it.add(token_job(0, long_prompt(), 70))
    it.add(make_job(1, denoise(1, 1000)))
    for _ in range(60):
        it.step()
    served = seconds_by_component(it)
    assert abs(served["llm"] - served["dit"]) <= 1.25  # one step of each


def test_idle_time_is_no_credit() -> None:
    """Images ran alone for long; a chat that comes late gets half, not everything."""
    it = world(num_pages=100, step_units=16, max_running=4)
    it.add(make_job(0, denoise(0, 1000)))
    for _ in range(200):
        it.step()
    it.add(token_job(1, long_prompt(), 70))
    before = len(it.plans)
    for _ in range(40):
        it.step()
    late = it.plans[before:]
    assert 15 <= sum(plan.key == ("dit",) for plan in late) <= 25


def test_a_blocked_key_earns_no_credit() -> None:
    """While images hold every place, chats cannot start; afterwards they get no more than half."""
    it = world(num_pages=100, step_units=16, max_running=2)
    it.add(make_job(0, denoise(0, 100)))
    it.add(make_job(1, denoise(1, 500)))
    it.step()
    it.add(token_job(2, long_prompt(), 70))
    for _ in range(100):
        it.step()
    assert 0 in it.ends
    assert all(plan.key == ("dit",) for plan in it.plans[:100])
    before = len(it.plans)
    for _ in range(40):
        it.step()
    late = it.plans[before:]
    assert 15 <= sum(plan.key == ("dit",) for plan in late) <= 25


def test_a_debt_is_not_forgotten_in_an_instant_of_idleness() -> None:
    """One long image step at a time, each its own job: still only its share of the time."""
    it = world(num_pages=100, step_units=16, max_running=4)
    it.costs = {"llm": 0.1, "dit": 1.0}
    it.add(token_job(0, long_prompt(), 70))
    job_id = 1
    while 0 not in it.ends:
        if not any(job.is_running or job.id not in it.ends for job in list(it.jobs.values())[1:]):
            it.add(make_job(job_id, denoise(job_id, 1, 8)))
            job_id += 1
        it.step()
    served = seconds_by_component(it)
    assert served["dit"] <= served["llm"] + 2 * 8.0


def test_a_debt_is_not_forgotten_when_new_keys_come() -> None:
    """Every image is followed by a short job of a key never seen before."""
    it = world(num_pages=100, step_units=16, max_running=4)
    it.costs = {"llm": 0.1, "dit": 1.0}
    it.add(token_job(0, long_prompt(), 70))
    job_id = 1
    while 0 not in it.ends:
        if all(other in it.ends for other in range(1, job_id)):
            it.add(make_job(job_id, Stage(("once", job_id), 1, 1, is_single=True)))
            it.add(make_job(job_id + 1, denoise(job_id, 1, 8)))
            job_id += 2
        it.step()
    served = seconds_by_component(it)
    assert served["dit"] <= served["llm"] + served["once"] + 2 * 8.0


def test_a_big_job_is_not_overtaken_for_ever() -> None:
    """Streams of small jobs, of its own key and another, cannot keep a big one from its pages."""
    it = world(num_pages=20, page_size=4, step_units=80, max_running=8, is_cached=False)
    small = [t for t in range(1, 50) if len(answer([t] * 12, 24)) == 12]
    for job_id in range(3):
        it.add(token_job(job_id, [small[job_id]] * 12, 4))
    it.step()
    it.add(token_job(100, list(range(1, 50)) + [9] * 20, 4))
    waited = 0
    while 100 not in it.ends:
        waited += 1
        assert waited < 40
        it.add(token_job(200 + 2 * waited, [small[waited % 20]] * 12, 4))
        limit = 14 + 5 * (waited % 3)  # of different lengths, so that they never all end at once
        other = Stage(("other",), 12, limit, is_paged=True, is_growing=True)
        it.add(make_job(201 + 2 * waited, other, tokens=[small[waited % 20]] * 12))
        it.step()
    it.drain(most_steps=2000)


def test_images_and_chats_all_end() -> None:
    it = world(num_pages=60, step_units=16, max_running=3)
    for job_id in range(12):
        it.add(image_job(job_id, 6, 8) if job_id % 2 else token_job(job_id, [job_id + 1] * 9, 9))
    it.drain(most_steps=400)
    it.check_answers()
