"""Load a speech server, in an open or closed loop, and measure its responses: `sonoro bench serve`."""

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sonoro.bench.client import SpeechClient, Target
from sonoro.bench.dataset import BUILTIN, Prompt, cloned, prompts
from sonoro.bench.level import Level, asks
from sonoro.bench.machine import gpu_driver, processor
from sonoro.bench.metrics import figures, judge
from sonoro.bench.report import Report
from sonoro.bench.workers import LEAD_S, Workers
from sonoro.core.config import usable_cores
from sonoro.core.errors import ConfigError, EngineError

FACTS = ("arm", "gpu", "cpu", "driver", "torch", "dtype")
"""Fields of a results file about the server, which a client cannot see."""

MAX_LAG_MS = 5.0
"""Scheduling lag (p95) above which the client itself may be the bottleneck."""

_RATE_EACH, _CLIENTS_EACH, _CORES_EACH = 100, 64, 4
"""Default load per client process (requests a second, clients), and cores per process; the server needs the rest."""

_LOCAL = ("localhost", "127.0.0.1", "::1")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadBench:
    """The options that all loads on a server share; `facts` are values of `FACTS`. Raises `ConfigError`."""

    target: Target
    seed: int = 0
    dataset: str = BUILTIN
    frames: tuple[int, int] | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    out: Path | None = None
    commit: str | None = None

    def __post_init__(self) -> None:
        fewest, most = self.frames or (1, 1)
        ConfigError.unless(1 <= fewest <= most, "frames", self.frames, "they must ascend, from 1")
        for name in self.facts:
            ConfigError.unless(name in FACTS, "facts", name, "it may hold " + ", ".join(FACTS))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the load depends on, for the results file; without the API key."""
        own = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name not in _NO_SETTINGS}
        settings = {name: list(value) or None if isinstance(value, tuple) else value for name, value in own.items()}
        settings["dataset"] = self.dataset if self.dataset == BUILTIN else Path(self.dataset).name
        asked = {"url": self.target.url, "voice": self.target.voice, "extra": dict(self.target.extra) or None}
        return asked | settings


_NO_SETTINGS = ("target", "speaker", "facts", "out", "commit")


@dataclass(frozen=True)
class ServeBench(LoadBench):
    """The options of `sonoro bench serve`; `speaker` is the class of clients. `warm_up_s` come before `duration_s`."""

    rps: tuple[float, ...] = ()
    concurrency: tuple[int, ...] = ()
    duration_s: tuple[float, ...] = (20.0,)
    warm_up_s: float = 3.0
    ref: str | None = None
    ref_text: str | None = None
    x_vector_only: bool = False
    speaker: type[SpeechClient] = SpeechClient
    processes: int = 0
    max_queue_wait_ms: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rates, clients, durations_s, wait_ms = self.rps, self.concurrency, self.duration_s, self.max_queue_wait_ms
        check, levels = ConfigError.unless, len(self.loads)
        check(bool(rates) != bool(clients), "rps", rates, "give either rps or concurrency")
        check(all(0 < rate < math.inf for rate in rates), "rps", rates, "each must be above 0")
        check(all(count >= 1 for count in clients), "concurrency", clients, "each must be at least 1")
        each = f"give one, or {levels}: one for each level"
        check(len(durations_s) in (1, levels), "duration_s", durations_s, each)
        check(all(0 < one_s < math.inf for one_s in durations_s), "duration_s", durations_s, "each must be above 0")
        check(0 <= self.warm_up_s < math.inf, "warm_up_s", self.warm_up_s, "it must be at least 0")
        check(0 <= self.processes <= 256, "processes", self.processes, "it must be from 0 to 256; 0 chooses")
        judged = "it must be at least 0, with three rates: below, above and below again"
        check(wait_ms is None or (len(rates) == 3 and wait_ms >= 0), "overload", wait_ms, judged)

    @property
    def loads(self) -> tuple[float, ...]:
        """The load of each level."""
        return self.rps or self.concurrency

    @property
    def levels(self) -> tuple[tuple[float, float], ...]:
        """Load and duration in seconds of each level."""
        durations_s = self.duration_s * (len(self.loads) // len(self.duration_s))
        return tuple(zip(self.loads, durations_s, strict=True))

    def shares(self, load: float) -> int:
        """Number of processes that send `load`."""
        if self.processes:
            return self.processes
        wanted = math.ceil(load / (_RATE_EACH if self.rps else _CLIENTS_EACH))
        return max(1, min(wanted, usable_cores() // _CORES_EACH))

    @property
    def settings(self) -> dict[str, Any]:
        own = {"clients": self.speaker.name, "timeout_s": self.target.timeout_s}
        own |= {"x_vector_only": self.x_vector_only or None, "processes": self.processes or "by load"}
        return super().settings | own | {"ref": None if self.ref is None else Path(self.ref).name}


def facts_of_server(target: Target, listed: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The `FACTS` as `given`, else as `listed` by the server, else of this machine if the server is local."""
    said = listed.get("facts")
    known = {**(said if isinstance(said, Mapping) else {}), **given}
    if urlsplit(target.url).hostname in _LOCAL:
        known = {"driver": gpu_driver(), "cpu": None if known.get("gpu") else processor(), **known}
    return {name: known.get(name) for name in FACTS}


