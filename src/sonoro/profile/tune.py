"""Measure the fastest plans for products of a few rows on this card: `sonoro tune`.

For each weight shape and number of rows, the plans with the best estimates are timed in a CUDA graph, over weights that
exceed the L2 cache; then variations of the best. Kernels are compiled beforehand, on all cores. Each shape is written
when it is done, and an interrupted run resumes with the next."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sonoro.compile.variants import Variant, compile_variant, compilers, recording
from sonoro.core.config import usable_cores
from sonoro.core.errors import ConfigError
from sonoro.models.registry import check_units
from sonoro.ops.device import Card, card
from sonoro.ops.eight_bits import EIGHT_BITS, quantize
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
    known_shapes,
    to_text,
    variations,
)
from sonoro.profile.timing import median_ms
from sonoro.runtime.kernels import plans_of

try:
    from triton.errors import TritonError
except ImportError:
    TritonError = RuntimeError

MOST_ROWS = 256
"""Most rows that are measured; with more, cuBLAS runs."""

_TRIED = 12
"""Plans timed per product and kind, by estimate, before the best is varied."""

_CACHE_BYTES = 1 << 28
"""Least bytes of weights read per graph replay: more than any L2 cache."""


Weight = tuple[Tensor, Tensor | None]
"""A weight [N, K], and the scale [N] of an 8-bit one."""


class Bench(Protocol):
    """Compiles and times plans."""

    def compile(self, product: Product, plans: Iterable[Plan]) -> None:
        """Start compiling the kernels of `plans` for `product`."""

    def seconds(self, product: Product, plan: Plan) -> float:
        """Time of `product` with `plan`; infinity if it cannot be launched."""


@dataclass(frozen=True)
class TuneSettings:
    """The options of `sonoro tune`; a shape is [N, K], and whether it is gated."""

    shapes: tuple[tuple[tuple[int, int], bool], ...] = ()
    out: Path | None = None
    quantization: str = "none"

    @property
    def itemsize(self) -> int:
        return 2 if self.quantization == "none" else 1


def parse_shape(text: str) -> tuple[tuple[int, int], bool]:
    """Parse a shape of the command line: "4096x2048", or "12288x2048:gated". Raises `ConfigError`."""
    size, _, kind = text.partition(":")
    n, _, k = size.partition("x")
    if not (n.isdecimal() and k.isdecimal() and int(n) and int(k) and kind in ("", "gated")):
        raise ConfigError("shape", text, "it must be as 4096x2048 or 12288x2048:gated")
    return (int(n), int(k)), kind == "gated"


def run(tuning: TuneSettings, device: torch.device, say: Callable[[str], None], bench: Bench | None = None) -> Path:
    """Measure, report progress to `say`, and write the file, which the next start reads; returns its path.
    Forks compiler processes: the caller must have no other thread, and must not have used a GPU. Raises `ConfigError`
    for a device that is no GPU, or not there, weights that it has no units for, and a file that is none of plans."""
    if bench is not None:
        return _run(tuning, device, say, bench)
    if device.type != "cuda":
        raise ConfigError("device", str(device), "plans are measured on a GPU")
    with compilers(usable_cores()) as pool:
        _check(tuning, device)
        return _run(tuning, device, say, Gpu(device, pool, tuning.quantization))


def _check(tuning: TuneSettings, device: torch.device) -> None:
    """Raise `ConfigError` if there is no GPU `device`, or if it cannot run the weights of `tuning`."""
    if (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError("device", str(device), f"this machine has {torch.cuda.device_count()} CUDA devices")
    check_units(tuning.quantization, card(device))


def _run(tuning: TuneSettings, device: torch.device, say: Callable[[str], None], bench: Bench) -> Path:
    on = card(device)
    path = tuning.out or plans_of(on)[tuning.quantization]
    file = _File(path, on, tuning.quantization)
    columns = [limit for limit in LIMITS if limit <= MOST_ROWS]
    shapes = tuning.shapes or tuple(known_shapes().items())
    missing = [
        _Shape([Product(rows, shape, is_gated, tuning.itemsize) for rows in columns], on, bench)
        for shape, is_gated in shapes
        if not file.has(shape)
    ]
    done, total = (len(shapes) - len(missing)) * len(columns), len(shapes) * len(columns)
    # The kernels of the next shape compile while one is measured.
    for one, following in zip_longest(missing, missing[1:]):
        one.begin()
        one.measure_first()
        if following is not None:
            following.begin()
        file.add(one.products[0], one.vary())
        for product in one.products:
            done += 1
            best, best_s, library_s = one.found(product)
            times = f"{1e6 * best_s:.1f} us, the library's {1e6 * library_s:.1f}"
            say(f"{done}/{total} {_name(product.shape)} rows={product.rows}: {to_text(best)}, {times}")
    say(f"written to {path}, and read at the next start; to contribute it, add it to src/sonoro/ops/tuned:")
    say(path.read_text(encoding="utf-8"))
    return path


class _File:
    """The file of plans, written one shape at a time. Raises `ConfigError` if it is for another card or format."""

    def __init__(self, path: Path, on: Card, quantization: str) -> None:
        self._path = path
        head = {"device": on.name, "dtype": "bfloat16", "quantization": quantization, "rows": list(LIMITS)}
        how = f"sonoro tune, torch {torch.__version__}"
        self._values: dict[str, Any] = {**head, "measured": how, "gated": [], "plans": {}}
        if path.is_file():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigError("output", str(path), f"it is no file of plans: {error}") from error
            if not isinstance(found, dict) or {name: found.get(name) for name in head} != head:
                raise ConfigError("output", str(path), "it holds the plans of another card, or for other weights")
            self._values |= found

    def has(self, shape: tuple[int, int]) -> bool:
        return _name(shape) in self._values["plans"]

    def add(self, product: Product, plans: Sequence[Plan]) -> None:
        """Write the plans, by rows, for the shape of `product`."""
        name = _name(product.shape)
        self._values["plans"][name] = [to_text(plan) for plan in plans]
        if product.is_gated and name not in self._values["gated"]:
            self._values["gated"].append(name)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._values, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self._path)


def _name(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


class _Shape:
    """The products of one weight shape, and their times by plan."""

    def __init__(self, products: Sequence[Product], on: Card, bench: Bench) -> None:
        self.products, self._on, self._bench = products, on, bench
        self._times: dict[Product, dict[Plan, float]] = {product: {} for product in products}
        self._first: dict[Product, list[Plan]] = {}

    def begin(self) -> None:
        """Start compiling the plans that are tried first."""
        if not self._first:
            self._first = {product: list(_likely(product, self._on)) for product in self.products}
            self._compile(self._first)

    def measure_first(self) -> None:
        self._measure(self._first)

    def vary(self) -> list[Plan]:
        """Time variations of the best plans so far; returns the best plan of each product."""
        varied = {product: list(variations(self.found(product)[0], product, self._on)) for product in self.products}
        self._compile(varied)
        self._measure(varied)
        return [self.found(product)[0] for product in self.products]

    def found(self, product: Product) -> tuple[Plan, float, float]:
        """The best plan so far, its time, and cuBLAS's, in seconds."""
        times = self._times[product]
        best = min(times, key=lambda plan: times[plan])
        return best, times[best], times[CublasPlan()]

    def _compile(self, plans: dict[Product, list[Plan]]) -> None:
        for product, ones in plans.items():
            self._bench.compile(product, ones)

    def _measure(self, plans: dict[Product, list[Plan]]) -> None:
        for product, ones in plans.items():
            times = self._times[product]
            for plan in ones:
                if plan not in times:
                    times[plan] = self._bench.seconds(product, plan)


