"""Load on a speech server, open or closed loop, and what was heard of it: `sonoro bench serve`."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sonoro.bench.client import SpeechClient, Target
from sonoro.bench.dataset import BUILTIN, prompts, shuffled
from sonoro.bench.metrics import Exchange, Window, figures
from sonoro.bench.report import Report
from sonoro.core.errors import ConfigError, EngineError

__all__ = ["FACTS", "MAX_LAG_MS", "Ask", "ServeBench", "arrivals", "asks", "run"]

FACTS = ("arm", "gpu", "cpu", "driver", "torch", "dtype")
"""What a results file says of the server's side, which a client cannot see."""

MAX_LAG_MS = 5.0
"""Scheduling lag (p95) above which the client may be what is measured."""

_AFTER_FAILURE_S = 0.25
"""A client of the closed loop waits so long after a failure: refusals are fast, and would be repeated as fast."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ask:
    """What one request says: its text, and how many frames it is to be spoken for if that is fixed."""

    text: str
    frames: int | None

    def body(self, model: str, target: Target) -> dict[str, Any]:
        """The request's JSON: OpenAI's fields, ours for a fixed length, then those of `target.extra`."""
        body: dict[str, Any] = {
            "model": model,
            "input": self.text,
            "voice": target.voice,
            "response_format": "pcm",
        }
        if self.frames is not None:
            body |= {"max_new_tokens": self.frames, "ignore_eos": True}
        return {name: value for name, value in {**body, **target.extra}.items() if value is not None}


@dataclass(frozen=True)
class ServeBench:
    """Whom to load and how. Either `rps`, the rates of an open loop, or `concurrency`, the clients of a closed one: one
    level after the other, each of `warm_up_s` that do not count and `duration_s` that do.

    `dataset` is that of `sonoro.bench.dataset.prompts`. `frames`: each request is spoken for a number of frames drawn
    from this range, by a server that knows the fields. `facts`: of `FACTS`, what is known of the server's side.
    `out` is written after every level. Raises `ConfigError` naming the field.
    """

    target: Target
    rps: tuple[float, ...] = ()
    concurrency: tuple[int, ...] = ()
    duration_s: float = 20.0
    warm_up_s: float = 3.0
    seed: int = 0
    dataset: str = BUILTIN
    frames: tuple[int, int] | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    out: Path | None = None
    commit: str | None = None

    def __post_init__(self) -> None:
        if bool(self.rps) == bool(self.concurrency):
            raise ConfigError("rps", self.rps, "give either rps or concurrency")
        if self.rps and not all(0 < rate < math.inf for rate in self.rps):
            raise ConfigError("rps", self.rps, "each must be above 0")
        if self.concurrency and min(self.concurrency) < 1:
            raise ConfigError("concurrency", self.concurrency, "each must be at least 1")
        if not 0 < self.duration_s < math.inf:
            raise ConfigError("duration_s", self.duration_s, "it must be above 0")
        if not 0 <= self.warm_up_s < math.inf:
            raise ConfigError("warm_up_s", self.warm_up_s, "it must be at least 0")
        if self.frames is not None and not 1 <= self.frames[0] <= self.frames[1]:
            raise ConfigError("frames", self.frames, "they must ascend, from 1")
        for name in self.facts:
            if name not in FACTS:
                raise ConfigError("facts", name, "it may hold " + ", ".join(FACTS))

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the load, for the results file; no key."""
        target = self.target
        return {
            "url": target.url,
            "voice": target.voice,
            "extra": dict(target.extra) or None,
            "rps": list(self.rps) or None,
            "concurrency": list(self.concurrency) or None,
            "duration_s": self.duration_s,
            "warm_up_s": self.warm_up_s,
            "seed": self.seed,
            "dataset": self.dataset if self.dataset == BUILTIN else Path(self.dataset).name,
            "frames": list(self.frames) if self.frames else None,
            "timeout_s": target.timeout_s,
        }


def arrivals(rate: float, duration_s: float, seed: str) -> Iterator[float]:
    """The times before `duration_s` of a Poisson process of `rate` a second, the same for the same seed."""
    draw, at_s = random.Random(seed), 0.0
    while (at_s := at_s + draw.expovariate(rate)) < duration_s:
        yield at_s


