"""Samples, their spread, and tables of them; no clock but `observe.monotonic_s`.

A sample is the mean of as many calls as take a noticeable time; a figure is the median of the
samples with the least and the greatest beside it, never a mean over them: a busy machine disturbs
some samples much, not all a little.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.observe import monotonic_s

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure: median and extremes of its samples."""

    median: float
    least: float
    greatest: float

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.least:.4g}-{self.greatest:.4g})"


@dataclass(frozen=True, slots=True)
class Table:
    """What a report prints; the first row of `rows` comes right under the heads."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def spread(values: Sequence[float]) -> Spread:
    """Of at least one sample."""
    return Spread(statistics.median(values), min(values), max(values))


def per_second(amount: float, seconds: Sequence[float]) -> Spread:
    """The rate of a fixed amount over samples of its time."""
    return spread([amount / s for s in seconds])


def paired_seconds(
    runs: Sequence[Callable[[], object]], repeat: int, sample_s: float
) -> list[tuple[float, ...]]:
    """Seconds per call of several things, `repeat` times in turn, in samples of about `sample_s`:
    each tuple is from one time."""
    for run in runs:
        run()
    counts = [calls_in(run, sample_s) for run in runs]
    turns = range(repeat)
    return [tuple(sample(run, n) for run, n in zip(runs, counts, strict=True)) for _ in turns]


def calls_in(run: Callable[[], object], sample_s: float) -> int:
    """How many calls fill `sample_s`, by one call; at least one."""
    return max(1, round(sample_s / max(sample(run, 1), 1e-9)))


def sample(run: Callable[[], object], count: int) -> float:
    """Mean seconds of `count` calls in a row."""
    begin_s = monotonic_s()
    for _ in range(count):
        run()
    return (monotonic_s() - begin_s) / count
