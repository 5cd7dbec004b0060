"""In: what happens to requests, and an engine. Out: the figures of it as Prometheus reads them.
Does not measure: engine_thread.py and app.py do. Does not send: app.py does."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from codescent.inference.engine import Engine

RECENT = 1024
"""Quantiles are of so many requests, the last ones."""
QUANTILES = (0.5, 0.9, 0.95, 0.99)
RATE_S = 10.0
"""Tokens per second are those of the last so many seconds."""
_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Watch:
    """The figures of a server. All times are in seconds.

    Attributes:
        latencies: of the last RECENT requests that were answered.
        firsts: their times to the first token.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.latencies, self.firsts = deque[float](maxlen=RECENT), deque[float](maxlen=RECENT)
        self._token_times_s = deque[float]()
        self._requests = self._counter("requests", "Requests that were answered", ["path", "status"])
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of the prompts of answered requests")
        self._tokens = self._counter("generated_tokens", "Tokens that were generated")
        self._hung_up = self._counter("hung_up", "Requests whose client hung up before the answer was complete")
        self._first_s = self._histogram("time_to_first_token_seconds", "From the request to its first token")
        self._next_s = self._histogram("time_per_token_seconds", "From one token of a text to the next")
        self._latency_s = self._histogram("request_seconds", "From the request to the end of its answer")
        ProcessCollector(registry=self._registry)

    def _counter(self, name: str, what: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"codescent_{name}", what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"codescent_{name}", what, buckets=_BUCKETS_S, registry=self._registry)

    def token(self, seconds: float, *, is_first: bool) -> None:
        """A token has come, so long after the one before it, or after the request."""
        self._tokens.inc()
        self._token_times_s.append(time.monotonic())
        self._forget_old()
        if is_first:
            self.firsts.append(seconds)
            self._first_s.observe(seconds)
        else:
            self._next_s.observe(seconds)

    def answered(self, path: str, status: int) -> None:
        """A request was answered to its end, by this status of HTTP."""
        self._requests.labels(path, str(status)).inc()

    def generated(self, seconds: float, prompt_tokens: int) -> None:
        """A request for texts or vectors has succeeded, so long after it came."""
        self._prompt_tokens.inc(prompt_tokens)
        self.latencies.append(seconds)
        self._latency_s.observe(seconds)

    def hung_up(self) -> None:
        """A client has closed its connection before the end of its answer."""
        self._hung_up.inc()

    def tokens_per_second(self) -> float:
        """Generated tokens per second, in the last RATE_S seconds."""
        self._forget_old()
        return len(self._token_times_s) / RATE_S

    def _forget_old(self) -> None:
        oldest_s = time.monotonic() - RATE_S
        while self._token_times_s and self._token_times_s[0] < oldest_s:
            self._token_times_s.popleft()

    def add_engine(self, engine: Engine, open_rows: Callable[[], int]) -> None:
        """Show the counts of an engine, too. `open_rows`: texts that run or wait, also before the engine."""
        self._registry.register(_EngineCollector(self, engine, open_rows))

    def text(self) -> bytes:
        """All figures in the text format of Prometheus."""
        return generate_latest(self._registry)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; NaN: there are no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


class _EngineCollector(Collector):
    """Reads an engine when Prometheus asks."""

    def __init__(self, watch: Watch, engine: Engine, open_rows: Callable[[], int]) -> None:
        self._watch, self._engine, self._open_rows = watch, engine, open_rows

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        running = engine.running
        gauges = {
            "running": ("Texts that are being generated", running),
            "waiting": ("Texts that wait", max(0, self._open_rows() - running)),
            "tokens_per_second": (f"Generated tokens per second, in {RATE_S:g} s", self._watch.tokens_per_second()),
            "pages_used": ("Pages of keys and values in use", engine.pages_used),
            "pages": ("Pages of keys and values", engine.pages_total),
        }
        for name, (what, value) in gauges.items():
            yield GaugeMetricFamily(f"codescent_{name}", what, value)
        counters = {
            "cached_tokens": ("Tokens of prompts that were found in pages of earlier requests", engine.cached_tokens),
            "preemptions": ("Times that a text gave up its pages to others", engine.preemptions),
        }
        for name, (what, value) in counters.items():
            yield CounterMetricFamily(f"codescent_{name}", what, value)
        yield _summary("request_recent_seconds", "Seconds of a request", self._watch.latencies)
        yield _summary("time_to_first_token_recent_seconds", "Seconds to the first token", self._watch.firsts)


def _summary(name: str, what: str, values: Sequence[float]) -> Metric:
    """Quantiles of the last values."""
    found = Metric(f"codescent_{name}", f"{what}: quantiles of the last {RECENT:,} requests", "summary")
    for share in QUANTILES if values else ():
        found.add_sample(found.name, {"quantile": f"{share:g}"}, quantile(values, share))
    return found
