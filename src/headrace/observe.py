"""What can be seen from outside, and the clocks; no log, no profiler, no metrics library.

The service reports requests to an `Observer` if it is given one; the server's is
`server/metrics.py`. The layers above the engine read their clocks here and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from headrace.types import EngineStats


def monotonic_s() -> float:
    """Seconds on a clock that never steps back."""
    return time.perf_counter()


def unix_time_s() -> int:
    """Whole seconds since 1970, for `created` fields."""
    return int(time.time())


class Trace(Protocol):
    """Hears of one request, from submit on. Used by one thread at a time."""

    def tokens(self, index: int, count: int, at_s: float, /) -> None:
        """`count` tokens of choice `index` arrived at `at_s`, in one event."""

    def finished(self, reason: str, at_s: float, /) -> None:
        """A choice ended."""


class Observer(Protocol):
    """Hears of all requests of a service. Any thread may call it."""

    def now_s(self) -> float:
        """The clock of all times that are reported."""

    def trace(self, model: str, /) -> Trace:
        """A request is being submitted."""

    def watch_engine(self, model: str, stats: Callable[[], EngineStats], /) -> None:
        """Counters that may be read at any time."""