def run(bench: ServeBench) -> dict[str, Any]:
    """Load the server, print the results, and return the contents of the results file.
    Raises `EngineError` if the first request or a client process fails, or at the end if a level had no success."""
    texts = cloned(prompts(bench.dataset), bench.ref, bench.ref_text, x_vector_only=bench.x_vector_only)
    top = asyncio.run(_first(bench, texts))
    report = Report(top, settings=bench.settings, commit=bench.commit, out=bench.out)
    most = max(map(bench.shares, bench.loads))
    with Workers(most if most > 1 else 0) as workers:
        for load, duration_s in bench.levels:
            report.add(_measure(bench, top["model"], texts, (load, duration_s), workers))
    if bench.max_queue_wait_ms is not None:
        report.note("verdict", judge(report.rows, bench.max_queue_wait_ms))
    values = report.finish(f"{top['model']} at {bench.target.url}")
    for row in values["rows"]:
        if row["requests"] and not row["succeeded"]:
            raise EngineError(f"{row['mode']} loop at {row.get('rps', row.get('concurrency'))}: every request failed")
    return values


async def _first(bench: ServeBench, texts: tuple[Prompt, ...]) -> dict[str, Any]:
    """The head of the results file, after a first request. Raises `EngineError` if that fails."""
    target = bench.target
    async with bench.speaker(target) as client:
        listed = await client.listed() if target.model is None else {"id": target.model}
        first = next(asks(texts, bench.frames, f"{bench.seed}/first"))
        answer = await client.speak(first.body(listed["id"], target), time.perf_counter())
    if answer.error is not None:
        raise EngineError(f"POST {target.api}/audio/speech: {answer.error}, at the first request")
    top = {"bench": "serve", "model": listed["id"], "sample_rate": answer.sample_rate}
    return top | facts_of_server(target, listed, bench.facts)


def _measure(
    bench: ServeBench, model: str, texts: tuple[Prompt, ...], wanted: tuple[float, float], workers: Workers
) -> dict[str, Any]:
    """Run a level, `wanted` being its load and duration; returns its row."""
    load, duration_s = wanted
    shares, name = bench.shares(load), "rps" if bench.rps else "concurrency"
    level = Level(
        bench.speaker,
        bench.target,
        model,
        texts,
        bench.frames,
        is_open=bool(bench.rps),
        load=load,
        warm_up_s=bench.warm_up_s,
        duration_s=duration_s,
        seed=f"{bench.seed}/{name}/{load:g}",
        begin_s=time.perf_counter() + (LEAD_S if shares > 1 else 0.0),
    )
    exchanges = workers.exchanges(level, shares) if shares > 1 else level.exchanges()
    row: dict[str, Any] = {"mode": "open" if bench.rps else "closed", name: load, **figures(exchanges, level.window)}
    row["processes"] = shares
    if row["lag_p95_ms"] is not None and row["lag_p95_ms"] > MAX_LAG_MS:
        late = "%s=%g lag_p95_ms=%.1f is above %g: the client sent late, and may be what was measured"
        _log.warning(late, name, load, row["lag_p95_ms"], MAX_LAG_MS)
    return row
