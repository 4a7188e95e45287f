"""The sampler against its documented formula, written again here in plain float64 Python.

`oracle` follows the order in `engine/sampler.py` one candidate at a time. With the same uniform
number both must choose the same token; chi-square tests show that the numbers are uniform and the
choices have the right frequencies.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.engine.sampler import (
    DrawResult,
    History,
    draw,
    draw_rule,
    splitmix64,
    stream_of,
    uniform,
)
from headrace.types import SamplingParams

# Chi-square above this would happen by chance once in 10^6 runs (Wilson-Hilferty); seeds are fixed.
UNLUCKY = 4.75

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """A situation to draw in."""

    params: SamplingParams
    prompt: tuple[int, ...] = (1, 2)
    answer: tuple[int, ...] = ()
    ends: frozenset[int] = field(default_factory=frozenset)


def drawn(logits: Logits, case: Case, position: int | None = None, seed: int = 9) -> DrawResult:
    """The sampler's answer."""
    rule = draw_rule(case.params, seed, 0, case.ends, len(case.prompt))
    history = History(case.prompt)
    for token in case.answer:
        history.push(token)
    where = len(case.prompt) + len(case.answer) if position is None else position
    return draw(logits, rule, where, history)


def oracle(logits: Logits, case: Case) -> dict[int, float]:
    """Probabilities by token id, straight from the documented order."""
    params = case.params
    x = {i: float(v) for i, v in enumerate(logits)}
    for token, bias in params.logit_bias:
        x[token] += bias
    for token in set(case.prompt) | set(case.answer):
        penalty = params.repetition_penalty
        x[token] = x[token] * penalty if x[token] <= 0 else x[token] / penalty
    for token, count in Counter(case.answer).items():
        x[token] -= count * params.frequency_penalty + params.presence_penalty
    if len(case.answer) < params.min_tokens:
        x = {i: v for i, v in x.items() if i not in case.ends}
    if params.temperature < 1e-5:
        return {max(x, key=lambda i: (x[i], -i)): 1.0}
    for stage in (o_top_n_sigma, o_top_k, o_typical, o_top_p, o_min_p):
        x = stage(x, params)
    return o_softmax(x, params.temperature)


def o_softmax(x: dict[int, float], temperature: float = 1.0) -> dict[int, float]:
    peak = max(x.values())
    weights = {i: math.exp((v - peak) / temperature) for i, v in x.items()}
    total = math.fsum(weights.values())
    return {i: w / total for i, w in weights.items()}


def o_top_n_sigma(x: dict[int, float], params: SamplingParams) -> dict[int, float]:
    if params.top_n_sigma <= 0:
        return x
    mean = math.fsum(x.values()) / len(x)
    sigma = math.sqrt(math.fsum((v - mean) ** 2 for v in x.values()) / len(x))
    floor = max(x.values()) - params.top_n_sigma * sigma
    return {i: v for i, v in x.items() if v >= floor}


def o_top_k(x: dict[int, float], params: SamplingParams) -> dict[int, float]:
    if params.top_k <= 0:
        return x
    best = sorted(x, key=lambda i: (-x[i], i))[: params.top_k]
    return {i: x[i] for i in sorted(best)}


def o_typical(x: dict[int, float], params: SamplingParams) -> dict[int, float]:
    if params.typical_p >= 1:
        return x
    p = o_softmax(x)
    entropy = -math.fsum(v * math.log(v) for v in p.values() if v > 0)
    order = sorted(p, key=lambda i: (abs(-math.log(p[i]) - entropy), i))
    return {i: x[i] for i in sorted(o_prefix(order, p, params.typical_p, is_strict=True))}


def o_top_p(x: dict[int, float], params: SamplingParams) -> dict[int, float]:
    if params.top_p >= 1:
        return x
    p = o_softmax(x)
    order = sorted(p, key=lambda i: (-p[i], i))
    return {i: x[i] for i in sorted(o_prefix(order, p, params.top_p, is_strict=False))}


def o_prefix(order: list[int], p: dict[int, float], limit: float, *, is_strict: bool) -> list[int]:
    mass, kept = 0.0, []
    for i in order:
        kept.append(i)
        mass += p[i]
        if mass > limit or (mass == limit and not is_strict):
            break
    return kept


def o_min_p(x: dict[int, float], params: SamplingParams) -> dict[int, float]:
    if params.min_p <= 0:
        return x
    p = o_softmax(x)
    floor = params.min_p * max(p.values()) * (1 - 1e-12)  # the product rounds; p_max itself counts
    return {i: x[i] for i in x if p[i] >= floor}


