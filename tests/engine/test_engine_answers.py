"""One answer: whatever the batch, chunks, cache, preemption or stream, the tokens are the same.

Written against a `Stack`, so the same laws can be asked of a real model and backend: `open` starts
an engine, `expected` says what a request must answer (the toy's naive loop; a real stack would ask
an engine that runs one request at a time without a cache).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import pytest
from toy import EOS, VOCAB, Collector, Setup, ToyEngine, ToyOps, ask, ask_together, engine, expected

from headrace.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=24)
PENALISED = SamplingParams(
    temperature=0.8, seed=5, max_tokens=24, repetition_penalty=1.3, frequency_penalty=0.4
)
ALL_PARAMS = (GREEDY, SEEDED, PENALISED)


@dataclass(frozen=True)
class Stack:
    """Model and backend under test."""

    name: str = "toy"

    def open(self, setup: Setup) -> AbstractContextManager[ToyEngine]:
        return engine(setup)

    def expected(self, prompt: Sequence[int], params: SamplingParams, choice: int = 0) -> list[int]:
        return expected(prompt, params, choice)


@pytest.fixture(params=[Stack()], ids=lambda stack: stack.name)
def stack(request: pytest.FixtureRequest) -> Stack:
    made = request.param
    assert isinstance(made, Stack)
    return made


def some_prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Prompts of 1 to 90 tokens; some share whole pages."""
    rng = random.Random(seed)
    base = [rng.randrange(1, VOCAB) for _ in range(64)]
    sizes = [1, 15, 16, 17, 31, 32, 33, 48, 64, 90]
    made = []
    for index in range(count):
        keep = rng.choice([0, 0, 16, 20, 32, 48])
        size = sizes[index % len(sizes)]
        tail = [rng.randrange(1, VOCAB) for _ in range(90)]
        made.append((base[:keep] + tail)[:size])
    return made


@pytest.mark.parametrize("params", ALL_PARAMS, ids=["greedy", "seeded", "penalised"])
def test_engine_equals_the_naive_loop(stack: Stack, params: SamplingParams) -> None:
    with stack.open(Setup()) as it:
        for index, prompt in enumerate(some_prompts(10)):
            assert ask(it, str(index), prompt, params).tokens() == stack.expected(prompt, params)


@pytest.mark.parametrize("count", [2, 5, 16])
@pytest.mark.parametrize("params", ALL_PARAMS, ids=["greedy", "seeded", "penalised"])
def test_batch_of_n_equals_n_alone(stack: Stack, params: SamplingParams, count: int) -> None:
    prompts = some_prompts(count)
    with stack.open(Setup(num_pages=200, max_running=16)) as it:
        sinks = ask_together(it, prompts, params)
        answers = [sink.tokens() for sink in sinks]
    assert answers == [stack.expected(prompt, params) for prompt in prompts]


def test_requests_do_share_steps() -> None:
    ops = ToyOps()
    with engine(Setup(num_pages=200, max_running=16, ops=ops)) as it:
        for sink in ask_together(it, some_prompts(16), GREEDY):
            sink.wait()
    assert ops.largest_batch >= 15


@pytest.mark.parametrize("step_tokens", [1, 7, 64, 512])
def test_chunk_size_changes_nothing(stack: Stack, step_tokens: int) -> None:
    prompts = some_prompts(6)
    with stack.open(Setup(step_tokens=step_tokens)) as it:
        sinks = [ask(it, str(i), prompt, SEEDED) for i, prompt in enumerate(prompts)]
        answers = [sink.tokens() for sink in sinks]
    assert answers == [stack.expected(prompt, SEEDED) for prompt in prompts]


@pytest.mark.parametrize("size", [16, 17, 32, 40, 64, 65])
def test_prefix_hit_equals_cold(stack: Stack, size: int) -> None:
    prompt = (some_prompts(1, seed=4)[0] * 90)[:1] + list(range(1, 64)) + [3, 4]
    prompt = prompt[:size]
    with stack.open(Setup()) as it:
        cold = ask(it, "cold", prompt, SEEDED)
        cold.wait()
        hit = ask(it, "hit", prompt, SEEDED)
        assert hit.tokens() == cold.tokens() == stack.expected(prompt, SEEDED)
        usage = hit.last().usage
    assert usage is not None
    assert usage.cached_tokens == (size - 1) // 16 * 16


def test_multi_turn_reuses_the_answer(stack: Stack) -> None:
    params = replace(GREEDY, ignore_eos=True, max_tokens=40)
    with stack.open(Setup()) as it:
        first = ask(it, "a", [5] * 20, params).tokens()
        turn = [5] * 20 + first + [9, 9]
        second = ask(it, "b", turn, params)
        assert second.tokens() == stack.expected(turn, params)
        usage = second.last().usage
    assert usage is not None
    assert usage.cached_tokens == 48  # 59 tokens were computed: three whole pages


