"""Prometheus metrics: requests by how they ended, their times, and the engines' own figures.

Each belongs to one `Metrics`, so that two servers of a process share none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sonoro.transport.messages import PrefixCounts, Stats

__all__ = ["EngineState", "Metrics", "Observation"]

_SECONDS = (0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.35, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
_RTF = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0)


@dataclass(frozen=True)
class EngineState:
    """The state of one engine; without `stats` it counts as down."""

    stats: Stats | None
    restarts: int
    slots: int


class Metrics:
    """The counts of one server. `model` is empty until the engine is ready."""

    def __init__(self) -> None:
        self.model = ""
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "sonoro_requests", "requests by how they ended", ["model", "dialect", "reason"], registry=self._registry
        )
        self.in_flight = Gauge("sonoro_requests_in_flight", "requests under way or waiting", registry=self._registry)
        self.first_packet = Histogram(
            "sonoro_first_packet_seconds",
            "from a request's arrival to its first bytes of audio",
            ["model", "dialect"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.end_to_end = Histogram(
            "sonoro_request_seconds",
            "from a request's arrival to its last byte",
            ["model"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.rtf = Histogram(
            "sonoro_rtf",
            "time over audio time of whole answers",
            ["model"],
            buckets=_RTF,
            registry=self._registry,
        )
        self.audio = Counter("sonoro_audio_seconds", "audio made", ["model"], registry=self._registry)
        self.underruns = Counter(
            "sonoro_underruns",
            "times that a listener without a buffer had nothing left to play",
            ["model"],
            registry=self._registry,
        )
        self._engines = _EngineCollector()
        self._registry.register(self._engines)

    def refused(self, reason: str, dialect: str = "native") -> None:
        """Count a request that was refused before it ran."""
        self.requests.labels(self.model, dialect, reason).inc()

    def exposition(self, engines: Sequence[EngineState], *, queued: int) -> bytes:
        """Everything in Prometheus' text format; `queued` requests wait at the gate."""
        self._engines.states, self._engines.queued = engines, queued
        return generate_latest(self._registry)


class Observation:
    """One request as it goes, since `arrived_s` on the clock of `time.perf_counter`; `end` counts it.

    Its audio is played at `speed`. Its client speaks `dialect`: "native" is ours, OpenAI's included.
    """

    def __init__(
        self, metrics: Metrics, sample_rate: int, arrived_s: float, speed: float = 1.0, dialect: str = "native"
    ) -> None:
        self._metrics, self._rate, self._arrived_s, self._speed = metrics, sample_rate, arrived_s, speed
        self._dialect = dialect
        self._bytes = 0
        self._unsent_s = 0.0
        self._played_until_s = float("inf")
        self.first_packet_s: float | None = None
        metrics.in_flight.inc()
        metrics.underruns.labels(metrics.model)  # there at 0, so that one more is seen as a rise

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._arrived_s

    @property
    def audio_s(self) -> float:
        return self._bytes / 2 / self._rate

    def made(self, pcm: bytes) -> None:
        """Add `pcm` (PCM16 mono) from the engine."""
        self._bytes += len(pcm)
        self._unsent_s += len(pcm) / 2 / self._rate / self._speed
        self._metrics.audio.labels(self._metrics.model).inc(len(pcm) / 2 / self._rate)

    def sent(self) -> None:
        """Audio was sent: all that was made so far, but for what an encoder holds back."""
        now_s = self.elapsed_s
        if self.first_packet_s is None:
            self.first_packet_s = self._played_until_s = now_s
            self._metrics.first_packet.labels(self._metrics.model, self._dialect).observe(now_s)
        elif now_s > self._played_until_s:
            self._metrics.underruns.labels(self._metrics.model).inc()
        self._played_until_s = max(self._played_until_s, now_s) + self._unsent_s
        self._unsent_s = 0.0

    def end(self, reason: str, *, is_whole: bool) -> None:
        """Count its end; times count only if the client got the whole of it."""
        model, elapsed_s = self._metrics.model, self.elapsed_s
        self._metrics.in_flight.dec()
        self._metrics.requests.labels(model, self._dialect, reason).inc()
        if is_whole:
            self._metrics.end_to_end.labels(model).observe(elapsed_s)
            if self._bytes:
                self._metrics.rtf.labels(model).observe(elapsed_s / self.audio_s)


