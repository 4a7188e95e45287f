"""Spreads, samples in turn, and rates from token times, on times that are written down here."""

from __future__ import annotations

import pytest

from headrace.bench.measuring import calls_in, paired_seconds, per_second, sample, spread
from headrace.bench.timing import Prompts, Trace, full_batch_rate, span_s, window_rates


def test_a_spread_is_median_and_extremes() -> None:
    found = spread([5.0, 1.0, 100.0])
    assert (found.median, found.least, found.greatest) == (5.0, 1.0, 100.0)
    assert str(found) == "5 (1-100)"
    assert str(per_second(10, [2.0, 5.0, 1.0])) == "5 (2-10)"


def test_things_are_measured_in_turn() -> None:
    calls: list[str] = []
    runs = (lambda: calls.append("a"), lambda: calls.append("b"))
    found = paired_seconds(runs, repeat=3, sample_s=0.0)
    assert [len(pair) for pair in found] == [2, 2, 2]
    assert all(seconds >= 0 for pair in found for seconds in pair)
    assert "".join(calls[-6:]) == "ababab"


def test_a_sample_is_the_mean_of_its_calls() -> None:
    calls: list[int] = []
    assert sample(lambda: calls.append(1), 7) >= 0
    assert len(calls) == 7
    assert calls_in(lambda: None, 0.0) == 1


def trace(*times: float) -> Trace:
    return Trace(0.0, list(times))


def test_windows_have_equal_steps_and_count_all_streams() -> None:
    """Two streams; the second starts at 2, so seven steps follow, of which six make windows. Its
    tokens come a tenth after the first's."""
    first = trace(1, 2, 3, 4, 6, 8, 12, 16, 20)
    second = trace(2.1, 3.1, 4.1, 6.1, 8.1, 12.1, 16.1, 20.1)
    # edges 4, 8, 16 leave out the odd step at the beginning: 2 steps x 2 streams each
    assert window_rates([first, second], 3) == [4 / 3, 4 / 6, 4 / 8]


def test_fewer_steps_than_windows_are_a_window_each() -> None:
    assert window_rates([trace(1, 2, 4)], 5) == [1.0, 0.5]
    assert window_rates([trace(1, 2, 4)], 1) == [2 / 3]


def test_rates_of_a_whole_run() -> None:
    traces = [trace(1, 2, 3, 4, 5), trace(3, 4, 5, 6)]
    assert full_batch_rate(traces) == 2.0  # from 3 to 5, two tokens each
    assert span_s(traces) == 6.0
    assert traces[1].ttft_s == 3


def test_prompts_are_reproducible_and_never_the_same() -> None:
    one, other = Prompts(50, seed=4), Prompts(50, seed=4)
    made = one.make(20)
    assert made == other.make(20)
    assert one.make(20) != made
    assert set(one.make(2000)) == set(range(50))


def test_no_windows_come_from_one_token() -> None:
    with pytest.raises(ValueError, match="median"):
        spread(window_rates([trace(1)], 3))
