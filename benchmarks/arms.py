"""Compare three ways to run a model's frames: eager, CUDA graphs of plain torch operations, graphs of fused kernels.

    python benchmarks/arms.py --model fish-s2-pro --load-format dummy --out results

Drives an engine in this process, without HTTP: `--concurrency` clients in a closed loop, with requests of `--frames`
frames. Eager uses plain torch operations too. Writes arms-<model>.json after every level, arms-<model>.png at the end,
and ends with one line of JSON. A failed level does not stop the others.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from matplotlib.figure import Figure

from sonoro.core.config import EngineConfig
from sonoro.core.errors import EngineError
from sonoro.core.types import AudioChunk, Failed, Finished
from sonoro.engine.engine import Engine
from sonoro.models import registry
from sonoro.models.base import LoadedModel
from sonoro.models.shared.codec_choice import dtype_name
from sonoro.ops.dispatch import references_alone
from sonoro.profile.report import Report
from sonoro.profile.requests import speech_request

ARMS = {"eager": (True, True), "graph, plain operations": (False, True), "graph, fused kernels": (False, False)}
"""By name: whether it is eager, and whether it uses references alone."""

TEXT = "The birch canoe slid on the smooth planks."
WARM_UP_FRAMES = 8
PANELS = {
    "latency of a request, ms": "latency_mean_ms",
    "first audio, ms": "first_audio_mean_ms",
    "requests a second": "request_throughput",
    "audio seconds a second (xRT)": "xrt",
    "seconds per second of audio (RTF)": "rtf_mean",
}

PROMPTS: dict[str, tuple[str, float]] = {
    "short, en": ("Good morning, and welcome on board.", 0.125),
    "short, zh": ("早上好,欢迎您上车。", 0.125),
    "medium, en": ("The next train to the coast leaves from platform four in twelve minutes; mind the gap.", 0.375),
    "medium, zh": ("开往海边的下一班列车将于十二分钟后从四号站台发车,请注意脚下安全。", 0.375),
    "long, en": (
        "When the river rose that spring, the people of the valley carried their books up to the old mill, one box "
        "after another, until the stairs were full and nobody could reach the lamp. They read aloud to each other in "
        "the dark, from memory where the pages were wet, and when the water fell they knew most of it by heart.",
        1.0,
    ),
    "long, zh": (
        "那年春天河水上涨,山谷里的人们把书一箱一箱地搬到旧磨坊里,直到楼梯堆满了书,谁也够不着那盏灯。"
        "他们在黑暗中互相朗读,书页湿了就凭记忆背诵。等到河水退去的时候,大部分内容他们都已经牢记在心了。",
        1.0,
    ),
}
"""Texts by name, with the share of `--prompts` frames that each is spoken for."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as sonoro serve takes it; the built-in voice if none")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 10])
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3, help="requests of each client")
    parser.add_argument(
        "--prompts", type=int, default=0, help="frames of the longest of the additional texts, 0 for none"
    )
    parser.add_argument(
        "--max-positions", type=int, default=512, help="of a slot: plain operations attend to all of them"
    )
    parser.add_argument("--commit", help="commit of the code, if there is no checkout")
    parser.add_argument("--out", type=Path, default=Path("results"))
    return parser.parse_args()


