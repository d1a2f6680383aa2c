"""Measure the gain of each optimisation of the tick: each arm against the one without it, in turn, in one process.

    python benchmarks/speed.py --model fish-s2-pro --load-format dummy --concurrency 64 --out results

`prefill`: prompts of 1 and 8 requests from a graph, with the unfused operations (before) and the fused kernels, and
their number of kernels. `engine`: clients in a closed loop; each arm has one more optimisation than the one before it,
and the first none: all pages that the slots can use, and unfused prefill. Every arm runs `--repeats` times, in turn.
Writes speed-<model>.json and ends with one line of JSON."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from arms import clear
from sonoro.core.config import EngineConfig, Tuning
from sonoro.core.errors import EngineError
from sonoro.core.types import AudioChunk, Event, Failed
from sonoro.engine.engine import Engine
from sonoro.models import registry
from sonoro.models.base import Capacity, LoadedModel, Pages, TextPromptModel
from sonoro.models.shared.codec_choice import dtype_name
from sonoro.nn.linear import Linear
from sonoro.profile.engine import Listener
from sonoro.profile.report import Report
from sonoro.profile.requests import speech_request
from sonoro.runtime.graphs import GraphSet

TEXT = "The next train to the coast leaves from platform four in twelve minutes; mind the gap."
FIRST_ARM = "before"
LARGE_BATCHES = {"codec_batches": (1, 4, 16, 64)}
COARSE = {**LARGE_BATCHES, "prefill_buckets": (16, 32, 64, 128, 256, 512)}
BEFORE = {**COARSE, "tuning": Tuning(codec_overlap=0, codec_wait=0), "chunk_frames": (1, 2, 4, 12)}
UNFUSED = {**BEFORE, "tuning": Tuning(codec_overlap=0, codec_wait=0, is_prefill_fused=False)}
OVERLAP = {"tuning": Tuning(codec_overlap=4096)}
ARMS: Mapping[str, dict[str, Any]] = {
    FIRST_ARM: UNFUSED,
    "pages": UNFUSED,
    "prefill": BEFORE,
    "norms": BEFORE,
    "wait": {**BEFORE, "tuning": Tuning(codec_overlap=0)},
    "chunks": {**COARSE, "tuning": Tuning(codec_overlap=0)},
    "overlap": {**COARSE, **OVERLAP},
    "buckets": {**LARGE_BATCHES, **OVERLAP},
    "batches": OVERLAP,
}
"""Engine settings by arm, each with one change more than the one above; the first also has all pages. `PATCHES` holds
changes that are no settings."""

PAGE_POSITIONS = 32


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as sonoro serve takes it; the built-in voice if none")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--parts", nargs="+", choices=("prefill", "engine"), default=None)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), help="of the part engine; all if none")
    parser.add_argument("--frames", type=int, nargs=2, default=(30, 90), help="the fewest and the most of a request")
    parser.add_argument("--duration", type=float, default=4.0, help="seconds that count of each arm's turn")
    parser.add_argument("--warm-up", type=float, default=1.5, help="seconds before them")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-positions", type=int, default=2048)
    parser.add_argument("--commit", help="what is run, where there is no checkout to ask")
    parser.add_argument("--out", type=Path, default=Path("results"))
    return parser.parse_args(argv)


def median_ms(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median time of `call`, in ms. Synchronises."""

    def timed() -> float:
        began_s = time.perf_counter()
        for _ in range(10):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began_s) * 100

    timed()
    return statistics.median(timed() for _ in range(repeats))


