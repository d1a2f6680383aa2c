"""Simulate engines on many GPUs tick by tick, with times measured on one GPU.

The scheduler is the engine's own; the device's times come from results of `sonoro bench frame` and `bench engine`.
"""

from __future__ import annotations

import bisect
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, Self, cast

import numpy as np

from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError
from sonoro.engine.pages import PagePool
from sonoro.engine.request import Playback, Progress, Request
from sonoro.engine.scheduler import Plan, Scheduler
from sonoro.text.splitting import Segment, SpokenText

__all__ = ["Load", "Outcome", "Times", "simulate"]

_REQUEST = SimpleNamespace(is_reproducible=False)
"""The only attribute of a request that the scheduler reads."""

_TICK_WEIGHT = 0.2
"""Weight of the newest tick in the engine's moving average."""

_PROMPT_ROWS = 32
_ADDED_TICKS = 0.5
"""How many ticks a simulated request of a closed loop runs beyond one for each of its frames."""

_MOST_SIMULATED = 8
"""Most engines that are simulated; more are assumed to behave like these with their share of the load."""


@dataclass(frozen=True)
class Times:
    """Times measured on one GPU, in ms: a frame by batch size, and codec launches by chunk length.

    `prefill_ms`: additional time of a tick that starts requests; `overhead_ms`: time to first packet outside of ticks;
    `frame_s`: seconds of audio per frame.
    """

    frame: Mapping[int, float]
    codec: Mapping[int, Mapping[int, float]]
    frame_s: float
    prefill_ms: float
    overhead_ms: float
    _launches: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What a launch of so many rows takes, by the frames of a chunk; 0: that of a frame."""

    @classmethod
    def of(cls, frames: Mapping[str, Any], engine: Mapping[str, Any], server: Mapping[str, Any] | None = None) -> Self:
        """From the results of `bench frame` and `bench engine`, and of `bench serve` for a server's overhead.

        Only the rows of one client are used of the latter two. Raises `ConfigError` if they are missing.
        """
        # A failed measurement is None.
        whole = [row for row in frames["rows"] if None not in (row["xrt"], row["graph_ms"], *row["codec_ms"].values())]
        rows = {row["batch"]: row for row in sorted(whole, key=itemgetter("batch"))}
        alone: list[dict[str, Any]] = [
            next((row for row in file["rows"] if row.get("concurrency") == 1), {})
            for file in (engine, server or engine)
        ]
        if 1 not in rows or not all(alone):
            raise ConfigError("results", list(rows), "each must hold a whole row of one request alone")
        codec = {
            int(length): {batch: row["codec_ms"][length] for batch, row in rows.items()}
            for length in rows[1]["codec_ms"]
        }
        # With one client the longest ticks are those that start a request: a prefill, a frame and its audio.
        begin_ms = alone[0]["frame_p99_ms"]
        per_frame_ms = rows[1]["graph_ms"] + rows[1]["codec_ms"]["4"] / 4
        return cls(
            frame={batch: row["graph_ms"] for batch, row in rows.items()},
            codec=codec,
            frame_s=round(rows[1]["xrt"] * per_frame_ms / 1000, 4),
            prefill_ms=begin_ms - rows[1]["graph_ms"] - codec[1][1],
            overhead_ms=alone[1]["ttfp_p50_ms"] - begin_ms,
        )

    def paced(self, rows: Sequence[Mapping[str, Any]], frames: float) -> Times:
        """The times of a server of one GPU of which `rows` were measured: closed loops of `bench serve`, one of them of
        a single client, with requests of `frames` frames in the mean.

        A tick takes what makes the simulated throughput of each row the measured one, whatever is in the tick: only
        the prefill is apart, as before. Raises `ConfigError` without a row of one client.
        """
        measured = {row["concurrency"]: row for row in sorted(rows, key=itemgetter("concurrency"))}
        if 1 not in measured:
            raise ConfigError("measured", [*measured], "one GPU must have been measured with one client too")
        ticks = frames + _ADDED_TICKS
        taken_ms = {clients: 1000 * clients * frames * self.frame_s / row["xrt"] for clients, row in measured.items()}
        overhead_ms = measured[1]["ttfp_p50_ms"] - self.prefill_ms - taken_ms[1] / ticks
        frame = {
            clients: (ms - overhead_ms) / ticks - self.prefill_ms * -math.expm1(-clients / ticks)
            for clients, ms in taken_ms.items()
        }
        return replace(self, frame=frame, codec={}, overhead_ms=overhead_ms)

    def tick_s(self, plan: Plan, config: EngineConfig) -> float:
        """Seconds of the device for `plan`; `config` must be resolved."""
        tick_ms = self.prefill_ms if plan.admit else 0.0
        if not self.codec:
            return (tick_ms + _between(self.frame, max(1, len(plan.frame)))) / 1000
        if plan.frame:
            tick_ms += self._launch_ms(0, _padded(len(plan.frame), config.frame_batches))
        most = config.codec_batches[-1]
        for length, rows in plan.codec.items():
            for start in range(0, len(rows), most):
                tick_ms += self._launch_ms(length, _padded(min(most, len(rows) - start), config.codec_batches))
        return tick_ms / 1000

    def _launch_ms(self, length: int, rows: int) -> float:
        if (length, rows) not in self._launches:
            if length:
                codec = {known: _between(by_batch, rows) for known, by_batch in self.codec.items()}
                self._launches[length, rows] = _between(codec, length)
            else:
                self._launches[length, rows] = _between(self.frame, rows)
        return self._launches[length, rows]


@dataclass(frozen=True)
class Load:
    """An open loop of `rps` Poisson arrivals a second, or a closed loop of `clients`.

    Lasts `duration_s` after `warm_up_s`, which does not count. Lengths are random in `frames`, by `seed`. A request
    that has waited for a slot for `max_wait_s` is refused. Raises `ConfigError`.
    """

    frames: Sequence[int]
    rps: float = 0.0
    clients: int = 0
    duration_s: float = 20.0
    warm_up_s: float = 3.0
    seed: int = 0
    max_wait_s: float = math.inf

    def __post_init__(self) -> None:
        if (self.rps > 0) == (self.clients > 0):
            raise ConfigError("rps", self.rps, "give either rps or clients, above 0")
        if not self.frames or min(self.frames) < 1:
            raise ConfigError("frames", list(self.frames)[:5], "there must be lengths, each of at least one frame")


@dataclass(frozen=True)
class Outcome:
    """Results of a simulation: times to first packet, all of them in `first_ms`, xRT of all GPUs, the share of slots in
    use, and how long a request runs. `requests` were served, and `underruns` of them ran dry; others were `refused`.
    """

    requests: int
    ttfp_p50_ms: float
    ttfp_p95_ms: float
    ttfp_p99_ms: float
    xrt: float
    slots_held: float
    longest_queue: int
    held_s: float
    underruns: int
    refused: int
    first_ms: tuple[float, ...] = field(repr=False)


@dataclass
class _Engine:
    """One simulated engine and device. `now_s`: when the host plans next; `launched`: the tick to be collected."""

    times: Times
    config: EngineConfig
    count_sent: Callable[[Request, int, float], None]
    ended: Callable[[Request, float], None]
    now_s: float = 0.0
    free_s: float = 0.0
    tick_s: float = 0.04
    held: int = 0
    launched: deque[tuple[Plan, float]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        pages = self.config.slots * self.config.pages_per_slot
        self.scheduler = Scheduler(self.config, PagePool(pages), self.times.frame_s)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.launched)

    def add(self, frames: int, arrived_s: float, at_s: float) -> None:
        """Begin a request at `at_s` that arrived, and may have waited, since `arrived_s`."""
        prompt = SimpleNamespace(positions=_PROMPT_ROWS)
        # Half of the overhead is on the way to the engine.
        sent_s = arrived_s - self.times.overhead_ms / 2000
        request = Request(
            cast(Any, _REQUEST),
            [Segment(SpokenText(""), 0, 0)],
            None,
            Playback(sent_s),
            progress=Progress(cast(Any, prompt), frames),
        )
        request.playback.reached_at_s["slot"] = at_s
        if not self.has_work:
            self.now_s = max(self.now_s, at_s)
        self.held += 1
        self.scheduler.add(request)

    def tick(self) -> None:
        """Plan and launch a tick, then read the one before, as the engine does."""
        began_s, plan = self.now_s, self.scheduler.plan(self.now_s, self.tick_s)
        if not plan.is_empty:
            self.free_s = max(self.free_s, self.now_s) + self.times.tick_s(plan, self.config)
            self.launched.append((plan, self.free_s))
        if len(self.launched) > (0 if plan.is_empty else 1):
            done, at_s = self.launched.popleft()
            self.now_s = max(self.now_s, at_s)
            self._collect(done)
            if not plan.is_empty:
                self.tick_s += _TICK_WEIGHT * (self.now_s - began_s - self.tick_s)

    def _collect(self, plan: Plan) -> None:
        for request in plan.frame:
            request.progress.length += 1
            request.progress.is_done = request.progress.length >= request.progress.limit
        for frames, requests in plan.codec.items():
            for request in requests:
                if made := min(frames, request.progress.length - request.progress.decoded):
                    self.count_sent(request, made, self.now_s)
                    request.count_sent(made, self.now_s, made * self.times.frame_s)
        for request in [request for request in self.scheduler.running if request.progress.is_drained]:
            self.scheduler.release(request)
            self.held -= 1
            self.ended(request, self.now_s)


def simulate(times: Times, config: EngineConfig, gpus: int, load: Load) -> Outcome:
    """Simulate `load` on `gpus` engines of `config`; each request goes to the least busy engine.

    It is routed as by `Fleet`, whose front processes see the requests of all fronts, once it has passed the gate, which
    lets in as many as there are slots: the first to come, or, when that one has waited for half of `max_wait_s`, the
    last. Raises `ConfigError` for requests that never fit an engine, or if none arrived in the measured time.
    """
    if gpus < 1:
        raise ConfigError("gpus", gpus, "it must be at least 1")
    most = config.slots * config.max_positions - _PROMPT_ROWS
    if max(load.frames) > most:
        raise ConfigError("lengths", f"{max(load.frames)} frames", f"{config.slots} slots hold {most} at most")
    outcome = _Simulation(times, config.resolve(), gpus, load).run()
    if not outcome.requests:
        raise ConfigError("duration_s", load.duration_s, "no request came in that time; simulate longer")
    return outcome


class _Simulation:
    def __init__(self, times: Times, config: EngineConfig, gpus: int, load: Load) -> None:
        self._times, self._config, self._load = times, config, load
        self._scale = gpus / min(gpus, _MOST_SIMULATED)
        self._engines = [_Engine(times, config, self._hear, self._end) for _ in range(min(gpus, _MOST_SIMULATED))]
        self._lengths = self._draw_lengths()
        self._end_s = load.warm_up_s + load.duration_s
        self._due = [(at_s, at_s) for at_s in self._arrivals()]
        """When a request comes or gets a permit, and when it came."""
        heapq.heapify(self._due)
        self._permits, self._waiting = config.slots * len(self._engines), deque[float]()
        self._first_ms: list[float] = []
        self._held_s: list[float] = []
        self._dry: set[Request] = set()
        self._audio_s, self._held, self._ticks, self._longest, self._refused = 0.0, 0, 0, 0, 0

    def run(self) -> Outcome:
        while self._due or any(engine.has_work for engine in self._engines):
            busy = min(
                (engine for engine in self._engines if engine.has_work), key=lambda engine: engine.now_s, default=None
            )
            if self._due and (busy is None or self._due[0][0] <= busy.now_s):
                self._begin(*heapq.heappop(self._due))
            elif busy is not None:
                busy.tick()
                self._note(busy)
        p50_ms, p95_ms, p99_ms = map(float, np.percentile(self._first_ms or [0.0], (50, 95, 99)))
        return Outcome(
            requests=len(self._first_ms),
            ttfp_p50_ms=p50_ms,
            ttfp_p95_ms=p95_ms,
            ttfp_p99_ms=p99_ms,
            xrt=self._audio_s / self._load.duration_s * self._scale,
            slots_held=self._held / max(self._ticks, 1) / self._config.slots,
            longest_queue=self._longest,
            held_s=float(np.mean(self._held_s or [0.0])),
            underruns=len(self._dry),
            refused=self._refused,
            first_ms=tuple(self._first_ms),
        )

    def _begin(self, at_s: float, arrived_s: float) -> None:
        """Start a request that has just come, if there is a permit, or that has just got one."""
        if arrived_s == at_s:
            if not self._permits:
                self._waiting.append(at_s)
                if self._counts(at_s):
                    self._longest = max(self._longest, len(self._waiting))
                return
            self._permits -= 1
        min(self._engines, key=lambda engine: engine.held).add(next(self._lengths), arrived_s, at_s)

    def _draw_lengths(self) -> Iterator[int]:
        draw = random.Random(f"{self._load.seed}/frames")
        while True:
            yield draw.choice(self._load.frames)

    def _arrivals(self) -> Iterator[float]:
        draw, at_s = random.Random(f"{self._load.seed}/arrivals"), 0.0
        if self._load.clients:
            yield from (draw.random() * 0.1 for _ in range(round(self._load.clients / self._scale)))
            return
        while (at_s := at_s + draw.expovariate(self._load.rps / self._scale)) < self._end_s:
            yield at_s

    def _counts(self, at_s: float) -> bool:
        return self._load.warm_up_s <= at_s < self._end_s

    def _note(self, engine: _Engine) -> None:
        if self._counts(engine.now_s):
            self._ticks += 1
            self._held += self._config.slots - engine.scheduler.free_slots

    def _hear(self, request: Request, frames: int, now_s: float) -> None:
        if self._counts(request.playback.accepted_at_s):
            if not request.playback.has_begun:
                self._first_ms.append(1000 * (now_s - request.playback.accepted_at_s) + self._times.overhead_ms / 2)
            elif request.playback.left_s(now_s) < 0:
                self._dry.add(request)
        if self._counts(now_s):
            self._audio_s += frames * self._times.frame_s

    def _end(self, request: Request, now_s: float) -> None:
        if self._counts(request.playback.accepted_at_s):
            self._held_s.append(now_s - request.playback.reached_at_s["slot"])
        self._pass_permit(now_s)
        if self._load.clients and now_s < self._end_s:
            heapq.heappush(self._due, (next_s := now_s + self._times.overhead_ms / 1000, next_s))

    def _pass_permit(self, now_s: float) -> None:
        """Give the permit of a request that has ended to one that waits."""
        waiting, longest_s = self._waiting, self._load.max_wait_s
        while waiting and now_s - waiting[0] > longest_s:
            self._refused += self._counts(waiting.popleft())
        if waiting:
            is_overloaded = now_s - waiting[0] > longest_s / 2
            heapq.heappush(self._due, (now_s, waiting.pop() if is_overloaded else waiting.popleft()))
        else:
            self._permits += 1


def _padded(count: int, sizes: Sequence[int]) -> int:
    at = bisect.bisect_left(sizes, count)
    return count if at == len(sizes) else sizes[at]


def _between(known: Mapping[int, float], at: int) -> float:
    """Linear interpolation of `known` at `at`, extrapolated beyond the last."""
    return (
        float(np.interp(at, list(known), list(known.values())))
        if at <= max(known)
        else known[max(known)] * at / max(known)
    )
