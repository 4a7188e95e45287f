"""From one row of logits to one token: a pure function of row, parameters, seed and position.

Order, as llama.cpp documents its chain: logit_bias; repetition penalty (over prompt and answer:
logits <= 0 are multiplied, others divided), then frequency x count and presence (over the answer
only, as OpenAI defines them; llama.cpp counts the prompt too); end tokens masked until min_tokens;
top_n_sigma; top_k; typical_p; top_p; min_p; temperature; the draw. Each truncation sees the
distribution its predecessors left, renormalised, before temperature. Ties go to the lowest id.
A temperature below 1e-5 takes the arg-max after the penalties and skips what follows.

Random numbers are splitmix64 (Steele, Lea, Flood 2014) indexed by position: stream (seed, choice),
number `position`. So batch mates, preemption and chunks cannot change a draw. One uniform number is
spent per token, on the inverse of the cumulative distribution in order of token id.

Speed on a vocabulary of 49k: full sorts are avoided by exact pre-filters (see `_prefix`, `_top`).
A native sampler replaces `draw`; everything else here is its preparation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.types import SamplingParams, TokenLogprob

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

GREEDY_BELOW = 1e-5  # temperatures under it would overflow logits / temperature in float32
_MASK = 0xFFFFFFFFFFFFFFFF
_GAMMA = 0x9E3779B97F4A7C15
_BLOCK = 256  # block sums and block maxima stand in for whole-vocabulary scans
_SLICES = 2048  # of distance, over 16 nats
_FAR = 1e4  # nats; stands for an infinite distance, whose product with weight 0 would be NaN
_SMALL = 4096  # up to here exponentials are taken in float64


class DrawResult(NamedTuple):
    """A token, or the reason why none can be drawn."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


# ---- random numbers


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def splitmix64(state: int, index: int) -> int:
    """The number at `index` (0 is the first) of the splitmix64 stream that starts at `state`."""
    return _mix((state + (index + 1) * _GAMMA) & _MASK)


def stream_of(seed: int, choice: int) -> int:
    """Start of the stream of one choice: two choices of one seed are unrelated streams."""
    return splitmix64(_mix(seed & _MASK), choice)


