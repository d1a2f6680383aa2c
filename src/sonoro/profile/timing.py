"""Time work and memory copies; on a GPU with CUDA events."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}


@contextmanager
def on_stream(device: torch.device) -> Iterator[None]:
    """A context with inference mode, and on a GPU a stream that can be captured."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the weights were made on another stream
    stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(), stream:
        yield


def times_ms(work: Callable[[], Any], repeats: int, device: torch.device) -> list[float]:
    """Times in ms of `repeats` calls of `work` launched back to back, or of launching if slower. Synchronises."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(repeats):
            work()
            marks.append(time.perf_counter())
        return [1000 * (end - start) for start, end in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def median_ms(work: Callable[[], Any], repeats: int, warm_ups: int, device: torch.device) -> float:
    """Median of `times_ms` after `warm_ups` calls."""
    for _ in range(warm_ups):
        work()
    return statistics.median(times_ms(work, repeats, device))


def copy_bandwidth(device: torch.device) -> float:
    """Memory bandwidth in bytes per second, read plus written: the fastest of ten copies of a tensor larger than
    caches."""
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    fastest_ms = min(times_ms(lambda: target.copy_(source), 12, device)[2:])
    return 2 * source.nbytes / fastest_ms * 1000
