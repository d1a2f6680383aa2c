"""Compare how the built-in voice is spoken on this machine's CPU by two checkouts, in turns.

    python benchmarks/say_before_after.py --before ../before --out benchmarks/results/say-builtin-before-after-epyc.json

Each checkout speaks two sentences in a process of its own, with one thread and with two: RTF, by wall and by CPU time,
and the time to the first packet. With `--cold`, `sonoro say "Good morning."` is timed as well, in new processes: wall
and CPU seconds and the largest memory. All are medians, with the ratio of after to before; `ratios` are those of each
turn. `--avx2` lets torch, MKL and oneDNN use AVX2 alone. The C code must have been compiled in a checkout that has it
(`src/sonoro/native/build.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from two_steps import finish

TEXT = "The birch canoe slid on the smooth planks. Glue the sheet to the dark blue background."
AVX2_ALONE = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
SPEAKER = """
import json, sys, time
import torch
from sonoro.core.config import EngineConfig
from sonoro.core.types import AudioChunk, Finished, SpeechRequest
from sonoro.engine.engine import Engine
from sonoro.models import registry

engine = Engine(registry.load(device="cpu").model, EngineConfig(slots=1))
for line in sys.stdin:
    threads, text = json.loads(line)
    torch.set_num_threads(threads)
    request = engine.spec.resolve(SpeechRequest(id="say", text=text))
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    first_s, first_cpu_s, samples, finished = 0, 0, 0, None
    engine.submit(request)
    while finished is None:
        for event in engine.tick():
            if isinstance(event, AudioChunk):
                first_s = first_s or time.perf_counter() - began_s
                first_cpu_s = first_cpu_s or time.process_time() - began_cpu_s
                samples += len(event.pcm) // 2
            elif isinstance(event, Finished):
                finished = event
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    audio_s = samples / engine.spec.sample_rate
    print(json.dumps({"rtf": wall_s / audio_s, "rtf_cpu": cpu_s / audio_s,
        "first_packet_ms": 1000 * first_s, "first_packet_cpu_ms": 1000 * first_cpu_s}), flush=True)
"""
COLD = """
import atexit
from pathlib import Path
atexit.register(lambda: Path({status!r}).write_text(Path("/proc/self/status").read_text()))
from sonoro.cli.main import main
main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the checkout to compare with this one")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--cpu")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    trees = {"before": options.before.resolve(), "after": Path(__file__).resolve().parents[1]}
    settings = AVX2_ALONE if options.avx2 else {}
    rows = [*_spoken(trees, settings, options.repeats, options.threads)]
    if options.cold:
        rows.append({"cold": True, **_compared(_cold(trees, settings, options.repeats))})
    commits = {name: _commit(tree) for name, tree in trees.items()}
    finish(options, "say-before-after", settings=settings, repeats=options.repeats, commits=commits, rows=rows)


def _spoken(
    trees: Mapping[str, Path], settings: Mapping[str, str], repeats: int, threads: list[int]
) -> Iterator[dict[str, Any]]:
    """A row for each number of threads."""
    with ExitStack() as stack:
        piped: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", SPEAKER]
        speakers = {
            name: stack.enter_context(subprocess.Popen(command, env=_environment(tree, settings), **piped))
            for name, tree in trees.items()
        }
        for count in threads:
            readings: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
            for turn in range(repeats + 1):
                for name, speaker in speakers.items():
                    reading = _ask(speaker.stdin, speaker.stdout, count)
                    # The first of each warms up.
                    readings[name] += [reading] if turn else []
            print(row := {"threads": count, **_compared(readings)}, flush=True)
            yield row
        for speaker in speakers.values():
            assert speaker.stdin is not None
            speaker.stdin.close()


def _ask(given: IO[str] | None, told: IO[str] | None, threads: int) -> dict[str, float]:
    """One reading by a speaker."""
    assert given is not None
    assert told is not None
    given.write(json.dumps([threads, TEXT]) + "\n")
    given.flush()
    reading: dict[str, float] = json.loads(told.readline())
    return reading


def _cold(trees: Mapping[str, Path], settings: Mapping[str, str], repeats: int) -> dict[str, list[dict[str, float]]]:
    """Readings of `sonoro say` in new processes."""
    readings: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(repeats + 1):
            for name, tree in trees.items():
                status = Path(folder, "status")
                command = [sys.executable, "-c", COLD.format(status=str(status)), "say", "Good morning.", "-o"]
                before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
                subprocess.run(
                    [*command, f"{folder}/{turn}-{name}.wav"],
                    env=_environment(tree, settings), capture_output=True, check=True,
                )  # fmt: skip
                wall_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
                cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                (peak,) = (line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
                reading = {"wall_s": wall_s, "cpu_s": cpu_s, "memory_mib": int(peak) / 1024}
                # The first of each writes bytecode.
                readings[name] += [reading] if turn else []
    return readings


def _compared(readings: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    """By figure: the medians, the ratio of the medians, and that of each turn."""
    figures: dict[str, Any] = {}
    for figure in readings["after"][0]:
        before, after = ([reading[figure] for reading in readings[name]] for name in ("before", "after"))
        middle = statistics.median(before), statistics.median(after)
        ratios = [_short(late / early) for early, late in zip(before, after, strict=True)]
        medians = {"before": _short(middle[0]), "after": _short(middle[1]), "ratio": _short(middle[1] / middle[0])}
        figures[figure] = {**medians, "ratios": ratios}
    return figures


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def _environment(tree: Path, settings: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **settings, "PYTHONPATH": str(tree / "src")}


def _commit(tree: Path) -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
