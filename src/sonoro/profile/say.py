"""`sonoro bench say`: how fast a model speaks one text on this machine, with compiled code and in torch, in turns.

A busy machine changes every figure of time, so each row has the time of a fixed load just before it as well, and the
time of a frame in units of that. CPU time counts all threads."""

import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sonoro.bench.machine import processor
from sonoro.core.config import EngineConfig, usable_cores
from sonoro.core.errors import ConfigError, EngineError
from sonoro.core.types import AudioChunk, Failed, Finished, SpeechRequest
from sonoro.engine.engine import Engine
from sonoro.models import registry
from sonoro.models.base import LoadedModel

from .peers import PEERS, time_peer
from .report import Report

ARMS = {"compiled": False, "torch": True}
"""Names of the arms, and whether each is eager."""

_ADDITIONS, _PRODUCTS, _SHAPE = 2000, 184, (384, 1024)
_COLD_TEXT = "Good morning."
_COLD = """
import atexit
from pathlib import Path
status = Path("/proc/self/status")
if status.exists():
    atexit.register(lambda: Path({status!r}).write_text(status.read_text()))
from sonoro.cli.main import main
main()
"""
"""`sonoro`, which leaves its memory in a file: what the parent is told of it counts the parent's own too."""


@dataclass(frozen=True)
class SayBench:
    """The options of `sonoro bench say`. Raises `ConfigError`."""

    text: str
    voice: str | None = None
    threads: tuple[int, ...] = (1,)
    repeats: int = 5
    model: str | None = None
    kokoro: Path | None = None
    piper: Path | None = None
    out: Path | None = None
    commit: str | None = None

    def __post_init__(self) -> None:
        are_allowed = bool(self.threads) and all(1 <= count <= 256 for count in self.threads)
        ConfigError.unless(are_allowed, "threads", self.threads, "each must be at least 1 and at most 256")
        ConfigError.unless(1 <= self.repeats <= 1000, "repeats", self.repeats, "it must be at least 1 and at most 1000")


class Reading(NamedTuple):
    """One reading of the text: seconds of audio, of wall time and CPU time, and to the first packet; its frames; and
    the milliseconds of the fixed load just before."""

    audio_s: float
    wall_s: float
    cpu_s: float
    first_packet_s: float
    frames: int
    unit_ms: float


def run(
    bench: SayBench, loaded: Mapping[str, LoadedModel] | None = None, *, is_cold_timed: bool = True
) -> dict[str, Any]:
    """Time the model of `bench`, or `loaded` for each arm, on a CPU; print the table, and return the contents of the
    results file. Cold starts of the command line are timed for the built-in voice."""
    given = bench.model
    # One each: compiled code keeps the weights of its model in another form.
    loaded = loaded or {arm: registry.load(given, device="cpu") for arm in ARMS}
    settings = {"text": bench.text, "voice": bench.voice, "threads": [*bench.threads], "repeats": bench.repeats}
    top = {"bench": "say", "model": loaded["torch"].model.spec.name, "cores": usable_cores()}
    report = Report(top, is_gpu=False, settings=settings, commit=bench.commit, out=bench.out)
    engines = {name: Engine(loaded[name].model, _config(is_eager)) for name, is_eager in ARMS.items()}
    before = torch.get_num_threads()
    try:
        for threads in bench.threads:
            torch.set_num_threads(threads)
            readings: dict[str, list[Reading]] = {name: [] for name in engines}
            for engine in engines.values():
                _read(engine, bench)
            for _ in range(bench.repeats):
                for name, engine in engines.items():
                    readings[name].append(_read(engine, bench))
            for name, taken in readings.items():
                report.add({"arm": name, "threads": threads, **_summary(taken)})
    finally:
        torch.set_num_threads(before)
    peers = {name: time_peer(name, getattr(bench, name), bench.text, bench.repeats) for name in PEERS}
    for name, found in peers.items():
        if isinstance(found, dict):
            # They choose their threads themselves.
            report.add({"arm": name, "threads": usable_cores(), **found})
    report.note("skipped", skipped := {name: why for name, why in peers.items() if isinstance(why, str)})
    print(f"skipped: {skipped}", flush=True)
    launches = {name: engine.runner.graphs.launches["frame"] for name, engine in engines.items()}
    report.note("frame_launches", launches)
    if is_cold_timed and given is None:
        report.note("cold", _cold(bench.repeats))
        print(f"cold: {report.top['cold']}", flush=True)
    return report.finish(f"{top['model']} on {processor()}")


def fixed_load_ms() -> float:
    """Time of 2,000 small additions and 184 products of 384 x 1024 in float32: the unit of a frame's time."""
    small, row, weight = torch.zeros(8), torch.ones(1, _SHAPE[0]), torch.ones(_SHAPE[::-1])
    began_s = time.perf_counter()
    for _ in range(_ADDITIONS):
        small = small + 1
    for _ in range(_PRODUCTS):
        torch.nn.functional.linear(row, weight)
    return 1000 * (time.perf_counter() - began_s)


def _config(is_eager: bool) -> EngineConfig:
    return EngineConfig(slots=1, is_eager=is_eager)


def _read(engine: Engine, bench: SayBench) -> Reading:
    """Speak the text once. Raises `EngineError` if it fails."""
    with torch.inference_mode():
        unit_ms = fixed_load_ms()
    request = engine.spec.resolve(SpeechRequest(id="say", text=bench.text, voice=bench.voice))
    began_s, began_cpu_s, first_s, samples = time.perf_counter(), time.process_time(), 0.0, 0
    engine.submit(request)
    while True:
        for event in engine.tick():
            if isinstance(event, AudioChunk):
                first_s = first_s or time.perf_counter() - began_s
                samples += len(event.pcm) // 2
            elif isinstance(event, Finished):
                wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
                audio_s = samples / engine.spec.sample_rate
                return Reading(audio_s, wall_s, cpu_s, first_s, event.frames, unit_ms)
            elif isinstance(event, Failed):
                raise EngineError(str(event.facts.error))


def _summary(taken: list[Reading]) -> dict[str, float]:
    """Medians over the readings; `frame_units` is the time of a frame over that of the fixed load before it."""
    of = {
        "rtf": [one.wall_s / one.audio_s for one in taken],
        "rtf_cpu": [one.cpu_s / one.audio_s for one in taken],
        "frame_ms": [1000 * one.wall_s / one.frames for one in taken],
        "frame_cpu_ms": [1000 * one.cpu_s / one.frames for one in taken],
        "unit_ms": [one.unit_ms for one in taken],
        "frame_units": [1000 * one.wall_s / one.frames / one.unit_ms for one in taken],
        "first_packet_ms": [1000 * one.first_packet_s for one in taken],
    }
    return {name: statistics.median(values) for name, values in of.items()}


def _cold(repeats: int) -> dict[str, float | None]:
    """Median wall and CPU seconds of processes that say two words, and their largest memory, where Linux tells it."""
    wall_s, cpu_s, memory_mib = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(repeats):
            status = Path(folder, "status")
            command = [sys.executable, "-c", _COLD.format(status=str(status)), "say", _COLD_TEXT, "-o"]
            before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            ran = subprocess.run([*command, f"{folder}/{number}.wav"], capture_output=True, text=True, check=False)
            wall_s.append(time.perf_counter() - began_s)
            if ran.returncode:
                raise EngineError(f"sonoro say ended with {ran.returncode}: {ran.stderr}")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
            memory_mib += [int(found[1]) / 1024] if found else []
    return {
        "wall_s": statistics.median(wall_s),
        "cpu_s": statistics.median(cpu_s),
        "memory_mib": max(memory_mib, default=None),
    }
