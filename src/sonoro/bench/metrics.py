"""Metrics of one request, of a level of load, and of an overload test, computed from noted times. docs/benchmark.md
defines them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

AUDIBLE = 0.01
"""Threshold of an audible sample, relative to full scale: -40 dB."""

CONTINUITY_GAP_S = 0.1
_GAPS_S = (0.05, 0.1, 0.2)
_FULL_SCALE = 32768
_BYTES_PER_SAMPLE = 2

REFUSED = "status 429"
"""The only failure allowed under overload."""

_TIMES_UNLOADED = 2.0
_RECOVERED = 1.2


class Playback(NamedTuple):
    """Playback of a request without a buffer: each sample plays once it has arrived and the ones before it are over.
    `gaps_s`: durations of the underruns. `audible_at_s`: when the first audible sample is played."""

    gaps_s: tuple[float, ...]
    audible_at_s: float | None


@dataclass
class Exchange:
    """One request and its response, PCM16 mono, little-endian. All times are of one clock, in seconds.
    `due_s`: scheduled time. `sent_s`: when its body was written to the connection, None if never. `arrivals`: time and
    number of samples of each chunk. `audible_sample`: index of the first above `AUDIBLE`. `error`: why it failed."""

    due_s: float
    sent_s: float | None = None
    first_byte_s: float | None = None
    ended_s: float = 0.0
    sample_rate: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    audible_sample: int | None = None
    error: str | None = None
    samples: int = 0
    _rest: bytes = b""

    @property
    def has_head(self) -> bool:
        """Whether the response's head was noted."""
        return self.sample_rate > 0 or self.error is not None

    def fail(self, error: str) -> None:
        """Note an error, unless there is one already."""
        self.error = self.error or error

    def end(self, now_s: float) -> None:
        """Note the end of the response; fails it if there was no audio or half a sample."""
        self.ended_s = now_s
        if not self.samples:
            self.fail("no audio")
        elif self._rest:
            self.fail("ended inside a sample")

    def take(self, data: bytes, now_s: float) -> None:
        """Note body bytes that arrived at `now_s`; ignored if the response has failed."""
        if not data or self.error is not None:
            return
        if self.first_byte_s is None:
            self.first_byte_s = now_s
        data = self._rest + data
        count = len(data) // _BYTES_PER_SAMPLE
        self._rest = data[count * _BYTES_PER_SAMPLE :]
        if count and self.audible_sample is None:
            levels = np.abs(np.frombuffer(data, dtype="<i2", count=count).astype(np.int32))
            above = np.flatnonzero(levels > AUDIBLE * _FULL_SCALE)
            self.audible_sample = self.samples + int(above[0]) if above.size else None
        if count:
            self.arrivals.append((now_s, count))
            self.samples += count

    @property
    def audio_s(self) -> float:
        return self.samples / self.sample_rate

    @cached_property
    def playback(self) -> Playback:
        """The playback; requires that the exchange has ended with at least one sample."""
        plays_until_s, played, gaps_s, audible_at_s = self.arrivals[0][0], 0, [], None
        for at_s, samples in self.arrivals:
            if at_s > plays_until_s:
                gaps_s.append(at_s - plays_until_s)
                plays_until_s = at_s
            if self.audible_sample is not None and played <= self.audible_sample < played + samples:
                audible_at_s = plays_until_s + (self.audible_sample - played) / self.sample_rate
            plays_until_s += samples / self.sample_rate
            played += samples
        return Playback(tuple(gaps_s), audible_at_s)


class Window(NamedTuple):
    """The time that counts, [`begin_s`, `end_s`)."""

    begin_s: float
    end_s: float

    def holds(self, at_s: float) -> bool:
        return self.begin_s <= at_s < self.end_s


def figures(exchanges: Sequence[Exchange], window: Window) -> dict[str, Any]:
    """The metrics of a row. Latencies are of requests due in the window, whenever they ended; rates are of audio that
    arrived and requests that ended in it, whenever sent. A metric without cases is None."""
    counted = [exchange for exchange in exchanges if window.holds(exchange.due_s)]
    succeeded = [exchange for exchange in counted if exchange.error is None]
    duration_s = window.end_s - window.begin_s
    ended = sum(exchange.error is None and window.holds(exchange.ended_s) for exchange in exchanges)
    audio_s = sum(
        samples / exchange.sample_rate
        for exchange in exchanges
        for at_s, samples in exchange.arrivals
        if window.holds(at_s)
    )
    row: dict[str, Any] = {
        "requests": len(counted),
        "succeeded": len(succeeded),
        "failed": len(counted) - len(succeeded),
        "duration_s": duration_s,
        "request_throughput": ended / duration_s,
        "audio_s_total": audio_s,
        "xrt": audio_s / duration_s,
        **_latencies(counted, succeeded),
        **_continuity(succeeded),
        "peak_in_flight": _peak(exchanges, window),
    }
    errors = Counter(exchange.error for exchange in counted if exchange.error is not None)
    return row | ({"errors": dict(errors.most_common())} if errors else {})