def launches_of(call: Callable[[], Any], device: torch.device) -> int | None:
    """Number of kernels that `call` launches; None without a GPU."""
    if device.type != "cuda":
        return None
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize(device)
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def time_prefill(loaded: LoadedModel, args: argparse.Namespace, report: Report) -> None:
    """Time the prefill of 1 and 8 requests in each arm."""
    model, device, positions = loaded.model, loaded.device, args.max_positions
    slots = 8
    pages = -(-positions // PAGE_POSITIONS)
    prompts = []
    for number in range(slots):
        request = speech_request(model.spec, number, TEXT, args.frames[1])
        [segment, *_] = model.segments(TEXT, "auto")
        prompts.append(model.prepare(request, segment.text, 0, (), None))
    for count, repeat, is_fused in itertools.product((1, slots), range(args.repeats), (False, True)):
        sizes = {"page_positions": PAGE_POSITIONS, "pages": slots * pages, "max_tokens": 2048}
        state = model.allocate(Capacity(slots, positions, args.frames[1], 1024, **sizes, is_prefill_fused=is_fused))
        own = [Pages(range(slot * pages, (slot + 1) * pages)) for slot in range(count)]
        tokens = model.stage(state, prompts[:count], range(count), own)
        model.admit(state, torch.arange(count, device=device))
        calls = {"prefill": functools.partial(model.prefill, state)}
        if isinstance(model, TextPromptModel):
            calls["prefill text"] = functools.partial(model.prefill_text, state)
        for name, call in calls.items():
            graphs = GraphSet(name, call, (tokens,), 2048, device)
            graphs.capture()
            row = {"part": name, "is_prefill_fused": is_fused, "prompts": count, "tokens": tokens, "repeat": repeat}
            row["graph_ms"] = median_ms(functools.partial(graphs.run, range(tokens)), 5, device)
            row["launches"] = launches_of(functools.partial(call, torch.arange(tokens, device=device)), device)
            report.add(row)


class Crowd:
    """Clients in a closed loop on an engine, each playing its request in real time as it arrives.

    Texts and lengths, in `frames`, come from the same seed, so that every arm gets the same requests.
    """

    def __init__(self, engine: Engine, numbers: Iterator[int], clients: int, frames: Sequence[int]) -> None:
        self._engine, self._numbers, self._clients, self._frames = engine, numbers, clients, frames
        self._draw = random.Random(clients)
        self._listeners: dict[str, Listener] = {}
        self._first_ms: list[float] = []
        self._audio_s, self._underruns, self._requests, self._ticks = 0.0, 0, 0, 0

    def measure(self, warm_up_s: float, duration_s: float) -> dict[str, Any]:
        """Metrics over `duration_s` after `warm_up_s`. Raises `EngineError` if a request fails."""
        self._listen_until(time.perf_counter() + warm_up_s)
        self._audio_s, self._underruns, self._requests, self._ticks, self._first_ms = 0.0, 0, 0, 0, []
        before, began_s, host_s = self._engine.runner.graphs.launches, time.perf_counter(), time.process_time()
        self._listen_until(began_s + duration_s, self._clients)
        counted_s, host_s = time.perf_counter() - began_s, time.process_time() - host_s
        after, first_ms = self._engine.runner.graphs.launches, sorted(self._first_ms) or [math.nan]
        clear(self._engine)
        made = {
            how: {kind: (counts[how] - before[kind][how]) / self._ticks for kind, counts in after.items()}
            for how in ("graph", "eager")
        }
        return {
            "xrt": self._audio_s / counted_s,
            "tick_ms": 1000 * counted_s / self._ticks,
            "ttfp_p50_ms": first_ms[len(first_ms) // 2],
            "ttfp_p95_ms": first_ms[(len(first_ms) - 1) * 95 // 100],
            "underruns": self._underruns,
            "requests": self._requests,
            "launches_per_tick": made["graph"],
            "eager_per_tick": made["eager"],
            "host_ms": 1000 * host_s / self._ticks,
        }

    def _listen_until(self, until_s: float, requests: int = 0) -> None:
        """Run until `until_s`, and until `requests` requests are finished."""
        while time.perf_counter() < until_s or self._requests < requests:
            while len(self._listeners) < self._clients:
                self._ask()
            events = self._engine.tick()
            self._ticks += 1
            for event in events:
                self._hear(event, time.perf_counter())

    def _ask(self) -> None:
        words = " ".join(self._draw.choices(TEXT.split(), k=self._draw.randint(4, 20)))
        request = speech_request(self._engine.spec, next(self._numbers), words, self._draw.randint(*self._frames))
        self._listeners[request.id] = Listener(time.perf_counter(), self._engine.spec.sample_rate)
        self._engine.submit(request)

    def _hear(self, event: Event, now_s: float) -> None:
        listener = self._listeners[event.request_id]
        if isinstance(event, Failed):
            raise EngineError(f"{event.request_id} failed: {event}")
        if not isinstance(event, AudioChunk):
            self._requests += 1
            del self._listeners[event.request_id]
            return
        if listener.first_audio_at_s is None:
            self._first_ms.append(1000 * (now_s - listener.sent_at_s))
        self._underruns += listener.play(event.pcm, now_s)
        self._audio_s += len(event.pcm) / 2 / self._engine.spec.sample_rate


def norms_apart() -> AbstractContextManager[Any]:
    """A context in which captures do not fuse a norm with the sum before it."""
    return mock.patch.object(Linear, "joins_norm", return_value=False)


PATCHES = dict.fromkeys(("before", "pages", "prefill"), norms_apart)


def time_engine(loaded: LoadedModel, args: argparse.Namespace, report: Report) -> None:
    """Time clients in a closed loop in each arm; all engines exist at once, so that arms can run in turn."""
    slots, numbers = args.concurrency, itertools.count()
    most = min(args.max_positions // 2, loaded.model.spec.max_frames)
    base = EngineConfig(slots=slots, max_positions=args.max_positions, max_frames=most)
    engines: dict[str, Engine] = {}
    for name, changes in ARMS.items():
        if name not in (args.arms or ARMS):
            continue
        row: dict[str, Any] = {"part": "ready", "arm": name, "concurrency": slots}
        pages = base.pages_per_slot * slots if name == FIRST_ARM else 0
        try:
            began_s = time.perf_counter()
            with PATCHES.get(name, contextlib.nullcontext)():
                engines[name] = engine = Engine(loaded.model, dataclasses.replace(base, pages=pages, **changes))
            row |= {"ready_s": time.perf_counter() - began_s, "pages": engine.runner.pages}
            row["pages_bytes"] = engine.runner.pages * base.page_positions * loaded.model.position_bytes
            row["graphs_mib"] = engine.runner.graphs.memory_mib
        except Exception as error:  # an arm that does not fit does not stop the others
            row["error"] = repr(error)
        report.add(row)
    # As an engine process does: freeze present objects out of garbage collection.
    gc.collect()
    gc.freeze()
    for repeat, (name, engine) in itertools.product(range(args.repeats), engines.items()):
        row = {"part": "engine", "arm": name, "concurrency": slots, "repeat": repeat}
        try:
            crowd = Crowd(engine, numbers, slots, args.frames)
            row |= crowd.measure(args.warm_up, args.duration) | {"put_back": engine.lifecycle.preemptions}
        except EngineError as error:
            row["error"] = repr(error)
            clear(engine)
        report.add(row)


PARTS = {"prefill": time_prefill, "engine": time_engine}


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    args = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    loaded = registry.load(args.model, device=args.device, load_format=args.load_format)
    name = loaded.model.spec.name
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "commit")}
    stream = torch.cuda.Stream(loaded.device) if loaded.device.type == "cuda" else None
    if stream is not None:
        torch.cuda.synchronize(loaded.device)  # the weights were made on another stream
    report = Report(
        {"bench": "speed", "model": name, "dtype": dtype_name(loaded.dtype)},
        is_gpu=stream is not None,
        settings=settings,
        commit=args.commit,
        out=args.out / f"speed-{name}.json",
    )
    for part in args.parts or PARTS:
        with torch.inference_mode(), torch.cuda.stream(stream):
            PARTS[part](loaded, args, report)
    report.finish(f"{name}: what each change of the tick brings")
    return 0


if __name__ == "__main__":
    sys.exit(main())
