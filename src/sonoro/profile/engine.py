"""Throughput and latency of an engine process without HTTP, by concurrency: `sonoro bench engine`.

A closed loop: each of C clients sends a request, listens to its end and sends the next."""

import asyncio
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError, EngineError, SonoroError
from sonoro.core.types import AudioChunk, SpeechRequest
from sonoro.profile.report import Report, has_gpu
from sonoro.profile.requests import Launched, speech_request
from sonoro.transport.client import EngineClient
from sonoro.transport.messages import Stats

_WORDS = ("a", "calm", "voice", "reads", "what", "was", "written", "for", "it", "and", "then", "another", "goes", "on")
_BYTES_PER_SAMPLE = 2


@dataclass(frozen=True)
class EngineBench(Launched):
    """The options of `sonoro bench engine`; `slots` and `is_eager` override `config`. Raises `ConfigError`."""

    concurrency: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    frames: tuple[int, int] = (30, 90)
    is_eager: bool = False
    slots: int | None = None
    duration_s: float = 8.0
    warm_up_s: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        check, clients = ConfigError.unless, self.concurrency
        check(min(clients, default=0) >= 1, "concurrency", clients, "each must be at least 1")
        slots, max_frames, (fewest, most) = self.engine.slots, self.engine.max_frames, self.frames
        check(max(clients) <= slots, "concurrency", max(clients), f"at most the engine's slots, {slots}")
        ascending = f"they must ascend, from 1 to max_frames, {max_frames}"
        check(1 <= fewest <= most <= max_frames, "frames", self.frames, ascending)
        warm_up = f"it must be at least 0 and below duration_s, {self.duration_s:g}"
        check(0 <= self.warm_up_s < self.duration_s, "warm_up_s", self.warm_up_s, warm_up)

    @property
    def engine(self) -> EngineConfig:
        """The engine's configuration. Batch sizes that are not set stay unset: a CPU pads to configured sizes only."""
        config = self.config or EngineConfig(slots=max(self.concurrency))
        return config.over(slots=self.slots, is_eager=self.is_eager or None)


def run(bench: EngineBench) -> dict[str, Any]:
    """Run all levels, print the table, and return the contents of the results file.
    A level with a failed request keeps its measurements and the error; `EngineError` is raised at the end."""
    return asyncio.run(_run(bench))


async def _run(bench: EngineBench) -> dict[str, Any]:
    config, is_gpu = bench.engine, has_gpu(bench.device)
    async with bench.launch(config) as client:
        top = {
            "bench": "engine",
            "model": client.spec.name,
            "arm": "graph" if is_gpu and not config.is_eager else "eager",
            "dtype": bench.dtype or ("bfloat16" if is_gpu else "float32"),
            "ready_s": round(client.ready.ready_s, 2),
            "gpu_memory_mib": round(client.ready.gpu_memory_mib, 1),
            "graph_memory_mib": round(client.ready.graph_memory_mib, 1),
        }
        resolved = asdict(config.resolve() if is_gpu else config)
        settings = bench.settings | {"slots": config.slots, "is_eager": config.is_eager, "config": resolved}
        print(client.ready.report, flush=True)
        report = Report(top, is_gpu=is_gpu, settings=settings, commit=bench.commit, out=bench.out)
        numbers = itertools.count()
        for concurrency in bench.concurrency:
            report.add(await _Level(client, bench, concurrency, numbers).measure())
    values = report.finish(f"{top['model']}, closed loop through the engine process")
    failed = [f"concurrency {row['concurrency']}: {row['error']}" for row in report.rows if row["failed"]]
    if failed:
        raise EngineError("; ".join(failed))
    return values


@dataclass
class Listener:
    """A client that plays one request in real time from its first audio on. `sent_at_s`: when it was sent."""

    sent_at_s: float
    sample_rate: int
    first_audio_at_s: float | None = None
    plays_until_s: float = 0.0

    def play(self, pcm: bytes, now_s: float) -> bool:
        """Take PCM16 that arrived at `now_s`; returns whether playback had run out (underrun)."""
        duration_s = len(pcm) / _BYTES_PER_SAMPLE / self.sample_rate
        is_first = self.first_audio_at_s is None
        if is_first:
            self.first_audio_at_s = self.plays_until_s = now_s
        ran_out = not is_first and now_s > self.plays_until_s
        self.plays_until_s = max(self.plays_until_s, now_s) + duration_s
        return ran_out