def pick(p: dict[int, float], u: float) -> int:
    """Inverse of the cumulative distribution, by token id."""
    mass = 0.0
    for i in sorted(p):
        mass += p[i]
        if u < mass:
            return i
    return max(p)


# ---- random numbers


def test_splitmix64_published_vectors() -> None:
    """First outputs for seed 1234567, as listed for this generator on Rosetta Code."""
    wanted = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [splitmix64(1234567, i) for i in range(5)] == wanted


def chi_square_z(counts: list[int], p: list[float]) -> float:
    """Wilson-Hilferty: about standard normal if counts were drawn from p."""
    total, freedom = sum(counts), len(p) - 1
    chi = sum((c - total * q) ** 2 / (total * q) for c, q in zip(counts, p, strict=True))
    root: float = (chi / freedom) ** (1 / 3)
    return (root - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize("axis", ["position", "seed", "choice"])
def test_numbers_are_uniform_along_every_axis(axis: str) -> None:
    numbers = []
    for i in range(20_000):
        seed, choice, position = (
            i if name == axis else 3 for name in ("seed", "choice", "position")
        )
        numbers.append(uniform(stream_of(seed, choice), position))
    assert all(0.0 <= u < 1.0 for u in numbers)
    assert len(set(numbers)) == len(numbers)
    cells = Counter(int(u * 64) for u in numbers)
    assert chi_square_z([cells[c] for c in range(64)], [1 / 64] * 64) < UNLUCKY
    pairs = Counter((int(a * 8), int(b * 8)) for a, b in itertools.pairwise(numbers))
    grid = [pairs[a, b] for a in range(8) for b in range(8)]
    assert chi_square_z(grid, [1 / 64] * 64) < UNLUCKY


def test_streams_differ_by_seed_and_choice_and_take_any_seed() -> None:
    seeds = (0, 1, -1, 2**64 - 1, -(2**63), 2**63)
    streams = {stream_of(seed, choice) for seed in seeds for choice in range(8)}
    assert len(streams) == 8 * len({s % 2**64 for s in seeds})


# ---- against the oracle

SAMPLED: dict[str, SamplingParams] = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=4.0),
    "top_k": SamplingParams(top_k=5),
    "top_k_1": SamplingParams(top_k=1),
    "top_p": SamplingParams(top_p=0.7),
    "top_p_0": SamplingParams(top_p=0.0),
    "min_p": SamplingParams(min_p=0.2),
    "min_p_1": SamplingParams(min_p=1.0),
    "typical": SamplingParams(typical_p=0.6),
    "typical_0": SamplingParams(typical_p=0.0),
    "sigma": SamplingParams(top_n_sigma=1.0),
    "all": SamplingParams(
        temperature=0.8, top_k=12, top_p=0.9, min_p=0.05, typical_p=0.95, top_n_sigma=2.0
    ),
    "repetition": SamplingParams(repetition_penalty=1.5),
    "reward": SamplingParams(repetition_penalty=0.7, presence_penalty=-1.0),
    "presence": SamplingParams(presence_penalty=2.0),
    "frequency": SamplingParams(frequency_penalty=1.0),
    "bias": SamplingParams(logit_bias=((3, 4.0), (5, -100.0), (7, 1.5))),
    "bias_twice": SamplingParams(logit_bias=((3, 2.0), (3, 2.0))),
    "min_tokens": SamplingParams(min_tokens=9),
    "greedy": SamplingParams(temperature=0.0),
    "greedy_penalised": SamplingParams(temperature=0.0, repetition_penalty=2.0),
    "nearly_zero": SamplingParams(temperature=9e-6),
}
CASES = {
    name: Case(params, (1, 2, 3), (3, 4, 4, 5), frozenset({6, 8}))
    for name, params in SAMPLED.items()
}


@pytest.mark.parametrize("size", [10, 300, 5000])
@pytest.mark.parametrize("name", CASES)
def test_draws_equal_the_oracle(name: str, size: int) -> None:
    case = CASES[name]
    rng = np.random.default_rng(size)
    for trial in range(12 if size < 1000 else 3):
        logits = rng.normal(size=size).astype(np.float32) * np.float32(3)
        p = oracle(logits, case)
        for seed in range(20 if size < 1000 else 8):
            u = uniform(stream_of(seed, 0), len(case.prompt) + len(case.answer))
            result = drawn(logits, case, seed=seed)
            assert result.error is None
            assert result.token_id == pick(p, u), (trial, seed)


