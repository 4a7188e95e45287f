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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.types import SamplingParams, TokenLogprob

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

GREEDY_BELOW = 1e-5  # temperatures under it would overflow logits / temperature in float32
_MASK = 0xFFFFFFFFFFFFFFFF
_GAMMA = 0x9E3779B97F4A7C15
_BLOCK = 256  # block sums and block maxima stand in for whole-vocabulary scans
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

    `end_ids` may not be drawn before position `first_end`; `is_argmax`: nothing but the arg-max of
    the raw row is wanted, so the runner may take it for many rows at once.
    """

    params: SamplingParams
    stream: int
    bias_ids: Ints
    bias: Floats
    end_ids: Ints
    first_end: int
    has_penalties: bool
    is_greedy: bool
    is_argmax: bool


def draw_rule(
    params: SamplingParams, seed: int, choice: int, end_ids: frozenset[int], num_prompt: int
) -> DrawRule:
    """Prepare the parameters of one choice; `end_ids` are the tokens that end its answer."""
    has_penalties = bool(
        params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    )
    is_greedy = params.temperature < GREEDY_BELOW
    adjusts = has_penalties or bool(params.logit_bias) or (params.min_tokens > 0 and bool(end_ids))
    return DrawRule(
        params=params,
        stream=stream_of(seed, choice),
        bias_ids=np.array([t for t, _ in params.logit_bias], dtype=np.int64),
        bias=np.array([b for _, b in params.logit_bias], dtype=np.float32),
        end_ids=np.array(sorted(end_ids), dtype=np.int64),
        first_end=num_prompt + params.min_tokens,
        has_penalties=has_penalties,
        is_greedy=is_greedy,
        is_argmax=is_greedy and not adjusts and params.logprobs is None,
    )


class History:
    """Tokens seen so far, as the penalties need them; `push` is O(1)."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self._seen = np.unique(np.array(prompt, dtype=np.int64))
        self._known = {int(t) for t in self._seen}
        self._fresh: list[int] = []  # answered tokens that the prompt lacks
        self._slots: dict[int, int] = {}
        self._ids: list[int] = []
        self._counts: list[int] = []

    def push(self, token: int) -> None:
        """One answered token more."""
        slot = self._slots.get(token)
        if slot is not None:
            self._counts[slot] += 1
            return
        self._slots[token] = len(self._ids)
        self._ids.append(token)
        self._counts.append(1)
        if token not in self._known:
            self._fresh.append(token)

    @property
    def seen(self) -> Ints:
        """Distinct tokens of prompt and answer."""
        return np.concatenate([self._seen, np.array(self._fresh, dtype=np.int64)])

    @property
    def answered(self) -> tuple[Ints, Floats]:
        """Distinct tokens of the answer and how often each came."""
        return np.array(self._ids, dtype=np.int64), np.array(self._counts, dtype=np.float32)


# ---- the draw


def draw(logits: Floats, rule: DrawRule, position: int, history: History | None) -> DrawResult:
    """The token at `position` of a sequence, from the logits of the one before it.

    **Shapes** `logits` [vocab] float32, not changed. A NaN or +inf anywhere, or nothing but -inf,
    is an error of this row alone.
    """
    best = int(logits.argmax())  # NaN counts as largest
    if not math.isfinite(logits[best]):
        return DrawResult(-1, error=_blame(logits))
    row = _adjust(logits, rule, position, history)
    if row is not logits:
        best = int(row.argmax())
        if not math.isfinite(row[best]):
            return DrawResult(-1, error="penalties, bias and min_tokens leave no token to draw")
    token = best
    if not rule.is_greedy:
        token = _sample(row, rule.params, uniform(rule.stream, position))
    num_top = rule.params.logprobs
    return DrawResult(token, None if num_top is None else logprob(logits, token, num_top))


def _blame(logits: Floats) -> str:
    num_nan = int(np.isnan(logits).sum())
    num_inf = int(np.isposinf(logits).sum())
    return f"the model gave no usable logits ({num_nan} NaN, {num_inf} +inf of {logits.size})"


def _adjust(logits: Floats, rule: DrawRule, position: int, history: History | None) -> Floats:
    """Bias, penalties and the min_tokens mask, on a copy; the row itself if none applies."""
    is_early = position < rule.first_end and rule.end_ids.size > 0
    if not (is_early or rule.bias_ids.size or rule.has_penalties):
        return logits
    row = logits.copy()
    if rule.bias_ids.size:
        np.add.at(row, rule.bias_ids, rule.bias)
    if rule.has_penalties and history is not None:
        _penalise(row, rule.params, history)
    if is_early:
        row[rule.end_ids] = -np.inf
    return row


