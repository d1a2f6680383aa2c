"""Time SnakeBeta in three implementations, at every shape of the released codec decoder, with its memory floor.

    python benchmarks/snake.py [DEVICE]

Prints a line of JSON for each batch and shape.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from sonoro.core.errors import border
from sonoro.ops.activation import snake_beta_kernel, snake_beta_rates, snake_beta_reference
from sonoro.profile.timing import copy_bandwidth, times_ms
from sonoro.runtime.graphs import GraphSet

__all__ = ["SHAPES", "compare"]

logger = logging.getLogger(__name__)

CHUNK_FRAMES = 4
BATCHES = (1, 64)
SHAPES = ((1536, 4, 1), (768, 32, 7), (384, 160, 7), (192, 640, 7), (96, 1920, 7))
"""Channels, columns per frame, and how many of the decoder's 29 activations have this shape: the width halves in each
of four blocks (rates 8, 5, 4 and 3 on 4 columns a frame), with one activation before each block, six within and one
last. """

_REPEATS, _WARM_UPS = 12, 3

Snake = Callable[[Tensor, Tensor, Tensor], Tensor]


def compare(device: torch.device, bytes_per_s: float) -> list[dict[str, Any]]:
    """A row for each batch and shape, and one for all 29 activations: microseconds per call, float32 [B, T, C].

    A graph replays ten calls on one input, which is in the cache for small shapes. An implementation that cannot run is
    None; a CPU runs the separate operations only, at batch 1. `floor_us`: memory traffic at `bytes_per_s`.
    """
    is_gpu = device.type == "cuda"
    ways: dict[str, Snake | None] = {
        "triton_us": _kernel if is_gpu else None,
        "torch_us": _separate,
        "compile_us": _compiled() if is_gpu else None,
    }
    rows = []
    for batch in BATCHES if is_gpu else BATCHES[:1]:
        total: dict[str, float | None] = dict.fromkeys([*ways, "floor_us"], 0.0)
        for channels, columns, count in SHAPES:
            shape = (batch, CHUNK_FRAMES * columns, channels)
            taken: dict[str, float | None] = {name: _try(name, way, shape, device) for name, way in ways.items()}
            taken["floor_us"] = 2 * 4 * batch * shape[1] * channels / bytes_per_s * 1e6
            rows.append({"batch": batch, "channels": channels, "columns": shape[1], "count": count, **taken})
            for name, value in taken.items():
                before = total[name]
                total[name] = None if value is None or before is None else before + count * value
        rows.append({"batch": batch, "channels": None, "columns": None, "count": 29, **total})
    return rows


def _kernel(x: Tensor, rate: Tensor, scale: Tensor) -> Tensor:
    return snake_beta_kernel(x, rate, scale, channel_dim=-1)


def _separate(x: Tensor, rate: Tensor, scale: Tensor) -> Tensor:
    return x + scale * torch.sin(x * rate).square()


def _compiled() -> Snake:
    """The reference compiled by torch.compile, with dynamic shapes if possible."""
    compiled = torch.compile(snake_beta_reference, dynamic=True)
    return lambda x, rate, scale: compiled(x, rate, scale, channel_dim=-1)


def _try(name: str, way: Snake | None, shape: tuple[int, ...], device: torch.device) -> float | None:
    """Microseconds per call of `way`; None if it is None or fails."""
    if way is None:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(device)
    rates = 0.1 * torch.randn(2, shape[-1], generator=generator)
    rate, scale = snake_beta_rates(*rates.to(device))
    with border(lambda error: logger.warning("snake=%s shape=%s error=%r", name, shape, error)):
        return 1000 * _call_ms(lambda: way(x, rate, scale), device)
    return None


def _call_ms(call: Callable[[], Tensor], device: torch.device) -> float:
    together = 10 if device.type == "cuda" else 1

    def work(rows: Tensor) -> None:
        for _ in range(together):
            call()

    calls = GraphSet("snake", work, (1,), 0, device)
    calls.capture()
    for captured in calls.captured:
        if captured.error:
            raise RuntimeError(captured.error)
    for _ in range(_WARM_UPS):
        calls.run([0])
    return statistics.median(times_ms(lambda: calls.run([0]), _REPEATS, device)) / together


def main() -> None:
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda")
    stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(), stream:
        for row in compare(device, copy_bandwidth(device)):
            print(json.dumps(row))


if __name__ == "__main__":
    main()