@pytest.mark.parametrize("name", ["plain", "top_p", "typical", "min_p", "top_k", "all", "hot"])
def test_large_vocabularies_take_the_filtered_paths(name: str) -> None:
    """49,152 tokens, peaked as a language model's are: pre-filters must not change the set."""
    case = CASES[name]
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=49_152) * 3).astype(np.float32)
    logits[rng.integers(0, 49_152, 20)] += np.float32(9)
    p = oracle(logits, case)
    for seed in range(30):
        u = uniform(stream_of(seed, 0), len(case.prompt) + len(case.answer))
        assert drawn(logits, case, seed=seed).token_id == pick(p, u)


@pytest.mark.parametrize("name", ["top_p", "typical", "typical_0", "all"])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.5, 6.0])
def test_flat_and_steep_rows_take_the_sliced_path(name: str, spread: float) -> None:
    """Many survivors: only one slice of them is sorted, with ties across its edges."""
    case = CASES[name]
    rng = np.random.default_rng(8)
    logits = np.round(rng.normal(size=20_001) * spread, 2).astype(np.float32)
    p = oracle(logits, case)
    for seed in range(20):
        u = uniform(stream_of(seed, 0), len(case.prompt) + len(case.answer))
        assert drawn(logits, case, seed=seed).token_id == pick(p, u)


@pytest.mark.parametrize("name", ["plain", "cold", "top_k", "top_p", "typical", "all", "frequency"])
def test_frequencies_match(name: str) -> None:
    case, size, num_draws = CASES[name], 10, 6000
    logits = np.linspace(-1.0, 2.0, size).astype(np.float32)[::-1].copy()
    p = oracle(logits, case)
    rule = draw_rule(case.params, 77, 0, case.ends, len(case.prompt))
    history = History(case.prompt)
    for token in case.answer:
        history.push(token)
    found = Counter(draw(logits, rule, i, history).token_id for i in range(num_draws))
    assert set(found) <= set(p)
    alive = [i for i in p if p[i] * num_draws >= 5]
    if len(alive) > 1:
        rest = 1 - math.fsum(p[i] for i in alive)
        counts, shares = [found[i] for i in alive], [p[i] for i in alive]
        if rest > 1e-9:
            counts.append(num_draws - sum(counts))
            shares.append(rest)
        assert chi_square_z(counts, shares) < UNLUCKY


# ---- edges


def row(*values: float) -> Logits:
    return np.array(values, dtype=np.float32)


def test_ties_go_to_the_lowest_id() -> None:
    flat = row(1, 3, 3, 3, 0)
    assert drawn(flat, Case(SamplingParams(temperature=0.0))).token_id == 1
    for params in (SamplingParams(top_k=1), SamplingParams(top_p=0.0)):
        assert {drawn(flat, Case(params), seed=s).token_id for s in range(20)} == {1}
    two = {drawn(flat, Case(SamplingParams(top_k=2)), seed=s).token_id for s in range(40)}
    assert two == {1, 2}


def test_top_p_keeps_the_token_that_reaches_the_mass() -> None:
    quarters = row(0, 0, 0, 0)
    half = {drawn(quarters, Case(SamplingParams(top_p=0.5)), seed=s).token_id for s in range(60)}
    assert half == {0, 1}
    more = {drawn(quarters, Case(SamplingParams(top_p=0.51)), seed=s).token_id for s in range(60)}
    assert more == {0, 1, 2}


def test_typical_p_needs_more_than_its_mass() -> None:
    quarters = row(0, 0, 0, 0)
    kept = {
        drawn(quarters, Case(SamplingParams(typical_p=0.5)), seed=s).token_id for s in range(60)
    }
    assert kept == {0, 1, 2}


def test_repetition_counts_the_prompt_presence_does_not() -> None:
    logits = row(2.0, 2.1)
    greedy = SamplingParams(temperature=0.0)
    prompt, answer = Case(greedy, prompt=(1,)), Case(greedy, prompt=(0,), answer=(1,))
    assert drawn(logits, prompt).token_id == 1
    for params, in_prompt, in_answer in (
        (SamplingParams(temperature=0.0, repetition_penalty=1.2), 0, 1),
        (SamplingParams(temperature=0.0, presence_penalty=0.5), 1, 0),
        (SamplingParams(temperature=0.0, frequency_penalty=0.5), 1, 0),
    ):
        assert drawn(logits, Case(params, prompt.prompt)).token_id == in_prompt
        assert drawn(logits, Case(params, answer.prompt, answer.answer)).token_id == in_answer


