"""Promise 1 through the whole stack: SmolLM2 on the cpu backend, bit for bit.

Tokens and log-probabilities (float for float) of every request must equal those it gets alone, in
one chunk, without a prefix cache, on one thread. The laws are those of `test_engine_answers.py`;
here the arithmetic is real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from toy import Collector, ask, ask_together

from headrace.backends import select
from headrace.backends.ops import Ops
from headrace.config import EngineConfig
from headrace.engine.loop import Capacity, Engine
from headrace.formats.checkpoint import open_checkpoint
from headrace.models import Model, load_model
from headrace.types import SamplingParams, TokenLogprob

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(
    temperature=0.9, top_p=0.95, seed=7, max_tokens=6, ignore_eos=True, logprobs=2
)
BOTH = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
ALONE = EngineConfig(prefix_cache=False, max_running=16)

Answer = list[tuple[int, TokenLogprob]]


@dataclass(frozen=True)
class Stack:
    """A model on one or two threads."""

    model: Model
    ops: Ops

    @contextmanager
    def open(self, config: EngineConfig, num_pages: int = 400) -> Iterator[Engine]:
        capacity = Capacity(num_pages, min(2048, 16 * num_pages))
        it = Engine(self.model, self.ops, config, capacity=capacity, eos_token_ids=(2,))
        with it:
            yield it


@pytest.fixture(scope="module")
def stacks(model_path: Callable[[str], Path]) -> dict[int, Stack]:
    checkpoint = open_checkpoint(model_path("smollm2:135m"))
    made = {}
    for num_threads in (1, 2):
        ops = select("cpu", num_threads)
        made[num_threads] = Stack(load_model(checkpoint, ops), ops)
    return made


@pytest.fixture(scope="module")
def alone(stacks: dict[int, Stack]) -> dict[SamplingParams, list[Answer]]:
    """Every prompt by itself, on one thread."""
    found: dict[SamplingParams, list[Answer]] = {}
    with stacks[1].open(ALONE) as it:
        for params in (GREEDY, SEEDED):
            found[params] = [answer(ask(it, "a", prompt, params)) for prompt in prompts(16)]
    return found


def prompts(count: int) -> list[list[int]]:
    """Prompts of 1 to 90 ordinary tokens; the odd ones begin alike."""
    rng = np.random.default_rng(6)
    base = rng.integers(300, 40_000, 48).tolist()
    made = []
    for index in range(count):
        size = (1, 15, 16, 17, 33, 48, 64, 90)[index % 8]
        own = rng.integers(300, 40_000, 90).tolist()
        made.append(((base if index % 2 else []) + own)[:size])
    return made


def answer(sink: Collector) -> Answer:
    """Tokens and their log-probabilities."""
    events = sink.wait()
    assert events[-1].finish_reason == "length", events[-1].error
    tokens = [t for event in events for t in event.token_ids]
    return list(zip(tokens, [p for event in events for p in event.logprobs], strict=True))


def together(it: Engine, asked: Sequence[Sequence[int]], params: SamplingParams) -> list[Answer]:
    """All at once."""
    return [answer(sink) for sink in ask_together(it, asked, params)]


@BOTH
@pytest.mark.parametrize(("count", "num_threads"), [(2, 1), (5, 2), (16, 1), (16, 2)])
def test_batch_mates_and_threads_change_no_bit(
    stacks: dict[int, Stack],
    alone: dict[SamplingParams, list[Answer]],
    params: SamplingParams,
    count: int,
    num_threads: int,
) -> None:
    with stacks[num_threads].open(EngineConfig(max_running=16)) as it:
        assert together(it, prompts(count), params) == alone[params][:count]


@BOTH
@pytest.mark.parametrize("step_tokens", [1, 7, 64])
def test_chunks_change_no_bit(
    stacks: dict[int, Stack],
    alone: dict[SamplingParams, list[Answer]],
    params: SamplingParams,
    step_tokens: int,
) -> None:
    with stacks[2].open(EngineConfig(step_tokens=step_tokens, max_running=8)) as it:
        assert together(it, prompts(4), params) == alone[params][:4]


@BOTH
def test_a_prefix_hit_changes_no_bit(
    stacks: dict[int, Stack], alone: dict[SamplingParams, list[Answer]], params: SamplingParams
) -> None:
    with stacks[2].open(EngineConfig()) as it:
        for prompt, wanted in zip(prompts(8), alone[params], strict=False):
            assert answer(ask(it, "cold", prompt, params)) == wanted
            hit = ask(it, "hit", prompt, params)
            assert answer(hit) == wanted
            usage = hit.last().usage
            assert usage is not None
            assert usage.cached_tokens == (len(prompt) - 1) // 16 * 16


@BOTH
def test_preemption_changes_no_bit(stacks: dict[int, Stack], params: SamplingParams) -> None:
    params = replace(params, max_tokens=24)
    asked = [prompt[:30] for prompt in prompts(6)]
    with stacks[1].open(ALONE) as it:
        wanted = [answer(ask(it, "a", prompt, params)) for prompt in asked]
    with stacks[2].open(EngineConfig(prefix_cache=False), num_pages=10) as it:
        assert together(it, asked, params) == wanted
        assert it.stats().num_preemptions > 0