def _latencies(counted: Sequence[Exchange], succeeded: Sequence[Exchange]) -> dict[str, float | None]:
    lag_ms = [1000 * (exchange.sent_s - exchange.due_s) for exchange in counted if exchange.sent_s is not None]
    ttfb_ms, ttfp_ms, ttfa_ms, silence_ms, e2e_ms, rtf, audio_s = [], [], [], [], [], [], []
    for exchange in succeeded:
        assert exchange.sent_s is not None
        assert exchange.first_byte_s is not None
        ttfb_ms.append(1000 * (exchange.first_byte_s - exchange.sent_s))
        ttfp_ms.append(1000 * (exchange.arrivals[0][0] - exchange.sent_s))
        e2e_ms.append(1000 * (exchange.ended_s - exchange.sent_s))
        rtf.append((exchange.ended_s - exchange.sent_s) / exchange.audio_s)
        audio_s.append(exchange.audio_s)
        if exchange.audible_sample is not None and exchange.playback.audible_at_s is not None:
            ttfa_ms.append(1000 * (exchange.playback.audible_at_s - exchange.sent_s))
            silence_ms.append(1000 * exchange.audible_sample / exchange.sample_rate)
    return {
        **spread("lag", "_ms", lag_ms, "p50", "p95", "max"),
        **spread("ttfb", "_ms", ttfb_ms, "p50", "p95"),
        **spread("ttfp", "_ms", ttfp_ms, "mean", "p50", "p95", "p99"),
        **spread("ttfa", "_ms", ttfa_ms, "p50", "p95"),
        **spread("leading_silence", "_ms", silence_ms, "p50", "p95"),
        **spread("e2e", "_ms", e2e_ms, "mean", "p50", "p99"),
        **spread("rtf", "", rtf, "mean", "p50", "p99"),
        **spread("audio_s", "", audio_s, "mean", "p50", "p99"),
    }


def _continuity(succeeded: Sequence[Exchange]) -> dict[str, float | int | None]:
    gaps_s = [gap_s for exchange in succeeded for gap_s in exchange.playback.gaps_s]
    unbroken = sum(all(gap_s <= CONTINUITY_GAP_S for gap_s in exchange.playback.gaps_s) for exchange in succeeded)
    return {
        "underruns": len(gaps_s),
        "requests_underrun": sum(bool(exchange.playback.gaps_s) for exchange in succeeded),
        **{f"gaps_{1000 * limit_s:.0f}ms": sum(gap_s > limit_s for gap_s in gaps_s) for limit_s in _GAPS_S},
        "continuity": unbroken / len(succeeded) if succeeded else None,
    }


def spread(name: str, unit: str, values: Sequence[float], *which: str) -> dict[str, float | None]:
    """Mean, maximum and percentiles (linear between ranks) of `values`, as `name`_`which``unit`."""
    return {f"{name}_{part}{unit}": _part(values, part) for part in which}


def _part(values: Sequence[float], part: str) -> float | None:
    if not values:
        return None
    if part == "mean":
        return float(np.mean(values))
    return max(values) if part == "max" else float(np.percentile(values, int(part[1:])))


def _peak(exchanges: Iterable[Exchange], window: Window) -> int:
    """The most requests in flight at any time of the window."""
    changes = []
    for exchange in exchanges:
        if exchange.sent_s is not None and exchange.sent_s < window.end_s and exchange.ended_s > window.begin_s:
            changes += [(exchange.sent_s, 1), (exchange.ended_s, -1)]
    # At equal times, ends sort before starts.
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak


def judge(rows: Sequence[Mapping[str, Any]], max_queue_wait_ms: float) -> dict[str, Any]:
    """Judge the levels before, during and after an overload; `is_met` is whether all checks pass.
    Each check is a list of a value and its limit; a missing value fails."""
    before, during, after = rows
    failures = [row["failed"] - row.get("errors", {}).get(REFUSED, 0) for row in rows]
    checks = {"failed_but_429": [sum(failures), 0], "refused_unloaded": [before["failed"] + after["failed"], 0]}
    for name in ("ttfp_p50_ms", "ttfp_p95_ms"):
        checks[f"overload_{name}"] = [during[name], _over(before[name], _TIMES_UNLOADED, max_queue_wait_ms)]
    checks["recovery_ttfp_p50_ms"] = [after["ttfp_p50_ms"], _over(before["ttfp_p50_ms"], _RECOVERED, 0.0)]
    is_met = all(figure is not None and limit is not None and figure <= limit for figure, limit in checks.values())
    return {"is_met": is_met, "accepted": during["succeeded"], "refused": during["failed"] - failures[1], **checks}


def _over(figure: float | None, times: float, more: float) -> float | None:
    return None if figure is None else round(times * figure + more, 3)