def _likely(product: Product, on: Card) -> Iterator[Plan]:
    """cuBLAS, and the plans of each kind with the best estimates."""
    found = sorted(candidates(product, on), key=lambda plan: estimate_s(plan, product, on))
    tiles = [plan for plan in found if isinstance(plan, TilePlan)]
    swapped, by_tma = [plan for plan in tiles if plan.is_swapped], [plan for plan in tiles if plan.has_tma]
    plain = [plan for plan in tiles if not (plan.is_swapped or plan.has_tma)]
    vectors = [plan for plan in found if isinstance(plan, GemvPlan)]
    return chain([CublasPlan()], vectors[:_TRIED], plain[:_TRIED], swapped[:_TRIED], by_tma[:_TRIED])


def _launch(x: Tensor, gain: Tensor, weight: Weight, plan: Plan, *, is_gated: bool) -> None:
    kernel = norm_gate_up_kernel if is_gated else norm_linear_kernel
    kernel(x, gain, 1e-6, *weight, plan=plan)


def compile_plan(product: Product, plan: Plan, on: Card, quantization: str = "none") -> None:
    """Compile the kernels of `plan` for `product` on a card; failures show again at the launch."""
    variants: dict[Variant, None] = {}
    with recording(on, variants.setdefault), torch.inference_mode():
        empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
        _launch(*_inputs(product, empty), _weight(product, quantization, empty), plan, is_gated=product.is_gated)
    for variant in variants:
        compile_variant(variant, on)


def _inputs(product: Product, make: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """Activations, and the norm's weight."""
    return make(product.rows, product.shape[1]), make(product.shape[1])


def _weight(product: Product, quantization: str, make: Callable[..., Tensor]) -> Weight:
    """A weight, and its scale if `quantization` has 8 bits."""
    weight = make(*product.shape)
    if quantization == "none":
        return weight, None
    if weight.is_meta:
        return weight.to(EIGHT_BITS[quantization]), torch.empty(len(weight), device="meta")
    return quantize(weight, quantization)


class Gpu:
    """Times plans on a GPU, and compiles them in the processes of `pool`."""

    def __init__(self, device: torch.device, pool: ProcessPoolExecutor, quantization: str = "none") -> None:
        self._device, self._pool, self._card, self._quantization = device, pool, card(device), quantization
        self._compiled: dict[tuple[Product, Plan], Future[None]] = {}
        self._weights: dict[tuple[int, int], list[Weight]] = {}

    def compile(self, product: Product, plans: Iterable[Plan]) -> None:
        for plan in plans:
            if (product, plan) not in self._compiled:
                what = (product, plan, self._card, self._quantization)
                self._compiled[product, plan] = self._pool.submit(compile_plan, *what)

    @torch.inference_mode()
    def seconds(self, product: Product, plan: Plan) -> float:
        wait([self._compiled[product, plan]])
        random = partial(torch.randn, device=self._device, dtype=torch.bfloat16)
        if product.shape not in self._weights:
            self._weights.clear()
            count = max(4, math.ceil(_CACHE_BYTES / product.weight_bytes))
            self._weights[product.shape] = [_weight(product, self._quantization, random) for _ in range(count)]
        inputs, weights = _inputs(product, random), self._weights[product.shape]

        def products() -> None:
            for weight in weights:
                _launch(*inputs, weight, plan, is_gated=product.is_gated)

        try:
            products()
        except (TritonError, RuntimeError):  # the card cannot launch it
            return math.inf
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            products()
        return median_ms(graph.replay, 20, 3, self._device) / 1000 / len(weights)
