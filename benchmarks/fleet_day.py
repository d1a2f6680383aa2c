"""A day of a fleet of equal hosts: arrivals by the hour, failures, and what listeners get. Needs no GPU.

No day is simulated tick by tick. One host is, at a few rates, for some seconds each. A day is then a walk in steps of
half a minute: in each step a GPU has the first packets, underruns and refusals of its share of the arrivals. Hosts
count as equally busy: behind a balancer that takes the less busy of two, ten hosts with 1,440 requests each were
at most five above the mean for 99% of the time (136, if it takes any). What a step of load or a failure does within
its first seconds is not seen.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from simulation import Load, Times, simulate
from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError
from sonoro.scale_wait import ReplicaLoad, replicas_for

__all__ = ["Autoscaler", "Day", "Level", "fewest_hosts", "levels_of", "rates_by_hour", "rates_of", "walk"]

STEP_S = 30.0
UP_S, DOWN_S = 30.0, 600.0
"""Ray Serve's delays."""

_STEPS = round(3600 / STEP_S)

_SHARES = (0.05, 0.2, 0.4, 0.55, 0.7, 0.8, 0.87, 0.93, 0.98, 1.3)
"""The rates that are simulated, as shares of what a GPU with all slots in use does."""

_POINTS = (np.arange(1000) + 0.5) / 10
"""The percentiles by which a distribution is kept."""

MOST_REFUSED = 0.001
"""The share of requests that may be refused in an hour by a fleet that is large enough."""


Shown = TypeVar("Shown", int, float)


def _shown(default: Shown, help: str) -> Shown:
    """A field of a dataclass that the command line shows."""
    return cast(Shown, field(default=default, metadata={"help": f"{help} ({default:g})"}))