def measure(loaded: LoadedModel, args: argparse.Namespace, arm: str, numbers: Iterator[int], report: Report) -> None:
    """Run all levels of `arm` on an engine of its own; adds a row for each to `report`."""
    is_eager, is_plain = ARMS[arm]
    config = EngineConfig(
        slots=max(args.concurrency),
        max_positions=args.max_positions,
        max_frames=min(args.max_positions // 2, loaded.model.spec.max_frames),
        is_eager=is_eager,
    )
    with references_alone() if is_plain else contextlib.nullcontext():
        engine = Engine(loaded.model, config)
        loads = [({"concurrency": clients}, clients, TEXT, args.frames) for clients in args.concurrency]
        for name, (text, share) in PROMPTS.items() if args.prompts else ():
            loads.append(({"prompt": name}, 1, text, max(1, round(share * args.prompts))))
        for load, clients, text, frames in loads:
            row: dict[str, Any] = {"arm": arm, **load}
            try:
                speak(engine, numbers, clients, 1, text, min(frames, WARM_UP_FRAMES))
                row |= speak(engine, numbers, clients, args.rounds, text, frames)
            except Exception as error:
                row["error"] = repr(error)
                clear(engine)
            report.add(row)


def clear(engine: Engine) -> None:
    """Cancel a level's remaining requests, whose events would be taken for the next level's."""
    while engine.has_work:
        for event in engine.tick():
            engine.cancel(event.request_id)


def speak(  # noqa: PLR0917 (a load is so many numbers)
    engine: Engine,
    numbers: Iterator[int],
    clients: int,
    rounds: int,
    text: str,
    frames: int,
    *,
    with_words: bool = False,
) -> dict[str, float]:
    """Run `rounds` requests for `text` from each of `clients` clients; returns latencies and throughput. Raises
    `EngineError` if one fails."""
    sent_s: dict[str, float] = {}
    first_s: dict[str, float] = {}
    taken_s: list[float] = []
    began_s = time.perf_counter()
    while len(taken_s) < clients * rounds:
        while len(sent_s) - len(taken_s) < clients and len(sent_s) < clients * rounds:
            request = speech_request(engine.spec, next(numbers), text, frames)
            request = msgspec.structs.replace(request, with_words=with_words)
            sent_s[request.id] = time.perf_counter()
            engine.submit(request)
        for event in engine.tick():
            since_s = time.perf_counter() - sent_s[event.request_id]
            if isinstance(event, AudioChunk):
                first_s.setdefault(event.request_id, since_s)
            elif isinstance(event, Failed) or event.frames != frames:
                raise EngineError(f"{event.request_id} did not speak {frames} frames: {event}")
            elif isinstance(event, Finished):
                taken_s.append(since_s)
    wall_s, audio_s = time.perf_counter() - began_s, frames * engine.spec.frame_s
    return {
        "requests": len(taken_s),
        "frames": frames,
        "latency_mean_ms": 1000 * statistics.mean(taken_s),
        "latency_max_ms": 1000 * max(taken_s),
        "first_audio_mean_ms": 1000 * statistics.mean(first_s.values()),
        "first_audio_p50_ms": 1000 * statistics.median(first_s.values()),
        "request_throughput": len(taken_s) / wall_s,
        "xrt": len(taken_s) * audio_s / wall_s,
        "rtf_mean": statistics.mean(taken_s) / audio_s,
        "rtf_min": min(taken_s) / audio_s,
    }


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Plot a panel per metric, a group of bars per load, a colour per arm."""
    figure = Figure(figsize=(17, 3.8), layout="constrained")
    loads = list(dict.fromkeys(map(load_of, rows)))
    turned = 90 if len(loads) > 4 else 0
    for axes, (name, field) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for place, arm in enumerate(ARMS):
            found = {load_of(row): row[field] for row in rows if row["arm"] == arm and field in row}
            bars = axes.bar(
                [loads.index(load) + 0.28 * (place - 1) for load in found], list(found.values()), 0.26, label=arm
            )
            axes.bar_label(bars, fmt=figures, fontsize="x-small", rotation=turned, padding=2)
        axes.margins(y=0.2 if turned else 0.05)
        axes.set_title(name)
        axes.set_xticks(range(len(loads)), loads, rotation=turned, fontsize="small")
        axes.grid(axis="y", alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(ARMS))
    figure.suptitle(title)
    figure.savefig(path)


def figures(value: float) -> str:
    """`value` with three significant figures."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def load_of(row: Mapping[str, Any]) -> str:
    """A short label for a row's load."""
    return row["prompt"] if "prompt" in row else f"c={row['concurrency']}"


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    loaded = registry.load(args.model, device=args.device, load_format=args.load_format)
    name, is_gpu, numbers = loaded.model.spec.name, loaded.device.type == "cuda", itertools.count()
    if is_gpu:
        torch.cuda.synchronize(loaded.device)  # the weights were made on another stream
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "commit")}
    report = Report(
        {"bench": "arms", "model": name, "dtype": dtype_name(loaded.dtype)},
        is_gpu=is_gpu,
        settings=settings,
        commit=args.commit,
        out=args.out / f"arms-{name}.json",
    )
    for arm in ARMS:
        measure(loaded, args, arm, numbers, report)
        gc.collect()
        if is_gpu:
            torch.cuda.empty_cache()
    draw(report.rows, f"{name}, {args.frames} frames a request", args.out / f"arms-{name}.png")
    values = report.finish(f"{name}: three ways to run it")
    return 1 if any("error" in row for row in values["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
