"""Prometheus metrics: requests by outcome, their latencies, and the statistics of the engines.

Each `Metrics` has a registry of its own, so that two servers in a process share nothing. Of a server of several front
processes each keeps its counts in files, of which any front shows the sums; what a front had counted stays when it has
ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from sonoro.core.config import metrics_folder
from sonoro.server.errors import Refusal
from sonoro.transport.messages import Stats

logger = logging.getLogger(__name__)

_SECONDS = (0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.35, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
_RTF = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0)


@dataclass(frozen=True)
class EngineState:
    """The state of one engine; without `stats` it counts as down."""

    stats: Stats | None
    restarts: int
    slots: int


class Metrics:
    """The metrics of one server. `model`, their label, is empty until the engine is ready."""

    def __init__(self) -> None:
        self.model = ""
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "requests by outcome", "dialect", "reason")
        self.in_flight = Gauge(
            "sonoro_requests_in_flight",
            "requests running or waiting",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        since = "from a request's arrival to its"
        self.first_packet = self._histogram(
            "first_packet_seconds", f"{since} first bytes of audio", _SECONDS, "dialect"
        )
        self.end_to_end = self._histogram("request_seconds", f"{since} last byte", _SECONDS)
        self.rtf = self._histogram("rtf", "wall time over audio time of complete responses", _RTF)
        self.audio = self._counter("audio_seconds", "audio generated")
        faults = "parts of texts that were probably not spoken as written"
        self.faults = self._counter("faults", faults, "kind", "outcome")
        self.underruns = self._counter("underruns", "times that playback without a buffer would have run out of audio")
        self._engines = _EngineCollector()
        self._shown = self._registry
        if folder := metrics_folder():
            self._shown = CollectorRegistry()
            MultiProcessCollector(self._shown, folder)  # type: ignore[no-untyped-call]
        self._shown.register(self._engines)

    def show(self, collector: Collector) -> None:
        """Show what `collector` collects too."""
        self._shown.register(collector)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"sonoro_{name}", help, ["model", *labels], registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"sonoro_{name}", help, ["model", *labels], registry=self._registry, buckets=buckets)

    def count_refusal(self, refused: Refusal, name: str, dialect: str = "native") -> None:
        """Count the request `name` as refused before it ran, and log the reason at debug level."""
        code = str(refused.error["code"])
        self.requests.labels(self.model, dialect, code).inc()
        fields = name, refused.status, code, refused.error["param"]
        logger.debug("event=refused id=%s status=%d code=%s param=%s", *fields)

    def exposition(self, engines: Sequence[EngineState], *, queued: int) -> bytes:
        """Everything in Prometheus' text format; `queued` requests wait at the gate."""
        self._engines.states, self._engines.queued = engines, queued
        return generate_latest(self._shown)


def forget_process(pid: int, folder: Path) -> None:
    """Drop from `folder` the states of a process that has ended; what it counted stays."""
    mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]


class _EngineCollector(Collector):
    """Exports the latest statistics of the engines, labelled by `replica` number."""

    def __init__(self) -> None:
        self.states: Sequence[EngineState] = ()
        self.queued = 0

    def collect(self) -> Iterator[Metric]:
        states = [((str(number),), state) for number, state in enumerate(self.states)]
        running = [(replica, state.stats) for replica, state in states if state.stats is not None]

        def of_running(field: str) -> Values:
            return [(replica, attrgetter(field)(stats)) for replica, stats in running]

        yield _gauge("up", "whether the engine answers", [(replica, one.stats is not None) for replica, one in states])
        slots = [(replica, one.slots) for replica, one in states]
        yield _gauge("slots", "requests that the engine can run at once", slots)
        restarts = [(replica, one.restarts) for replica, one in states]
        yield _counter("restarts", "engines started after a crash", restarts)
        waiting = self.queued + sum(stats.waiting for _, stats in running)
        yield GaugeMetricFamily("sonoro_queue_depth", "requests that wait, before an engine or in it", value=waiting)
        for field, help in _GAUGES.items():
            yield _gauge(field, help, of_running(field))
        for kind in ("tick", "frame"):
            quantiles = [
                ((*replica, f"0.{part.removeprefix('p')}"), ms / 1000)
                for replica, stats in running
                for part, ms in getattr(stats, f"{kind}_ms").items()
            ]
            yield _gauge(f"{kind}_seconds", f"of the last {kind}s", quantiles, "quantile")
        for field, (called, help) in _COUNTED.items():
            yield _counter(called, help, of_running(field))
        yield _gauge("prefix_bytes", "size of the prefix cache", of_running("prefixes.kept_bytes"))
        help = "launches by kind of work, from a graph or eager"
        yield _counter("launches", help, _by_two(running, "launches"), "kind", "how")
        help = "shapes whose kernel could not be launched, by fallback: smaller blocks or the reference"
        yield _gauge("kernel_fallbacks", help, _by_two(running, "fallbacks"), "operation", "served_by")
        compiled = [(replica, sum(stats.compiled.values())) for replica, stats in running]
        help = "kernel variants that were compiled at their launch, while requests waited"
        yield _counter("kernels_compiled", help, compiled)


def _by_two(running: Sequence[tuple[tuple[str], Stats]], field: str) -> Values:
    """Values of the nested mapping `field` of each engine's stats, with both keys as labels."""
    return [
        ((*replica, one, other), count)
        for replica, stats in running
        for one, counts in getattr(stats, field).items()
        for other, count in counts.items()
    ]


Values = Sequence[tuple[Sequence[str], float]]
"""A metric's (label values, value) pairs; the first label is the replica's number."""

_GAUGES = {
    "running": "requests that hold a slot",
    "waiting": "requests that wait for a slot of the engine",
    "paused": "requests paused for a slow reader",
    "free_slots": "free slots",
    "free_pages": "free pages of the KV cache, idle cached ones included",
}
_COUNTED = {
    "broken_samples": ("broken_samples", "non-finite samples, sent as silence"),
    "preemptions": ("put_back", "preemptions for want of pages, before any audio was sent"),
    "prefixes.tokens_prefilled": ("prompt_tokens_prefilled", "prompt tokens that were prefilled"),
    "prefixes.tokens_cached": ("prompt_tokens_cached", "prompt tokens found in the prefix cache"),
    "prefixes.hits": ("prefix_hits", "prompts that began with cached pages"),
    "prefixes.misses": ("prefix_misses", "prompts with shareable pages of which none was cached"),
    "prefixes.evictions": ("prefix_evictions", "pages evicted from the prefix cache"),
}
"""Counters among an engine's stats: their names as metrics, and help texts."""


def _metric(
    family: type[GaugeMetricFamily | CounterMetricFamily], name: str, help: str, values: Values, *labels: str
) -> Metric:
    made = family(f"sonoro_engine_{name}", help, labels=["replica", *labels])
    for label, value in values:
        made.add_metric(label, value)
    return made


_gauge, _counter = partial(_metric, GaugeMetricFamily), partial(_metric, CounterMetricFamily)
