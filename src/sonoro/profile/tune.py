"""Measures on the card at hand how products of a few rows run best: `sonoro tune`.

Of each weight shape and number of rows the plans that are estimated to be fastest are timed, one product after the
other over weights that no cache holds, in a CUDA graph; the best is varied once more. What is measured is written at
once, so that a run that is broken off goes on where it was. Knows no model: shapes are given.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sonoro.core.errors import ConfigError
from sonoro.ops.device import Card, card
from sonoro.ops.linear import norm_gate_up_kernel, norm_linear_kernel
from sonoro.ops.plans import (
    LIMITS,
    CublasPlan,
    GemvPlan,
    Plan,
    Product,
    TilePlan,
    candidates,
    estimate_s,
    from_text,
    known_shapes,
    to_text,
    variations,
)
from sonoro.profile.timing import median_ms
from sonoro.runtime.kernels import own_plans

try:
    from triton.errors import TritonError
except ImportError:
    TritonError = RuntimeError

__all__ = ["MOST_ROWS", "Tuning", "parse_shape", "run"]

MOST_ROWS = 256
"""Rows of the last column that is measured: with more, the library serves."""

_TRIED = 12
"""Plans of a product that are timed, of those that are estimated to be fastest, before the best is varied."""

_CACHE_BYTES = 1 << 28
"""Of weights that a chain reads at least: more than any L2 cache holds."""

Measure = Callable[[Product, Plan], float]
"""The seconds that a product takes by a plan; infinity where it cannot be run."""


@dataclass(frozen=True)
class Tuning:
    """What is to be measured: weight `shapes` [N, K], each with whether it is gated, all that are known if none is
    given. `out`: the file, in the user's cache if None."""

    shapes: tuple[tuple[tuple[int, int], bool], ...] = ()
    out: Path | None = None


def parse_shape(text: str) -> tuple[tuple[int, int], bool]:
    """A shape as on a command line: "4096x2048", or "12288x2048:gated". Raises `ConfigError`."""
    size, _, kind = text.partition(":")
    n, _, k = size.partition("x")
    if not (n.isdecimal() and k.isdecimal() and int(n) and int(k) and kind in ("", "gated")):
        raise ConfigError("shape", text, "it must be as 4096x2048 or 12288x2048:gated")
    return (int(n), int(k)), kind == "gated"


def run(tuning: Tuning, device: torch.device, say: Callable[[str], None], measure: Measure | None = None) -> Path:
    """Measure, saying how it goes, and print the file, which the next start reads. Raises `ConfigError` for a device
    that is no GPU."""
    on = card(device)
    if measure is None:
        if not on.is_gpu or device.type != "cuda":
            raise ConfigError("device", str(device), "plans are measured on a GPU")
        measure = _measure_on(device)
    path = tuning.out or own_plans(device)
    shapes = tuning.shapes or tuple(known_shapes().items())
    file = _File(path, on)
    columns = [limit for limit in LIMITS if limit <= MOST_ROWS]
    total, done = len(shapes) * len(columns), 0
    for shape, is_gated in shapes:
        for rows in columns[len(file.line(shape)) :]:
            product = Product(rows, shape, is_gated)
            best, took_s, library_s = _fastest(product, on, measure)
            file.add(shape, best, is_last=rows == columns[-1], is_gated=is_gated)
            number = done + columns.index(rows) + 1
            times = f"{1e6 * took_s:.1f} us, the library's {1e6 * library_s:.1f}"
            say(f"{number}/{total} {_name(shape)} rows={rows}: {to_text(best)}, {times}")
        done += len(columns)
    say(f"written to {path}, and read at the next start; to contribute it, add it to src/sonoro/ops/tuned:")
    say(path.read_text(encoding="utf-8"))
    return path


class _File:
    """The file of plans as it grows: whole lines are `plans`, one that is not yet whole is `unfinished`."""

    def __init__(self, path: Path, on: Card) -> None:
        self._path = path
        head = {"device": on.name, "dtype": "bfloat16", "rows": list(LIMITS)}
        how = f"sonoro tune, torch {torch.__version__}"
        self._values: dict[str, Any] = {**head, "measured": how, "gated": [], "plans": {}, "unfinished": {}}
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            if {name: found.get(name) for name in head} != head:
                raise ConfigError("out", str(path), "it holds the plans of another card")
            self._values |= found

    def line(self, shape: tuple[int, int]) -> Sequence[Plan]:
        """What is known of a shape, by rows."""
        name = _name(shape)
        return [from_text(plan) for plan in self._values["plans"].get(name) or self._values["unfinished"].get(name, ())]

    def add(self, shape: tuple[int, int], plan: Plan, *, is_last: bool, is_gated: bool) -> None:
        """The plan of the next rows of a shape."""
        name, unfinished = _name(shape), self._values["unfinished"]
        unfinished.setdefault(name, []).append(to_text(plan))
        if is_last:
            self._values["plans"][name] = unfinished.pop(name)
            if is_gated and name not in self._values["gated"]:
                self._values["gated"].append(name)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._values, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self._path)


def _name(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def _fastest(product: Product, on: Card, measure: Measure) -> tuple[Plan, float, float]:
    """The best plan, how long it takes, and how long the library's does; seconds."""
    times: dict[Plan, float] = {}

    def best(plans: Iterator[Plan]) -> Plan:
        for plan in plans:
            if plan not in times:
                times[plan] = measure(product, plan)
        return min(times, key=lambda plan: times[plan])

    found = sorted(candidates(product, on), key=lambda plan: estimate_s(plan, product, on))
    kinds = (GemvPlan, TilePlan)
    first = [plan for kind in kinds for plan in [one for one in found if isinstance(one, kind)][:_TRIED]]
    chosen = best(iter([CublasPlan(), *first]))
    chosen = best(variations(chosen, product, on))
    return chosen, times[chosen], times[CublasPlan()]


def _measure_on(device: torch.device) -> Measure:
    weights: dict[tuple[int, int], list[Tensor]] = {}

    @torch.inference_mode()
    def measure(product: Product, plan: Plan) -> float:
        (n, k), kernel = product.shape, norm_gate_up_kernel if product.is_gated else norm_linear_kernel
        if product.shape not in weights:
            weights.clear()
            count = max(4, math.ceil(_CACHE_BYTES / product.weight_bytes))
            weights[product.shape] = [torch.randn(n, k, device=device, dtype=torch.bfloat16) for _ in range(count)]
        x = torch.randn(product.rows, k, device=device, dtype=torch.bfloat16)
        gain, chain = torch.ones(k, device=device, dtype=torch.bfloat16), weights[product.shape]

        def products() -> None:
            for weight in chain:
                kernel(x, gain, 1e-6, weight, plan=plan)

        try:
            products()
        except (TritonError, RuntimeError):  # the card cannot launch it
            return math.inf
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            products()
        return median_ms(graph.replay, 20, 3, device) / 1000 / len(chain)

    return measure