def asks(texts: tuple[str, ...], frames: tuple[int, int] | None, seed: str) -> Iterator[Ask]:
    """Requests without end, the same for the same seed."""
    draw = random.Random(f"{seed}/frames")
    for text in shuffled(texts, f"{seed}/texts"):
        yield Ask(text, draw.randint(*frames) if frames else None)


def run(bench: ServeBench) -> dict[str, Any]:
    """Load the server, print what was heard, and return the results file.

    Failed requests are counted in their row. Raises `EngineError` if the server does not answer a first request, or,
    at the end, if all requests of a level failed.
    """
    texts = prompts(bench.dataset)
    return asyncio.run(_run(bench, texts))


async def _run(bench: ServeBench, texts: tuple[str, ...]) -> dict[str, Any]:
    async with SpeechClient(bench.target) as client:
        model = await client.model()
        first = next(asks(texts, bench.frames, f"{bench.seed}/first"))
        answer = await client.speak(first.body(model, bench.target), time.perf_counter())
        if answer.error is not None:
            raise EngineError(f"POST {bench.target.api}/audio/speech: {answer.error}, at the first request")
        top = {"bench": "serve", "model": model, "sample_rate": answer.sample_rate}
        top |= {name: bench.facts.get(name) for name in FACTS}
        report = Report(top, settings=bench.settings, commit=bench.commit, out=bench.out)
        for load in bench.rps or bench.concurrency:
            report.add(await _Level(client, bench, model, texts, load).measure())
    values = report.finish()
    for row in values["rows"]:
        if row["requests"] and not row["succeeded"]:
            raise EngineError(f"{row['mode']} loop at {row.get('rps', row.get('concurrency'))}: every request failed")
    return values


class _Level:
    """One load, and all that was exchanged under it."""

    def __init__(
        self, client: SpeechClient, bench: ServeBench, model: str, texts: tuple[str, ...], load: float
    ) -> None:
        self._client, self._bench, self._model, self._load = client, bench, model, load
        self._is_open = bool(bench.rps)
        self._seed = f"{bench.seed}/{'rps' if self._is_open else 'concurrency'}/{load:g}"
        self._asks = asks(texts, bench.frames, self._seed)
        self._exchanges: list[Exchange] = []

    async def measure(self) -> dict[str, Any]:
        """The row of this level."""
        bench, now_s = self._bench, time.perf_counter()
        begin_s = now_s + bench.warm_up_s
        window = Window(begin_s, begin_s + bench.duration_s)
        await (self._send_at_random(now_s, window) if self._is_open else self._send_in_turn(window))
        name, mode = ("rps", "open") if self._is_open else ("concurrency", "closed")
        row: dict[str, Any] = {"mode": mode, name: self._load, **figures(self._exchanges, window)}
        if row["lag_p95_ms"] is not None and row["lag_p95_ms"] > MAX_LAG_MS:
            _log.warning(
                "%s=%g lag_p95_ms=%.1f is above %g: the client sent late, and may be what was measured",
                name,
                self._load,
                row["lag_p95_ms"],
                MAX_LAG_MS,
            )
        return row

    async def _send_at_random(self, now_s: float, window: Window) -> None:
        """The open loop: nothing waits for an answer."""
        warm_up = arrivals(self._load, self._bench.warm_up_s, f"{self._seed}/warm-up")
        counted = arrivals(self._load, self._bench.duration_s, f"{self._seed}/arrivals")
        times = [now_s + at_s for at_s in warm_up] + [window.begin_s + at_s for at_s in counted]
        async with asyncio.TaskGroup() as requests:
            for due_s in times:
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                requests.create_task(self._send(due_s))

    async def _send_in_turn(self, window: Window) -> None:
        """The closed loop: each client sends the next request when the one before has ended."""

        async def listen() -> None:
            while (now_s := time.perf_counter()) < window.end_s:
                if (await self._send(now_s)).error is not None:
                    await asyncio.sleep(_AFTER_FAILURE_S)

        async with asyncio.TaskGroup() as clients:
            for _ in range(int(self._load)):
                clients.create_task(listen())

    async def _send(self, due_s: float) -> Exchange:
        body = next(self._asks).body(self._model, self._bench.target)
        exchange = await self._client.speak(body, due_s)
        self._exchanges.append(exchange)
        return exchange