class _Level:
    """One level: `concurrency` clients in a closed loop for `bench.duration_s`, measured after the warm-up."""

    def __init__(self, client: EngineClient, bench: EngineBench, concurrency: int, numbers: Iterator[int]) -> None:
        self._client, self._bench, self._concurrency, self._numbers = client, bench, concurrency, numbers
        self._random = random.Random(f"{bench.seed}/{concurrency}")
        self._is_counting = self._is_over = False
        self._audio_s, self._underruns, self._requests = 0.0, 0, 0
        self._ttfp_ms: list[float] = []
        self._errors: list[str] = []

    async def measure(self) -> dict[str, Any]:
        """Run the level; returns its row."""
        bench, began_s = self._bench, time.perf_counter()
        clients = [asyncio.create_task(self._speak()) for _ in range(self._concurrency)]
        try:
            await asyncio.sleep(bench.warm_up_s)
            before = await self._client.stats(resets=True)
            counts_from_s, self._is_counting = time.perf_counter(), True
            await asyncio.sleep(max(0.0, began_s + bench.duration_s - counts_from_s))
            after = await self._client.stats()
            self._is_counting, counted_s = False, time.perf_counter() - counts_from_s
        except SonoroError as error:
            # The engine process died: its clients got errors, and the next level has a new process.
            self._is_counting, self._is_over = False, True
            await asyncio.gather(*clients)
            return {"concurrency": self._concurrency, "failed": len(self._errors) or 1, "error": str(error)}
        self._is_over = True
        await asyncio.gather(*clients)
        return self._row(before, after, counted_s)

    async def _speak(self) -> None:
        """One client; stops at its first failed request."""
        while not self._is_over:
            try:
                await self._listen()
            except SonoroError as error:
                self._errors.append(str(error))
                return

    async def _listen(self) -> None:
        """Send one request and play it to its end. TTFP counts only if it was sent after the warm-up."""
        spec, request = self._client.spec, self._request()
        was_counting, listener = self._is_counting, Listener(time.perf_counter(), spec.sample_rate)
        async for event in self._client.stream(request):
            now_s = time.perf_counter()
            if isinstance(event, AudioChunk):
                is_first, ran_out = listener.first_audio_at_s is None, listener.play(event.pcm, now_s)
                if self._is_counting:
                    self._audio_s += len(event.pcm) / _BYTES_PER_SAMPLE / spec.sample_rate
                    self._underruns += ran_out
                if is_first and was_counting:
                    self._ttfp_ms.append(1000 * (now_s - listener.sent_at_s))
            elif event.frames != request.max_frames:
                ended = f"{request.id} ended after {event.frames} of {request.max_frames} frames"
                raise EngineError(f"{ended}: {event.reason}")
        self._requests += self._is_counting

    def _request(self) -> SpeechRequest:
        words = self._random.choices(_WORDS, k=self._random.randint(4, 20))
        frames = self._random.randint(*self._bench.frames)
        return speech_request(self._client.spec, next(self._numbers), " ".join(words), frames)

    def _row(self, before: Stats, after: Stats, counted_s: float) -> dict[str, Any]:
        row: dict[str, Any] = {
            "concurrency": self._concurrency,
            "xrt": self._audio_s / counted_s,
            **{f"ttfp_p{percent}_ms": _percentile(self._ttfp_ms, percent) for percent in (50, 95)},
            **{f"frame_{part}_ms": after.frame_ms[part] for part in ("p50", "p99")},
            "underruns": self._underruns,
            "graph_launches": _launched(before, after, "graph"),
            "eager_launches": _launched(before, after, "eager"),
            "prefilled_tokens": after.prefixes.tokens_prefilled - before.prefixes.tokens_prefilled,
            "cached_tokens": after.prefixes.tokens_cached - before.prefixes.tokens_cached,
            "requests": self._requests,
            "failed": len(self._errors),
        }
        return row | ({"error": self._errors[0]} if self._errors else {})


def _launched(before: Stats, after: Stats, how: str) -> dict[str, int]:
    """Launches by kind between two `Stats` of one engine."""
    return {kind: counts[how] - before.launches[kind][how] for kind, counts in after.launches.items()}


def _percentile(values: list[float], percent: int) -> float | None:
    """Percentile by nearest rank; None without values."""
    return sorted(values)[(len(values) - 1) * percent // 100] if values else None