@dataclass(frozen=True)
class Day:
    """Arrivals and failures. `rates` are requests a second at even distances over 24 hours, the first at midnight.

    An engine fails every `gpu_mtbf_h` hours and is restarted within `gpu_restart_s`, a whole host every `host_mtbf_h`
    and `host_restart_s`; another host serves `host_start_s` after it was asked for: assumptions, not measurements.
    `hosts`: 0 for one more than keep p95 below `target_ms`. `days` are walked, for the failures. Raises `ConfigError`.
    """

    rates: tuple[float, ...]
    hosts: int = _shown(0, "of the fixed fleet; one more than needed if not given")
    gpus_per_host: int = _shown(8, "each with an engine")
    target_ms: float = _shown(100.0, "highest p95 of an hour, and target_wait_ms of the scaled fleet")
    gpu_mtbf_h: float = _shown(1000.0, "hours between two failures of an engine")
    gpu_restart_s: float = _shown(30.0, "seconds until it is back")
    host_mtbf_h: float = _shown(2000.0, "hours between two failures of a host")
    host_restart_s: float = _shown(1800.0, "seconds until it is back")
    host_start_s: float = _shown(300.0, "seconds until another host serves")
    days: int = _shown(7, "how many are walked")

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= rate < math.inf for rate in self.rates) or not any(self.rates):
            raise ConfigError("rates", self.rates[:5], "there must be some, each at least 0 and one above")
        for name, least in (("hosts", 0), ("gpus_per_host", 1), ("days", 1)):
            if getattr(self, name) < least:
                raise ConfigError(name, getattr(self, name), f"it must be at least {least}")
        for name in ("target_ms", "gpu_mtbf_h", "gpu_restart_s", "host_mtbf_h", "host_restart_s", "host_start_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(name, getattr(self, name), "it must be above 0")

    def rps(self, at_h: float) -> float:
        """Arrivals a second at an hour, which may be of a later day."""
        count = len(self.rates)
        at = at_h % 24 / 24 * count
        first = int(at) % count
        return self.rates[first] + (at - int(at)) * (self.rates[(first + 1) % count] - self.rates[first])


def rates_by_hour(peak_rps: float) -> tuple[float, ...]:
    """24 rates: a cosine with its peak at 16:00 and a fifth of it at 4:00."""
    return tuple(peak_rps * (0.6 + 0.4 * math.cos(2 * math.pi * (hour - 16) / 24)) for hour in range(24))


def rates_of(path: Path) -> tuple[float, ...]:
    """The rates in the file `path`, one number a line. Raises `ConfigError`."""
    try:
        return tuple(float(line) for line in path.read_text(encoding="utf-8").split())
    except (OSError, ValueError) as error:
        raise ConfigError("day", str(path), f"it must hold requests a second, one number a line ({error})") from error


@dataclass(frozen=True)
class Level:
    """What one GPU of a host gives at `rps` requests a second: the shares that are refused, and that run dry; seconds
    that a request holds a slot; and the first packets of the others by percentile."""

    rps: float
    refused: float
    dry: float
    held_s: float
    first_ms: NDArray[np.float64] = field(repr=False)

    @property
    def running(self) -> float:
        """How many requests a GPU runs."""
        return self.rps * (1 - self.refused) * self.held_s


def load_at(levels: Sequence[Level], rps: float, slots: int) -> ReplicaLoad:
    """What a GPU that gets `rps` tells of its load. It has learnt how times grow between the two levels around that."""
    second = min(max(bisect.bisect_right([level.rps for level in levels], rps), 1), len(levels) - 1)
    near = levels[second - 1 : second + 1]
    rates, held_s = [level.rps for level in near], [level.held_s for level in near]
    running = float(np.interp(rps, rates, [level.running for level in near]))
    first_ms = float(np.interp(rps, rates, [level.first_ms.mean() for level in near]))
    now_s = float(np.interp(rps, rates, held_s))
    slope = (held_s[1] - held_s[0]) / max(near[1].running - near[0].running, 1e-9)
    growth = min(1.0, max(0.0, slope * running / now_s))
    return ReplicaLoad(running, 0.0, slots, first_ms / 1000, now_s, growth, growth)


def levels_of(times: Times, config: EngineConfig, gpus: int, load: Load) -> list[Level]:
    """Simulate a host of `gpus` at rates up to 1.3 times what it can do, with the lengths, longest wait and seed of
    `load`."""
    full = replace(load, rps=0.0, clients=config.slots, duration_s=3.0, warm_up_s=2.0)
    most_rps = simulate(times, config, 1, full).xrt / (float(np.mean(load.frames)) * times.frame_s)
    levels = []
    for share in _SHARES:
        rps = share * most_rps
        # Beyond 1 a queue needs time to become as long as it gets, and all engines of a host are as busy.
        count, warm_up_s = (1, 4 * load.max_wait_s) if share > 1 else (gpus, 2.0)
        # A few thousand requests tell a p99.
        duration_s = min(max(3.0, 3000 / (count * rps)), 60.0)
        at_rate = replace(load, rps=count * rps, clients=0, duration_s=duration_s, warm_up_s=warm_up_s)
        outcome = simulate(times, config, count, at_rate)
        refused = outcome.refused / (outcome.requests + outcome.refused)
        first_ms = np.percentile(outcome.first_ms, _POINTS)
        levels.append(Level(rps, refused, outcome.underruns / outcome.requests, outcome.held_s, first_ms))
    return levels


@dataclass(frozen=True)
class Hour:
    """An hour of all walked days: the mean of the GPUs that `ran` and that were `paid` for; percentiles of first
    packets; and of a thousand requests those that were refused, ran dry, or broke off with their engine."""

    hour: int
    rps: float
    ran: float
    paid: float
    ttfp_p50_ms: float
    ttfp_p95_ms: float
    ttfp_p99_ms: float
    refused_permille: float
    dry_permille: float
    broken_permille: float


class _Sums:
    """What happened in one hour of the day."""

    def __init__(self, levels: Sequence[Level]) -> None:
        self._levels, self._rates = levels, [level.rps for level in levels]
        self._served = np.zeros(len(levels))
        self._asked, self._refused, self._broken, self._ran, self._paid, self._steps = 0.0, 0.0, 0.0, 0.0, 0.0, 0

    def add(self, asked: float, ran: int, paid: int, broken_gpus: int) -> None:
        """A step in which `asked` requests came to the GPUs that `ran`, beside those that failed in it."""
        self._asked, self._steps = self._asked + asked, self._steps + 1
        self._ran, self._paid = self._ran + ran, self._paid + paid
        if not ran:
            self._refused += asked
            return
        rps = asked / STEP_S / ran
        last = self._rates[-1]
        at = min(max(bisect.bisect_right(self._rates, rps), 1), len(self._rates) - 1)
        part = min(max((rps - self._rates[at - 1]) / (self._rates[at] - self._rates[at - 1]), 0.0), 1.0)
        refused = self._between("refused", at, part)
        if rps > last:
            refused = 1 - (1 - refused) * last / rps
        served = asked * (1 - refused)
        self._served[at - 1 : at + 1] += served * (1 - part), served * part
        self._refused += asked - served
        before = min(asked / STEP_S / (ran + broken_gpus), last)
        self._broken += broken_gpus * before * self._between("held_s", at, part)

    def _between(self, name: str, at: int, part: float) -> float:
        first, second = (getattr(self._levels[number], name) for number in (at - 1, at))
        return float(first + part * (second - first))

    def hour(self, number: int) -> Hour:
        served, asked = self._served.sum(), max(self._asked, 1e-9)
        first_ms = np.concatenate([level.first_ms for level in self._levels])
        weights = np.repeat(self._served, len(_POINTS))
        order = np.argsort(first_ms)
        below = np.cumsum(weights[order])

        def percentile(percent: float) -> float:
            if not served:
                return math.inf
            return float(first_ms[order][np.searchsorted(below, percent / 100 * below[-1])])

        dry = sum(count * level.dry for count, level in zip(self._served, self._levels, strict=True))
        return Hour(
            hour=number,
            rps=self._asked / (self._steps * STEP_S),
            ran=self._ran / self._steps,
            paid=self._paid / self._steps,
            ttfp_p50_ms=percentile(50),
            ttfp_p95_ms=percentile(95),
            ttfp_p99_ms=percentile(99),
            refused_permille=1000 * self._refused / asked,
            dry_permille=1000 * float(dry) / asked,
            broken_permille=1000 * self._broken / asked,
        )


@dataclass
class Autoscaler:
    """Ray Serve with the policy of `sonoro.scale`, of replicas that are hosts of GPUs with `slots` each: what is wanted
    for `UP_S` is added at once, one host that is not for `DOWN_S` goes. `target_s`: the mean wait for a first packet.
    """

    levels: Sequence[Level]
    slots: int
    target_s: float
    least: int
    _unwanted_s: float = 0.0
    _missed_s: float = 0.0

    def hosts(self, running: int, asked: int, rps: float) -> int:
        """How many hosts there should be of `asked`, while `running` of them serve and their GPUs get `rps` each."""
        if not running:
            return max(asked, self.least)
        wanted = max(self.least, replicas_for([load_at(self.levels, rps, self.slots)] * running, self.target_s))
        self._missed_s = self._missed_s + STEP_S if wanted > asked else 0.0
        self._unwanted_s = self._unwanted_s + STEP_S if wanted < asked else 0.0
        if self._missed_s > UP_S or self._unwanted_s > DOWN_S:
            self._missed_s = self._unwanted_s = 0.0
            return wanted
        return asked


def walk(
    day: Day, levels: Sequence[Level], hosts: int, seed: int = 0, autoscaler: Autoscaler | None = None
) -> list[Hour]:
    """The hours of a fleet of so many `hosts`, or as many as the `autoscaler` wants, of which that many begin. With
    one, another host takes the place of a failed one."""
    draw, sums = np.random.default_rng(seed), [_Sums(levels) for _ in range(24)]
    # When each host runs again, and each engine that has failed on a host that runs.
    ready_s, down_s = [0.0] * hosts, list[float]()
    for step in range(24 * _STEPS * day.days):
        now_s = step * STEP_S
        down_s = [again_s for again_s in down_s if again_s > now_s]
        up = [number for number, again_s in enumerate(ready_s) if again_s <= now_s]
        failed = _failures(draw, len(up), day.host_mtbf_h)
        for number in up[:failed]:
            ready_s[number] = now_s + (day.host_restart_s if autoscaler is None else day.host_start_s)
        gpus = max(0, (len(up) - failed) * day.gpus_per_host - len(down_s))
        crashed = _failures(draw, gpus, day.gpu_mtbf_h)
        down_s += [now_s + day.gpu_restart_s] * crashed
        asked = day.rps(now_s / 3600) * STEP_S
        broken = crashed + failed * day.gpus_per_host
        sums[step // _STEPS % 24].add(asked, gpus - crashed, len(ready_s) * day.gpus_per_host, broken)
        if autoscaler is not None and gpus > crashed:
            wanted = autoscaler.hosts(len(up) - failed, len(ready_s), asked / STEP_S / (gpus - crashed))
            # Those that do not serve yet go first.
            ready_s = sorted(ready_s)[:wanted] + [now_s + day.host_start_s] * (wanted - len(ready_s))
    return [each.hour(number) for number, each in enumerate(sums)]


def _failures(draw: np.random.Generator, running: int, mtbf_h: float) -> int:
    return min(running, int(draw.poisson(running * STEP_S / 3600 / mtbf_h)))


def fewest_hosts(day: Day, levels: Sequence[Level], seed: int = 0) -> int:
    """The fewest hosts that keep the p95 of every hour below the target and refuse at most `MOST_REFUSED` of it, with
    failures as they come. Raises `ConfigError` if no number does."""
    idle_ms = float(levels[0].first_ms[950])
    if idle_ms > day.target_ms:
        raise ConfigError("target_ms", day.target_ms, f"it must be at least {idle_ms:.1f}, the p95 of an idle GPU")

    def is_enough(hosts: int) -> bool:
        return all(
            hour.ttfp_p95_ms <= day.target_ms and hour.refused_permille <= 1000 * MOST_REFUSED
            for hour in walk(day, levels, hosts, seed)
            if hour.rps
        )

    # So many serve the peak at the lowest rate that was simulated; the further ones, while hosts are down.
    most = 3 + 2 * math.ceil(max(day.rates) / levels[0].rps / day.gpus_per_host)
    return 1 + bisect.bisect_left(range(1, most), True, key=is_enough)


def rows_of(fleet: str, hours: Sequence[Hour]) -> Iterator[dict[str, Any]]:
    """Rows of a results file."""
    for hour in hours:
        yield {"fleet": fleet, **vars(hour)}