def uniform(stream: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    return (splitmix64(stream, position) >> 11) * 2.0**-53


# ---- what a job prepares once


@dataclass(frozen=True, slots=True)
class DrawRule:
    """Sampling parameters of one choice, ready for use.

    `end_ids` may not be drawn before position `first_end`.
    """

    params: SamplingParams
    stream: int
    bias_ids: Ints
    bias: Floats
    end_ids: Ints
    first_end: int
    has_penalties: bool
    is_greedy: bool


def draw_rule(
    params: SamplingParams, seed: int, choice: int, end_ids: frozenset[int], num_prompt: int
) -> DrawRule:
    """Prepare the parameters of one choice; `end_ids` are the tokens that end its answer."""
    has_penalties = bool(
        params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    )
    return DrawRule(
        params=params,
        stream=stream_of(seed, choice),
        bias_ids=np.array([t for t, _ in params.logit_bias], dtype=np.int64),
        bias=np.array([b for _, b in params.logit_bias], dtype=np.float32),
        end_ids=np.array(sorted(end_ids), dtype=np.int64),
        first_end=num_prompt + params.min_tokens,
        has_penalties=has_penalties,
        is_greedy=params.temperature < GREEDY_BELOW,
    )


class History:
    """Tokens seen so far, as the penalties need them; `push` is O(1)."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        known = np.unique(np.array(prompt, dtype=np.int64))
        self._slots: dict[int, int] = {}  # answered token -> place in `_ids`
        self._known = set(known.tolist())
        self._seen = np.resize(known, 2 * known.size + 64)
        self._num_seen = known.size
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)

    def push(self, token: int) -> None:
        """One answered token more."""
        slot = self._slots.get(token)
        if slot is not None:
            self._counts[slot] += 1
            return
        slot = self._slots[token] = len(self._slots)
        if slot == self._ids.size:
            self._ids = np.resize(self._ids, 2 * slot)
            self._counts = np.resize(self._counts, 2 * slot)
        self._ids[slot], self._counts[slot] = token, 1
        if token not in self._known:
            if self._num_seen == self._seen.size:
                self._seen = np.resize(self._seen, 2 * self._num_seen)
            self._seen[self._num_seen] = token
            self._num_seen += 1

    @property
    def seen(self) -> Ints:
        """Distinct tokens of prompt and answer; valid until the next push."""
        return self._seen[: self._num_seen]

    @property
    def answered(self) -> tuple[Ints, Floats]:
        """Distinct tokens of the answer and how often each came; valid until the next push."""
        size = len(self._slots)
        return self._ids[:size], self._counts[:size]


class Scratch:
    """Three rows to work in, kept between draws: fresh memory costs more than the arithmetic (page
    faults took 500 of 660 us in one measured draw). Never read before it is written."""

    def __init__(self, vocab_size: int) -> None:
        self.row: Floats = np.empty(vocab_size, dtype=np.float32)
        self.weights: Floats = np.empty(vocab_size, dtype=np.float32)
        self.distance: Floats = np.empty(vocab_size, dtype=np.float32)


# ---- the draw


def draw(
    logits: Floats,
    rule: DrawRule,
    position: int,
    history: History | None,
    scratch: Scratch | None = None,
) -> DrawResult:
    """The token at `position` of a sequence, from the logits of the one before it.

    **Shapes** `logits` [vocab] float32, not changed. A NaN or +inf anywhere, or nothing but -inf,
    is an error of this row alone.
    """
    best = int(logits.argmax())  # NaN counts as largest
    if not math.isfinite(logits[best]):
        return DrawResult(-1, error=_blame(logits))
    scratch = scratch or Scratch(logits.size)
    row = logits
    is_early = position < rule.first_end and rule.end_ids.size > 0
    if is_early or rule.bias_ids.size or rule.has_penalties:
        row = scratch.row
        np.copyto(row, logits)
        _adjust(row, rule, history, is_early=is_early)
    if row is not logits:
        best = int(row.argmax())
        if not math.isfinite(row[best]):
            return DrawResult(-1, error="penalties, bias and min_tokens leave no token to draw")
    token = best
    if not rule.is_greedy:
        token = _sample(row, rule.params, uniform(rule.stream, position), scratch)
    num_top = rule.params.logprobs
    return DrawResult(token, None if num_top is None else logprob(logits, token, num_top, scratch))


def _blame(logits: Floats) -> str:
    num_nan = int(np.isnan(logits).sum())
    num_inf = int(np.isposinf(logits).sum())
    return f"the model gave no usable logits ({num_nan} NaN, {num_inf} +inf of {logits.size})"


def _adjust(row: Floats, rule: DrawRule, history: History | None, *, is_early: bool) -> None:
    """Bias, penalties and the min_tokens mask, in place."""
    if rule.bias_ids.size:
        np.add.at(row, rule.bias_ids, rule.bias)
    if rule.has_penalties and history is not None:
        _penalise(row, rule.params, history)
    if is_early:
        row[rule.end_ids] = -np.inf


def _penalise(row: Floats, params: SamplingParams, history: History) -> None:
    if params.repetition_penalty != 1.0:
        seen = history.seen
        values, factor = row[seen], np.float32(params.repetition_penalty)
        row[seen] = np.where(values <= 0, values * factor, values / factor)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = history.answered
        presence, frequency = params.presence_penalty, params.frequency_penalty
        row[ids] -= counts * np.float32(frequency) + np.float32(presence)


def _sample(row: Floats, params: SamplingParams, u: float, scratch: Scratch) -> int:
    ids, x = _truncate(row, params, scratch)
    index = _pick(_weights(x, params.temperature, scratch), u)
    return index if ids is None else int(ids[index])


def _truncate(row: Floats, params: SamplingParams, scratch: Scratch) -> tuple[Ints | None, Floats]:
    """Surviving token ids in ascending order (None: all) and their logits."""
    ids: Ints | None = None
    x = row
    stages: tuple[tuple[bool, Callable[[Floats, Any, Scratch], Ints], float], ...] = (
        (params.top_n_sigma > 0.0, _top_n_sigma, params.top_n_sigma),
        (params.top_k > 0, _top_k, params.top_k),
        (params.typical_p < 1.0, _typical, params.typical_p),
        (params.top_p < 1.0, _top_p, params.top_p),
        (params.min_p > 0.0, _min_p, params.min_p),
    )
    for is_on, stage, value in stages:
        if is_on:
            kept = stage(x, value, scratch)
            ids = kept if ids is None else ids[kept]
            x = x[kept]
    return ids, x


# ---- truncations: logits -> indices kept, ascending


def _top_n_sigma(x: Floats, n: float, scratch: Scratch) -> Ints:
    finite = x if float(x.min()) > -np.inf else x[x > -np.inf]
    mean = float(finite.mean(dtype=np.float64))
    centred = np.subtract(finite, np.float32(mean), out=scratch.distance[: finite.size])
    spread = math.sqrt(float(np.square(centred, out=centred).mean(dtype=np.float64)))
    return np.flatnonzero(x >= float(x.max()) - n * spread)


def _min_p(x: Floats, p: float, scratch: Scratch) -> Ints:
    return np.flatnonzero(x >= float(x.max()) + math.log(p))


def _top_k(x: Floats, k: int, scratch: Scratch) -> Ints:
    return _top(x, k)


def _top(x: Floats, k: int) -> Ints:
    """The k largest. The k-th largest block maximum cannot exceed the k-th largest value, so all of
    them pass it as a threshold."""
    if k >= x.size:
        return np.arange(x.size)
    peaks = np.maximum.reduceat(x, np.arange(0, x.size, _BLOCK)) if x.size > _SMALL else x
    if k > peaks.size:
        peaks = x
    threshold = np.partition(peaks, peaks.size - k)[peaks.size - k]
    kept = np.flatnonzero(x >= threshold)
    if kept.size > k:
        kept = np.sort(kept[np.argsort(-x[kept], kind="stable")[:k]])
    return kept


def _top_p(x: Floats, p: float, scratch: Scratch) -> Ints:
    """Fewest of the most likely whose mass reaches p."""
    distance = np.subtract(x.max(), x, out=scratch.distance[: x.size])
    weights = _weights(x, 1.0, scratch)
    return _prefix(distance, weights, p, level=6.0, is_strict=False)


def _typical(x: Floats, p: float, scratch: Scratch) -> Ints:
    """Fewest of those with surprisal nearest to the entropy whose mass exceeds p (Meister 2022)."""
    weights = _weights(x, 1.0, scratch)
    total = float(weights.sum(dtype=np.float64))
    below: NDArray[np.floating] = scratch.distance[: x.size]
    if x.size <= _SMALL:
        below = np.empty(x.size, dtype=np.float64)
    np.subtract(x.max(), x, out=below)
    np.minimum(below, _FAR, out=below)
    mean = float((weights * below).sum(dtype=np.float64)) / total
    # surprisal = log(total) + below, entropy = log(total) + mean: the logarithms cancel
    distance = np.abs(np.subtract(below, mean, out=below), out=below)
    return _prefix(distance, weights, p, level=3.0, is_strict=True)


def _prefix(
    distance: NDArray[np.floating],
    weights: NDArray[np.floating],
    p: float,
    *,
    level: float,
    is_strict: bool,
) -> Ints:
    """The nearest tokens, in order of distance, until their share of the mass reaches (strict:
    exceeds) p; at least one.

    If those within `level` carry enough mass, only they are looked at; if they are still many,
    only the slice of distance in which the mass crosses p is sorted.
    """
    need = p * float(weights.sum(dtype=np.float64))
    near: Ints | None = None
    if weights.size > _BLOCK:
        near = np.flatnonzero(distance <= level)
        if float(weights[near].sum(dtype=np.float64)) > need:
            distance, weights = distance[near], weights[near]
        else:
            near = None
    side: Literal["left", "right"] = "right" if is_strict else "left"
    is_long = weights.size > 4 * _BLOCK
    kept = (_crossing if is_long else _nearest)(distance, weights, need, side)
    return kept if near is None else near[kept]


def _nearest(
    distance: NDArray[np.floating],
    weights: NDArray[np.floating],
    need: float,
    side: Literal["left", "right"],
) -> Ints:
    order = np.argsort(distance, kind="stable")
    mass = np.cumsum(weights[order], dtype=np.float64)
    return np.sort(order[: int(np.searchsorted(mass, need, side=side)) + 1])


def _crossing(
    distance: NDArray[np.floating],
    weights: NDArray[np.floating],
    need: float,
    side: Literal["left", "right"],
) -> Ints:
    """`_nearest` in linear time: sum the mass by slices of distance, sort the decisive one."""
    scaled = distance * np.float32(_SLICES / 16)
    slices = np.minimum(scaled, _SLICES - 1, out=scaled).astype(np.int16)
    mass = np.cumsum(np.bincount(slices, weights=weights, minlength=_SLICES))
    at = min(int(np.searchsorted(mass, need, side=side)), int(slices.max()))
    edge = np.flatnonzero(slices == at)
    before = float(mass[at - 1]) if at else 0.0
    is_kept = slices < at
    is_kept[edge[_nearest(distance[edge], weights[edge], need - before, side)]] = True
    return np.flatnonzero(is_kept)


# ---- the last step


def _weights(x: Floats, temperature: float, scratch: Scratch) -> NDArray[np.floating]:
    """exp((x - max) / temperature), the largest being 1; valid until the next call."""
    if x.size <= _SMALL:
        wide: NDArray[np.float64] = np.exp((x.astype(np.float64) - float(x.max())) / temperature)
        return wide
    weights = scratch.weights[: x.size]
    np.subtract(x, x.max(), out=weights)
    if temperature != 1.0:
        weights *= np.float32(1.0 / temperature)
    np.exp(weights, out=weights)
    return weights


def _pick(weights: NDArray[np.floating], u: float) -> int:
    """The index whose share of the cumulative mass covers u; never one of weight zero."""
    start = 0
    if weights.size > 2 * _BLOCK:
        sums = np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK), dtype=np.float64)
        bounds = np.cumsum(sums)
        target = u * float(bounds[-1])
        block = int(np.searchsorted(bounds, target, side="right"))
        block = min(block, int(np.flatnonzero(sums)[-1]))
        target -= float(bounds[block - 1]) if block else 0.0
        start = block * _BLOCK
        weights = weights[start : start + _BLOCK]
        mass = np.cumsum(weights, dtype=np.float64)
    else:
        mass = np.cumsum(weights, dtype=np.float64)
        target = u * float(mass[-1])
    index = int(np.searchsorted(mass, max(target, 0.0), side="right"))
    return start + min(index, int(np.flatnonzero(weights)[-1]))


def logprob(logits: Floats, token: int, num_top: int, scratch: Scratch) -> TokenLogprob:
    """Natural-log softmax of the raw row at `token`, and the `num_top` most likely tokens."""
    peak = float(logits.max())
    total = float(_weights(logits, 1.0, scratch).sum(dtype=np.float64))
    norm = peak + math.log(total)
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        ids = _top(logits, num_top)
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        top = tuple((int(i), float(logits[i]) - norm) for i in ids)
    return TokenLogprob(token, float(logits[token]) - norm, top)
