"""Gaps between frames of running streams while reference audio is encoded.

    python benchmarks/encoding.py --model MODEL --out voice-MODEL.json

Streams are measured at the client, in chunks of one frame; each reference is new, so that nothing is cached.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sonoro.audio.references import MAX_REFERENCE_S, MIN_REFERENCE_S
from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError, SonoroError
from sonoro.core.types import AudioChunk, Reference
from sonoro.profile.report import Report, has_gpu
from sonoro.profile.requests import Launched, speech_request
from sonoro.transport.client import EngineClient

__all__ = ["VoiceBench", "run"]

_QUIET_S = 2.0
_TEXT = "A calm voice reads what was written for it."


@dataclass(frozen=True)
class VoiceBench(Launched):
    """Settings of a run: `streams` concurrent streams, and `repeats` references of each length in `reference_s`,
    encoded meanwhile. Slots and chunks of `config` are ignored. Raises `ConfigError` naming the field."""

    streams: int = 16
    reference_s: tuple[int, ...] = (10, 60)
    repeats: int = 5

    def __post_init__(self) -> None:
        for name in ("streams", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "it must be at least 1")
        if not all(MIN_REFERENCE_S <= duration_s <= MAX_REFERENCE_S for duration_s in self.reference_s):
            raise ConfigError("reference_s", self.reference_s, f"each must be above 0 and at most {MAX_REFERENCE_S:g}")

    @property
    def engine(self) -> EngineConfig:
        """The engine's configuration, with chunks of one frame."""
        return replace(self.config or EngineConfig(), slots=self.streams, chunk_frames=(1,), frame_batches=())


def run(bench: VoiceBench) -> dict[str, Any]:
    """Run it, print the table, and return the contents of the results file. Raises `SonoroError` if anything fails."""
    return asyncio.run(_run(bench))


async def _run(bench: VoiceBench) -> dict[str, Any]:
    config, is_gpu = bench.engine, has_gpu(bench.device)
    async with bench.launch(config) as client:
        top = {
            "bench": "voice",
            "model": client.spec.name,
            "arm": "graph" if is_gpu and not config.is_eager else "eager",
            "dtype": bench.dtype or ("bfloat16" if is_gpu else "float32"),
            "ready_s": round(client.ready.ready_s, 2),
            "gpu_memory_mib": round(client.ready.gpu_memory_mib, 1),
        }
        settings = {name: value for name, value in asdict(bench).items() if name not in ("out", "commit", "config")}
        settings["config"] = asdict(config.resolve() if is_gpu else config)
        report = Report(top, is_gpu=is_gpu, settings=settings, commit=bench.commit, out=bench.out)
        failed: list[BaseException] = []
        try:
            await _measure(bench, client, report)
        except* SonoroError as errors:
            failed += errors.exceptions
        if failed:
            raise failed[0]
    return report.finish(f"{top['model']}, {bench.streams} streams beside the encoding of references")


async def _measure(bench: VoiceBench, client: EngineClient, report: Report) -> None:
    numbers, frames = itertools.count(), min(bench.engine.max_frames, client.spec.max_frames)
    streams = [_Stream(client, frames) for _ in range(bench.streams)]
    # Before the streams start: it keeps this process busy.
    rate, count = client.spec.sample_rate, bench.repeats
    references = {duration_s: [_noise(duration_s, rate) for _ in range(count)] for duration_s in bench.reference_s}
    rows: dict[int, list[Reference]] = {0: [], **references}
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream.speak(numbers)) for stream in streams]
        await asyncio.gather(*(stream.is_heard.wait() for stream in streams))
        for duration_s, made in rows.items():
            report.add(await _row(client, streams, duration_s, made))
        for task in tasks:
            task.cancel()


async def _row(
    client: EngineClient, streams: list[_Stream], duration_s: int, references: list[Reference]
) -> dict[str, Any]:
    """The row of gaps between frames while `references` of `duration_s` are encoded, or for a while if there are
    none."""
    for stream in streams:
        stream.gaps_s.clear()
    durations_s = []
    for reference in references:
        began_s = time.perf_counter()
        await client.encode_voice((reference,))
        durations_s.append(time.perf_counter() - began_s)
    if not references:
        await asyncio.sleep(_QUIET_S)
    gaps_ms = sorted(1000 * gap_s for stream in streams for gap_s in (*stream.gaps_s, stream.pending_s))
    return {
        "reference_s": duration_s,
        "encodings": len(durations_s),
        "encode_mean_ms": 1000 * sum(durations_s) / len(durations_s) if durations_s else None,
        "gaps": len(gaps_ms),
        "gap_p50_ms": gaps_ms[len(gaps_ms) // 2],
        "gap_p99_ms": gaps_ms[len(gaps_ms) * 99 // 100],
        "gap_max_ms": gaps_ms[-1],
    }


def _noise(duration_s: int, rate: int) -> Reference:
    """A reference of noise, different at every call."""
    samples = 0.1 * np.random.default_rng().standard_normal(duration_s * rate)
    return Reference(pcm=samples.astype("<f4").tobytes(), sample_rate=rate, text="Some noise.", use="prompt")


class _Stream:
    """A client that plays requests of `frames` frames one after another; `gaps_s` are gaps within a request."""

    def __init__(self, client: EngineClient, frames: int) -> None:
        self._client, self._frames = client, frames
        self._heard_at_s: float | None = None
        self.gaps_s: list[float] = []
        self.is_heard = asyncio.Event()

    @property
    def pending_s(self) -> float:
        """Duration of the current gap so far."""
        return 0.0 if self._heard_at_s is None else time.perf_counter() - self._heard_at_s

    async def speak(self, numbers: Iterator[int]) -> None:
        while True:
            self._heard_at_s = None
            request = speech_request(self._client.spec, next(numbers), _TEXT, self._frames)
            async for event in self._client.stream(request):
                if isinstance(event, AudioChunk):
                    now_s = time.perf_counter()
                    if self._heard_at_s is not None:
                        self.gaps_s.append(now_s - self._heard_at_s)
                    self._heard_at_s = now_s
                    self.is_heard.set()


def arguments(argv: Sequence[str] | None = None) -> VoiceBench:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "dtype", "commit"):
        parser.add_argument(f"--{name}")
    for name in ("device", "load_format"):
        parser.add_argument(f"--{name.replace('_', '-')}", default="auto")
    parser.add_argument("--streams", type=int, default=16, help="requests that are spoken meanwhile")
    parser.add_argument(
        "--reference", dest="reference_s", type=int, nargs="+", default=[10, 60], help="seconds of each"
    )
    parser.add_argument("--repeats", type=int, default=5, help="references of each length")
    parser.add_argument("--config", type=EngineConfig.from_file, help="YAML file with the engine's configuration")
    parser.add_argument("--out", type=Path)
    given = vars(parser.parse_args(argv))
    return VoiceBench(**{**given, "reference_s": tuple(given["reference_s"])})


if __name__ == "__main__":
    try:
        run(arguments())
    except SonoroError as error:
        sys.exit(str(error))