@pytest.mark.parametrize("params", ALL_PARAMS, ids=["greedy", "seeded", "penalised"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_equals_not(stack: Stack, params: SamplingParams, prefix_cache: bool) -> None:
    params = replace(params, ignore_eos=True, max_tokens=60)
    prompts = [p[:20] for p in some_prompts(6)]
    with stack.open(Setup(num_pages=12, max_context=100, prefix_cache=prefix_cache)) as it:
        sinks = ask_together(it, prompts, params)
        answers = [sink.tokens() for sink in sinks]
        assert it.stats().num_preemptions > 0
    assert answers == [stack.expected(prompt, params) for prompt in prompts]


def test_choices_are_independent_draws_of_one_prefill(stack: Stack) -> None:
    params = replace(SEEDED, n=5, ignore_eos=True)
    prompt = some_prompts(10)[9]
    ops = ToyOps()
    with stack.open(Setup(ops=ops)) as it:
        sink = ask(it, "n", prompt, params)
        answers = [sink.tokens(choice) for choice in range(5)]
    assert answers == [stack.expected(prompt, params, choice) for choice in range(5)]
    assert len({tuple(answer) for answer in answers}) == 5
    tail = len(prompt) - (len(prompt) - 1) // 16 * 16
    assert ops.num_tokens == len(prompt) + 4 * tail + 5 * (24 - 1)


def test_unseeded_requests_differ_and_survive_preemption() -> None:
    """The seed is drawn once per request, so recomputing changes nothing; two requests differ."""
    params = SamplingParams(temperature=3.0, max_tokens=60, ignore_eos=True)
    with engine(Setup(num_pages=12, max_context=100)) as it:
        sinks = ask_together(it, [[7, 8, 9]] * 4, params)
        answers = [tuple(sink.tokens()) for sink in sinks]
        assert it.stats().num_preemptions > 0
    assert len(set(answers)) == 4
    assert all(len(answer) == 60 for answer in answers)


# ---- ends


def test_end_token_is_reported_and_ends() -> None:
    prompt = next([p] for p in range(1, 64) if EOS in expected([p], replace(GREEDY, max_tokens=99)))
    params = replace(GREEDY, max_tokens=99)
    with engine(Setup()) as it:
        sink = ask(it, "a", prompt, params)
        assert sink.tokens()[-1] == EOS
        assert sink.last().finish_reason == "stop"
        longer = ask(it, "b", prompt, replace(params, ignore_eos=True))
        assert len(longer.tokens()) == 99
        assert longer.last().finish_reason == "length"


def test_stop_token_ids_end_and_min_tokens_holds_them_off() -> None:
    answer = expected([3], replace(GREEDY, max_tokens=30, ignore_eos=True))
    stop = answer[4]
    first = answer.index(stop)
    params = replace(GREEDY, max_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
    with engine(Setup()) as it:
        short = ask(it, "a", [3], params)
        assert short.tokens() == answer[: first + 1]
        assert short.last().finish_reason == "stop"
        held = ask(it, "b", [3], replace(params, min_tokens=first + 3))
        assert stop not in held.tokens()[: first + 3]
        assert held.tokens()[:first] == answer[:first]


def test_the_context_is_the_limit_without_max_tokens() -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    with engine(Setup(max_context=50)) as it:
        sink = ask(it, "a", [1] * 10, params)
        assert len(sink.tokens()) == 40
        assert sink.last().finish_reason == "length"


# ---- events


def test_one_event_per_token_and_usage_at_the_end() -> None:
    params = replace(GREEDY, max_tokens=8, ignore_eos=True)
    with engine(Setup()) as it:
        events = ask(it, "a", [4, 5, 6], params).wait()
    assert [len(e.token_ids) for e in events] == [1] * 8
    assert [e.finish_reason for e in events] == [None] * 7 + ["length"]
    assert all(e.usage is None for e in events[:-1])
    usage = events[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 8, 0)


def test_logprobs_come_with_each_token() -> None:
    params = replace(GREEDY, max_tokens=5, logprobs=3, ignore_eos=True)
    with engine(Setup()) as it:
        events = ask(it, "a", [4, 5, 6], params).wait()
    for event in events:
        (entry,) = event.logprobs
        assert entry.token_id == event.token_ids[0] == entry.top[0][0]
        assert len(entry.top) == 3
        assert entry.logprob == entry.top[0][1] < 0


def test_stats_add_up() -> None:
    params = replace(GREEDY, max_tokens=5, ignore_eos=True)
    with engine(Setup()) as it:
        ask(it, "a", [4] * 40, params).wait()
        ask(it, "b", [4] * 40, replace(params, n=2)).wait()
        stats = it.stats()
    assert stats.requests_finished == 2
    assert stats.generated_tokens == 15
    assert stats.prompt_tokens == 120
    assert stats.cached_tokens == 64
    assert stats.num_steps > 5
    assert stats.step_seconds > 0


def test_many_random_lives_leak_nothing_and_change_no_answer(stack: Stack) -> None:
    """Arrivals, aborts and preemptions at once; whoever was not aborted got their answer."""
    rng = random.Random(3)
    prompts = some_prompts(30)
    sinks: list[tuple[Collector, list[int], SamplingParams]] = []
    with stack.open(Setup(num_pages=16, max_context=128, step_tokens=24, max_running=5)) as it:
        for index, prompt in enumerate(prompts):
            params = replace(rng.choice(ALL_PARAMS), ignore_eos=rng.random() < 0.5)
            sinks.append((ask(it, str(index), prompt, params), prompt, params))
            if rng.random() < 0.3:
                it.abort(str(rng.randrange(index + 1)))
        for sink, prompt, params in sinks:
            wanted, said = stack.expected(prompt, params), sink.tokens()
            reason = sink.last().finish_reason
            assert said == (wanted[: len(said)] if reason == "abort" else wanted)