def _penalise(row: Floats, params: SamplingParams, history: History) -> None:
    if params.repetition_penalty != 1.0:
        seen = history.seen
        values, factor = row[seen], np.float32(params.repetition_penalty)
        row[seen] = np.where(values <= 0, values * factor, values / factor)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = history.answered
        presence, frequency = params.presence_penalty, params.frequency_penalty
        row[ids] -= counts * np.float32(frequency) + np.float32(presence)


def _sample(row: Floats, params: SamplingParams, u: float) -> int:
    ids, x = _truncate(row, params)
    index = _pick(_weights(x, params.temperature), u)
    return index if ids is None else int(ids[index])


def _truncate(row: Floats, params: SamplingParams) -> tuple[Ints | None, Floats]:
    """Surviving token ids in ascending order (None: all) and their logits."""
    ids: Ints | None = None
    x = row
    stages: tuple[tuple[bool, Callable[[Floats, Any], Ints], float], ...] = (
        (params.top_n_sigma > 0.0, _top_n_sigma, params.top_n_sigma),
        (0 < params.top_k < row.size, _top, params.top_k),
        (params.typical_p < 1.0, _typical, params.typical_p),
        (params.top_p < 1.0, _top_p, params.top_p),
        (params.min_p > 0.0, _min_p, params.min_p),
    )
    for is_on, stage, value in stages:
        if is_on:
            kept = stage(x, value)
            ids = kept if ids is None else ids[kept]
            x = x[kept]
    return ids, x


# ---- truncations: logits -> indices kept, ascending


def _top_n_sigma(x: Floats, n: float) -> Ints:
    finite = x[x > -np.inf]
    spread = float(finite.std(dtype=np.float64))
    return np.flatnonzero(x >= float(x.max()) - n * spread)


def _min_p(x: Floats, p: float) -> Ints:
    return np.flatnonzero(x >= float(x.max()) + math.log(p))


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


def _top_p(x: Floats, p: float) -> Ints:
    """Fewest of the most likely whose mass reaches p."""
    distance = x.max() - x
    weights = _weights(x)
    return _prefix(distance, weights, p, levels=(4.0, 7.0, 10.0, 14.0), is_strict=False)


def _typical(x: Floats, p: float) -> Ints:
    """Fewest of those with surprisal nearest to the entropy whose mass exceeds p (Meister 2022)."""
    weights = _weights(x)
    alive = np.flatnonzero(weights > 0)
    weights = weights[alive]
    total = float(weights.sum(dtype=np.float64))
    surprisal = math.log(total) + float(x.max()) - x[alive].astype(np.float64)
    entropy = float((weights * surprisal).sum(dtype=np.float64)) / total
    distance = np.abs(surprisal - entropy)
    return alive[_prefix(distance, weights, p, levels=(1.0, 2.0, 4.0, 8.0), is_strict=True)]


def _prefix(
    distance: NDArray[np.floating],
    weights: NDArray[np.floating],
    p: float,
    *,
    levels: tuple[float, ...],
    is_strict: bool,
) -> Ints:
    """The nearest tokens, in order of distance, until their share of the mass reaches (strict:
    exceeds) p; at least one.

    Only those within some level of distance are sorted: once they carry enough mass, the answer
    lies among them.
    """
    need = p * float(weights.sum(dtype=np.float64))
    near = np.arange(weights.size)
    if weights.size > _BLOCK:
        for level in levels:
            within = np.flatnonzero(distance <= level)
            if float(weights[within].sum(dtype=np.float64)) > need:
                near = within
                break
    order = near[np.argsort(distance[near], kind="stable")]
    mass = np.cumsum(weights[order], dtype=np.float64)
    count = int(np.searchsorted(mass, need, side="right" if is_strict else "left")) + 1
    return np.sort(order[:count])


# ---- the last step


def _weights(x: Floats, temperature: float = 1.0) -> NDArray[np.floating]:
    """exp((x - max) / temperature), the largest being 1."""
    if x.size <= _SMALL:
        wide: NDArray[np.float64] = np.exp((x.astype(np.float64) - float(x.max())) / temperature)
        return wide
    shifted: Floats = x - x.max()
    if temperature != 1.0:
        shifted *= np.float32(1.0 / temperature)
    np.exp(shifted, out=shifted)
    return shifted


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


def logprob(logits: Floats, token: int, num_top: int) -> TokenLogprob:
    """Natural-log softmax of the raw row at `token`, and the `num_top` most likely tokens."""
    peak = float(logits.max())
    total = float(np.exp(logits - np.float32(peak)).sum(dtype=np.float64))
    norm = peak + math.log(total)
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        ids = _top(logits, num_top)
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        top = tuple((int(i), float(logits[i]) - norm) for i in ids)
    return TokenLogprob(token, float(logits[token]) - norm, top)
