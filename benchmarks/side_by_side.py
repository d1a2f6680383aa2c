"""Measure a dialogue whose lines are spoken side by side (`parallel`) against one after another, in turn.

    python benchmarks/side_by_side.py --model qwen3-tts-1.7b-customvoice --load-format dummy --out results

`--lines` lines of several voices, each of `--frames` frames, are one request of an engine process, which has `--slots`
slots and nothing else to do. Writes side-by-side-<model>.json and ends with one line of JSON."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from sonoro.core.config import EngineConfig
from sonoro.core.errors import EngineError
from sonoro.core.types import AudioChunk, SpeechRequest
from sonoro.engine.request import Progress
from sonoro.models import registry
from sonoro.models.base import LoadedModel
from sonoro.profile.report import Report, has_gpu
from sonoro.profile.requests import Launched
from sonoro.text.script import Cue, dialogue, scripted
from sonoro.transport.client import EngineClient

TEXT = "The next train to the coast leaves from platform {} in twelve minutes; mind the gap."
WARM_UP_LINES = 4


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as sonoro serve takes it; the built-in voice if none")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lines", type=int, default=40)
    parser.add_argument("--frames", type=int, default=60, help="of a line")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--voices", type=int, default=4)
    parser.add_argument("--max-positions", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", help="what is run, where there is no checkout to ask")
    parser.add_argument("--out", type=Path, default=Path("results"))
    return parser.parse_args(argv)


def load(model: str | None, **how: Any) -> LoadedModel:
    """Load a model in its engine process, where lines that reach their limit of frames then count as ended by
    themselves, not as runaways: with random weights, or `ignore_eos`, none ends otherwise."""
    mock.patch.object(Progress, "is_at_limit", property(lambda progress: False)).start()
    return registry.load(model, **how)


async def speak(client: EngineClient, request: SpeechRequest, frames: int) -> dict[str, Any]:
    """Speak `request` and time it. Raises `EngineError` if it fails or does not have `frames` frames."""
    began_s = time.perf_counter()
    first_s, samples = 0.0, 0
    async for event in client.stream(client.spec.resolve(request)):
        if isinstance(event, AudioChunk):
            first_s = first_s or time.perf_counter() - began_s
            samples += len(event.pcm) // 2
        elif (event.reason, event.frames) != ("stop", frames):
            raise EngineError(f"it ended after {event.frames} of {frames} frames: {event.reason}")
    taken_s, audio_s = time.perf_counter() - began_s, samples / client.spec.sample_rate
    return {"taken_s": taken_s, "first_audio_s": first_s, "audio_s": audio_s, "xrt": audio_s / taken_s}


async def run(args: argparse.Namespace) -> None:
    config = EngineConfig(
        slots=args.slots, max_positions=args.max_positions, max_frames=args.frames, is_ready_early=False
    )
    bench = Launched(model=args.model, load_format=args.load_format, device=args.device, factory="side_by_side:load")
    # Where the engine process finds `load`.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    numbers = itertools.count()
    async with bench.launch(config) as client:
        spec, is_gpu = client.spec, has_gpu(args.device)
        top = {"bench": "side-by-side", "model": spec.name, "ready_s": client.ready.ready_s}
        settings = {**vars(args), "out": None, "commit": None}
        out = args.out / f"side-by-side-{spec.name}.json"
        report = Report(top, is_gpu=is_gpu, settings=settings, commit=args.commit, out=out)

        def request(lines: int, parallel: int) -> SpeechRequest:
            voices = spec.voices[: args.voices] or (None,)
            text = dialogue([Cue(TEXT.format(at + 1), voices[at % len(voices)]) for at in range(lines)], between_s=0)
            fields: dict[str, Any] = {"ignore_eos": True, "with_words": True, "parallel": parallel}
            return scripted(SpeechRequest(id=str(next(numbers)), text=text, markup="voices", **fields), spec)

        for parallel in (1, args.slots):
            await speak(client, request(WARM_UP_LINES, parallel), WARM_UP_LINES * args.frames)
        for _ in range(args.repeats):
            for parallel in (1, args.slots):
                made = await speak(client, request(args.lines, parallel), args.lines * args.frames)
                report.add({"parallel": parallel, **made})
    one, all_slots = (
        statistics.median(row["taken_s"] for row in report.rows if row["parallel"] == parallel)
        for parallel in (1, args.slots)
    )
    report.note("times_as_fast", one / all_slots)
    report.finish(f"{spec.name}, {args.lines} lines of {args.frames} frames")


if __name__ == "__main__":
    asyncio.run(run(arguments(sys.argv[1:])))