class _EngineCollector(Collector):
    """The last figures of the engines, labelled by their number as `replica`."""

    def __init__(self) -> None:
        self.states: Sequence[EngineState] = ()
        self.queued = 0

    def collect(self) -> Iterator[Metric]:
        states = self.states
        yield _by_replica("up", "whether the engine answers", [float(state.stats is not None) for state in states])
        yield _by_replica("slots", "requests that the engine can run at once", [state.slots for state in states])
        yield _by_replica(
            "restarts", "engines started after a crash", [state.restarts for state in states], CounterMetricFamily
        )
        running = [state.stats for state in states]
        waiting = self.queued + sum(stats.waiting for stats in running if stats)
        yield GaugeMetricFamily("sonoro_queue_depth", "requests that wait, before an engine or in it", value=waiting)
        for name, help in (
            ("running", "requests that hold a slot"),
            ("waiting", "requests that wait for a slot of the engine"),
            ("paused", "requests held back for a slow reader"),
            ("free_slots", "slots that nobody holds"),
            ("free_pages", "pages that nobody holds"),
        ):
            yield _by_replica(name, help, [None if stats is None else getattr(stats, name) for stats in running])
        for name in ("tick", "frame"):
            yield _times(name, running)
        yield _by_replica(
            "broken_samples",
            "samples that were not finite, and were sent as silence",
            [None if stats is None else stats.broken_samples for stats in running],
            CounterMetricFamily,
        )
        yield from _shared_prompts([None if stats is None else stats.prefixes for stats in running])
        yield _launches(running)
        yield _fallbacks(running)
        yield _by_replica(
            "kernels_compiled",
            "kernel variants that were compiled only once they were launched, while streams waited",
            [None if stats is None else sum(stats.compiled.values()) for stats in running],
            CounterMetricFamily,
        )


def _by_replica(
    name: str,
    help: str,
    values: Sequence[float | None],
    family: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    """One value per engine; None is left out."""
    made = family(f"sonoro_engine_{name}", help, labels=["replica"])
    for replica, value in enumerate(values):
        if value is not None:
            made.add_metric([str(replica)], value)
    return made


def _shared_prompts(found: Sequence[PrefixCounts | None]) -> Iterator[Metric]:
    for field, name, help in (
        ("rows_prefilled", "prompt_rows_prefilled", "prompt rows that were run"),
        ("rows_cached", "prompt_rows_cached", "prompt rows that an earlier prompt had run"),
        ("hits", "prefix_hits", "prompts that began with pages of an earlier one"),
        ("misses", "prefix_misses", "prompts that could have, if one had begun alike"),
        ("evictions", "prefix_evictions", "kept pages that were given up for others"),
    ):
        yield _by_replica(
            name, help, [None if counts is None else getattr(counts, field) for counts in found], CounterMetricFamily
        )
    kept = [None if counts is None else counts.kept_bytes for counts in found]
    yield _by_replica("prefix_bytes", "pages kept for prompts that begin alike", kept)


def _times(name: str, running: Sequence[Stats | None]) -> Metric:
    times = GaugeMetricFamily(f"sonoro_engine_{name}_seconds", f"of the last {name}s", labels=["replica", "quantile"])
    for replica, stats in enumerate(running):
        percentiles = {} if stats is None else stats.tick_ms if name == "tick" else stats.frame_ms
        for percentile, value_ms in percentiles.items():
            times.add_metric([str(replica), f"0.{percentile.removeprefix('p')}"], value_ms / 1000)
    return times


def _launches(running: Sequence[Stats | None]) -> Metric:
    launches = CounterMetricFamily(
        "sonoro_engine_launches", "units of work by kind, and whether from a graph", labels=["replica", "kind", "how"]
    )
    for replica, stats in enumerate(running):
        for kind, counts in (stats.launches if stats else {}).items():
            for how, count in counts.items():
                launches.add_metric([str(replica), kind, how], count)
    return launches


def _fallbacks(running: Sequence[Stats | None]) -> Metric:
    fallbacks = GaugeMetricFamily(
        "sonoro_engine_kernel_fallbacks",
        "shapes whose kernel could not be launched, and what serves: smaller blocks, or the reference",
        labels=["replica", "operation", "served_by"],
    )
    for replica, stats in enumerate(running):
        for operation, counts in (stats.fallbacks if stats else {}).items():
            for served_by, count in counts.items():
                fallbacks.add_metric([str(replica), operation, served_by], count)
    return fallbacks