def test_history_counts_over_many_tokens() -> None:
    """More distinct tokens than its first buffers hold."""
    prompt, answer = tuple(range(0, 300, 3)), tuple(i % 170 for i in range(400))
    history = History(prompt)
    for token in answer:
        history.push(token)
    ids, counts = history.answered
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == Counter(answer)
    assert sorted(history.seen.tolist()) == sorted(set(prompt) | set(answer))


def test_frequency_grows_with_the_count() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=0.5)
    logits = row(2.0, 3.2)
    picks = [drawn(logits, Case(params, (0,), (1,) * count)).token_id for count in range(5)]
    assert picks == [1, 1, 1, 0, 0]


def test_min_tokens_forbids_ends_until_enough() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2)
    logits = row(5.0, 1.0, 0.0)
    ends = frozenset({0})
    picks = [drawn(logits, Case(params, (2,), (1,) * n, ends)).token_id for n in range(4)]
    assert picks == [1, 1, 0, 0]


def test_min_tokens_that_forbids_everything_is_an_error() -> None:
    params = SamplingParams(min_tokens=2)
    result = drawn(row(1.0, 2.0), Case(params, ends=frozenset({0, 1})))
    assert result.error is not None
    assert "leave no token" in result.error


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("bad", "message"), [(math.nan, "1 NaN"), (math.inf, r"1 \+inf"), (-math.inf, "0 NaN")]
)
def test_unusable_rows_are_errors(temperature: float, bad: float, message: str) -> None:
    logits = row(1.0, bad, 2.0) if bad != -math.inf else row(bad, bad, bad)
    result = drawn(logits, Case(SamplingParams(temperature=temperature)))
    assert result.error is not None
    assert result.error.find(message.replace("\\", "")) >= 0


def test_minus_infinity_is_never_drawn() -> None:
    logits = row(-math.inf, 0.0, -math.inf, 0.0)
    for params in (
        SamplingParams(),
        SamplingParams(top_k=3),
        SamplingParams(typical_p=0.9),
        SamplingParams(top_n_sigma=1.0),
        SamplingParams(top_p=0.99),
    ):
        assert {drawn(logits, Case(params), seed=s).token_id for s in range(30)} == {1, 3}


def test_the_row_is_not_changed_and_a_draw_repeats() -> None:
    rng = random.Random(1)
    logits = np.array([rng.gauss(0, 2) for _ in range(500)], dtype=np.float32)
    copy = logits.copy()
    first = [drawn(logits, CASES[name]).token_id for name in CASES]
    assert [drawn(logits, CASES[name]).token_id for name in CASES] == first
    assert np.array_equal(logits, copy)


def test_extreme_temperatures_stay_finite() -> None:
    logits = row(-3e38, 0.0, 3e38)
    assert drawn(logits, Case(SamplingParams(temperature=1e-4))).token_id == 2
    assert drawn(logits, Case(SamplingParams(temperature=100.0))).token_id == 2
    spread = {
        drawn(row(0, 1), Case(SamplingParams(temperature=100.0)), seed=s).token_id
        for s in range(20)
    }
    assert spread == {0, 1}


def test_logprobs_are_those_of_the_raw_row() -> None:
    logits = np.random.default_rng(2).normal(size=6000).astype(np.float32)
    params = SamplingParams(temperature=0.2, top_k=3, logit_bias=((4, 50.0),), logprobs=20)
    result = drawn(logits, Case(params))
    assert result.token_id == 4
    entry = result.logprob
    assert entry is not None
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert entry.logprob == pytest.approx(float(exact[4]), abs=1e-6)
    order = np.argsort(-exact, kind="stable")[:20]
    assert [i for i, _ in entry.top] == order.tolist()
    assert [v for _, v in entry.top] == pytest.approx(exact[order].tolist(), abs=1e-6)


def test_logprobs_zero_gives_the_drawn_token_only() -> None:
    result = drawn(row(1.0, 2.0), Case(SamplingParams(logprobs=0)))
    assert result.logprob is not None
    assert result.logprob.top == ()
    many = drawn(row(1.0, 2.0), Case(SamplingParams(logprobs=20)))
    assert many.logprob is not None
    assert len(many.logprob.top) == 2
