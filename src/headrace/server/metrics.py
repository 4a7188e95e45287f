"""The server's metrics in Prometheus text: counters, gauges and histograms.

Implements `observe.Observer`; one `Metrics` belongs to one server (no global registry). Engine
counters are read from `EngineStats` at scrape time, so the engine knows nothing of this file. Names
follow vLLM's (`num_requests_running`, `time_to_first_token_seconds`, ...) behind our own prefix, so
that dashboards carry over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.observe import monotonic_s
from headrace.types import EngineStats

# Doubling buckets from 1 ms to 8 minutes: a decode step of a small model to a long answer.
_LATENCY_BUCKETS = tuple(0.001 * 2**i for i in range(20))

_GAUGES = (
    ("num_requests_waiting", "requests queued", "num_waiting"),
    ("num_requests_running", "sequences in the running batch", "num_running"),
    ("kv_pages", "pages of the KV pool", "num_pages"),
    ("kv_free_pages", "pages neither owned nor cached", "num_free_pages"),
    ("kv_cached_pages", "pages held by the prefix cache alone", "num_cached_pages"),
)
_COUNTERS = (
    ("engine_steps", "iterations of the engine", "num_steps"),
    ("engine_step_seconds", "seconds spent in steps", "step_seconds"),
    ("num_preemptions", "sequences put back for recompute", "num_preemptions"),
    ("prompt_tokens", "prompt tokens admitted", "prompt_tokens"),
    ("prefix_cache_hit_tokens", "prompt tokens found in the prefix cache", "cached_tokens"),
    ("generation_tokens", "tokens drawn", "generated_tokens"),
)


class Metrics:
    """The metrics of one server. Every method may be called from any thread."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engines = _EngineCollector()
        self.registry.register(self._engines)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(
                f"headrace_{name}",
                text,
                ["model"],
                buckets=_LATENCY_BUCKETS,
                registry=self.registry,
            )

        self.first_token = histogram(
            "time_to_first_token_seconds", "from submit to the first token of a choice"
        )
        self.inter_token = histogram("inter_token_latency_seconds", "between tokens of a choice")
        self.end_to_end = histogram(
            "e2e_request_latency_seconds", "from submit to the end of a choice"
        )
        self.finished = Counter(
            "headrace_request_success",
            "choices that ended, by reason",
            ["model", "finished_reason"],
            registry=self.registry,
        )
        self.refused = Counter(
            "headrace_requests_refused",
            "requests answered with an error, by its code",
            ["code"],
            registry=self.registry,
        )
        self.http = Counter(
            "headrace_http_responses",
            "HTTP responses begun",
            ["path", "status"],
            registry=self.registry,
        )

    def watch_engine(self, model: str, stats: Callable[[], EngineStats]) -> None:
        """Read `stats` at every scrape, labelled with `model`."""
        self._engines.sources[model] = stats

    def trace(self, model: str) -> RequestTrace:
        """Start the clock of one request."""
        return RequestTrace(self, model, monotonic_s())

    def now_s(self) -> float:
        """The clock that `RequestTrace` expects."""
        return monotonic_s()

    def render(self) -> bytes:
        """All metrics as Prometheus text (version 0.0.4)."""
        return generate_latest(self.registry)


class RequestTrace:
    """Times of one request's choices. Used by one thread at a time."""

    def __init__(self, metrics: Metrics, model: str, start_s: float) -> None:
        self._metrics = metrics
        self._model = model
        self._start_s = start_s
        self._last_s: dict[int, float] = {}

    def tokens(self, index: int, count: int, at_s: float) -> None:
        """`count` tokens of choice `index` arrived at `at_s`, in one event."""
        if not count:
            return
        before = self._last_s.get(index)
        if before is None:
            self._metrics.first_token.labels(self._model).observe(at_s - self._start_s)
        else:
            for _ in range(count):
                self._metrics.inter_token.labels(self._model).observe((at_s - before) / count)
        self._last_s[index] = at_s

    def finished(self, reason: str, at_s: float) -> None:
        """A choice ended."""
        self._metrics.finished.labels(self._model, reason).inc()
        self._metrics.end_to_end.labels(self._model).observe(at_s - self._start_s)


class _EngineCollector(Collector):
    """Turns each engine's `EngineStats` into samples at scrape time."""

    def __init__(self) -> None:
        self.sources: dict[str, Callable[[], EngineStats]] = {}

    def collect(self) -> Iterable[Metric]:
        snapshots = [(model, stats()) for model, stats in tuple(self.sources.items())]
        for name, text, field in _GAUGES:
            gauge = GaugeMetricFamily(f"headrace_{name}", text, labels=["model"])
            for model, stats in snapshots:
                gauge.add_metric([model], getattr(stats, field))
            yield gauge
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(f"headrace_{name}", text, labels=["model"])
            for model, stats in snapshots:
                counter.add_metric([model], getattr(stats, field))
            yield counter
        yield self._usage(snapshots)

    @staticmethod
    def _usage(snapshots: list[tuple[str, EngineStats]]) -> Metric:
        usage = GaugeMetricFamily(
            "headrace_kv_cache_usage_perc", "share of the KV pool owned, 0 to 1", labels=["model"]
        )
        for model, stats in snapshots:
            owned = stats.num_pages - stats.num_free_pages - stats.num_cached_pages
            usage.add_metric([model], owned / stats.num_pages if stats.num_pages else 0.0)
        return usage
