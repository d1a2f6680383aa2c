"""Plans for products of a few rows with a weight [N, K]: kind of kernel, block sizes, and how they are chosen.

Measured plans are files by card in `tuned/` (`sonoro tune` writes one); any other card or size gets a plan estimated
from multiprocessors, shared memory and bandwidth. `sonoro.ops.linear` runs the plans."""

import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sonoro.ops.device import Card, card


@dataclass(frozen=True)
class GemvPlan:
    """GEMV: a program holds `rows` whole rows of the weight (of each half, if gated) in registers and loops over the
    rows of x."""

    rows: int
    block_k: int
    warps: int
    enable_pdl: bool = True


@dataclass(frozen=True)
class TilePlan:
    """A program computes an output tile of `block_m` rows and `block_n` columns with the tensor cores.

    `slice_k` > 1: each warp sums a slice of K, `block_k` at a time; with few rows the chains of dependent sums, not the
    memory, take the time. `split_k` > 1: as many programs share K, and a second kernel adds their sums in order (not
    for gated products). `is_prefetched`: the weight is prefetched to L2 before the kernel ahead is done. `is_swapped`:
    the weight is the first operand of the tensor cores, which may come from registers: 8-bit weights are widened there.
    `has_tma`: tiles are loaded by TMA where `sonoro.ops.tiles` can, else as without it.
    """

    block_m: int
    block_n: int
    block_k: int
    slice_k: int
    split_k: int
    stages: int
    warps: int
    is_prefetched: bool
    enable_pdl: bool = True
    is_swapped: bool = False
    has_tma: bool = False

    @property
    def first_rows(self) -> int:
        """Rows of the first operand's tile."""
        return self.block_n if self.is_swapped else self.block_m


@dataclass(frozen=True)
class CublasPlan:
    """torch's product (cuBLAS), with norm and epilogue as separate kernels."""

    enable_pdl: bool = True


Plan = GemvPlan | TilePlan | CublasPlan

LIMITS = (1, 2, 16, 32, 64, 128, 256, 1024, 2048)
"""Batch-size buckets: the most rows for which each plan of a file's line is used. Beyond the last of a line, where
products are not bound by memory, cuBLAS runs: tiles for fewer rows read the weights repeatedly. Most lines end at 256.
"""

_STORED = {torch.bfloat16: "none", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
"""Names of weight formats in files."""

W8A8 = "fp8_w8a8"
"""The name of plans for fp8 weights and rows in E4M3 (`sonoro.ops.e4m3`). Where such a line says "cublas", or nothing,
rows stay in 16 bits and the plan for fp8 weights applies."""

REGISTER_BYTES = 256
"""Weight bytes per thread in an untuned `GemvPlan`: a quarter of its registers; sums and `x` take more."""

_TUNED = Path(__file__).parent / "tuned"


@dataclass(frozen=True)
class Product:
    """A product of `rows` rows with a weight `shape` [N, K] (two halves if gated) of `itemsize` bytes per element;
    activations have as many, but at least 2, or `terms` in E4M3."""

    rows: int
    shape: tuple[int, int]
    is_gated: bool = False
    itemsize: int = 2
    terms: int = 0

    @property
    def halves(self) -> int:
        return 2 if self.is_gated else 1

    @property
    def weight_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.itemsize

    def programs(self, plan: GemvPlan | TilePlan) -> int:
        outputs = self.shape[0] // self.halves
        if isinstance(plan, GemvPlan):
            return -(-outputs // plan.rows)
        return -(-self.rows // plan.block_m) * -(-outputs // plan.block_n) * plan.split_k

    def stage_bytes(self, plan: TilePlan) -> int:
        """Shared memory of one pipeline stage, in bytes."""
        x_bytes = self.terms or max(2, self.itemsize)
        column_bytes = x_bytes * plan.block_m + self.itemsize * self.halves * plan.block_n
        return plan.slice_k * plan.block_k * column_bytes

    def fits(self, plan: Plan, on: Card) -> bool:
        """Whether `on` has the registers and the shared memory for `plan`, and its splits divide this product."""
        if isinstance(plan, GemvPlan):
            # 8-bit weights are loaded four at once, and unpacked into further registers.
            if self.itemsize == 1 and self.shape[1] % 4:
                return False
            own, shares = plan.rows * self.shape[1] * self.itemsize * self.halves, (self.itemsize == 1) + 1
            return own <= 2 * REGISTER_BYTES * 32 * plan.warps // (shares * (2 if on.has_few_registers else 1))
        if isinstance(plan, CublasPlan):
            return True
        span, sums = plan.split_k * plan.slice_k * plan.block_k, plan.block_m * plan.block_n * plan.slice_k
        if self.terms and (plan.slice_k > 1 or self.shape[1] % span or self.shape[0] // self.halves % plan.block_n):
            return False
        is_small = sums * self.halves <= 32 * 32 * plan.warps or not on.has_few_registers
        has_memory = on.fit_stages(plan.first_rows, self.stage_bytes(plan), plan.stages) == plan.stages
        return is_small and has_memory and (plan.split_k == 1 or not (self.shape[1] % span or self.is_gated))


def plan_for(batch: int, weight: torch.Tensor, is_gated: bool) -> Plan:
    """The plan for `batch` rows and `weight` [N, K] on its GPU: measured if there is one, otherwise estimated."""
    n, k = weight.shape
    return _plan_for(_column(batch), (n, k), weight.dtype, is_gated, card(weight.device))


def e4m3_plan(batch: int, weight: torch.Tensor, is_gated: bool, terms: int) -> TilePlan | None:
    """The plan for `batch` rows as `terms` in E4M3 and `weight` [N, K] in fp8, if one was measured on its GPU. None is
    computed: the rows must be worth quantising."""
    if weight.dtype != torch.float8_e4m3fn:
        return None
    n, k = weight.shape
    return _e4m3_plan(_column(batch), (n, k), is_gated, terms, card(weight.device))


@functools.cache
def _e4m3_plan(column: int, shape: tuple[int, int], is_gated: bool, terms: int, on: Card) -> TilePlan | None:
    line = measured(on, W8A8).get(shape, ())
    if column >= len(line):
        return None
    plan = _fitting(line[column], Product(LIMITS[column], shape, is_gated, 1, terms), on)
    return plan if isinstance(plan, TilePlan) else None


def measured(on: Card, quantization: str = "none") -> dict[tuple[int, int], tuple[Plan, ...]]:
    """Measured plans for card `on`, or one of the same speed, by weight shape; for bfloat16 activations, and weights in
    bfloat16 or `quantization`."""
    return _measured(on.name, quantization)


def _measured(card_name: str, quantization: str) -> dict[tuple[int, int], tuple[Plan, ...]]:
    known = {name: plans for (name, stored), plans in _read().items() if stored == quantization}
    return known.get(card_name) or next((plans for name, plans in known.items() if card_name.startswith(name)), {})


def known_shapes() -> dict[tuple[int, int], bool]:
    """Weight shapes [N, K] in the package's files, those of the models, and whether each is gated."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(_TUNED.glob("*.json"))]
    return {_shape(name): name in file["gated"] for file in files for name in file["plans"]}


def use_tuned(text: str) -> str:
    """Use the plans in `text`, a file of `sonoro tune`, before the package's; returns the name of its card.
    Raises `ValueError` if it is no such file."""
    file = _parse(text)
    for key, plans in file.items():
        # Shapes that the file lacks keep the plans of a card of the same speed.
        _read()[key] = _measured(*key) | plans
    _plan_for.cache_clear()
    _e4m3_plan.cache_clear()
    return next(iter(file))[0]


def from_text(text: str) -> Plan:
    """Parse a plan written by `to_text`. Raises `ValueError`."""
    kind, *rest = text.split()
    flags = {"prefetch", "swapped", "tma"}.intersection(rest[-3:])
    sizes = [int(size) for size in rest[: len(rest) - len(flags)]]
    match kind, sizes:
        case "gemv", [rows, block_k, warps]:
            return GemvPlan(rows, block_k, warps)
        case "tile", [m, n, k, slice_k, split_k, stages, warps]:
            is_swapped, is_prefetched, has_tma = "swapped" in flags, "prefetch" in flags, "tma" in flags
            return TilePlan(m, n, k, slice_k, split_k, stages, warps, is_prefetched, True, is_swapped, has_tma)
        case "cublas", []:
            return CublasPlan()
    raise ValueError(f"no plan: {text!r}")


def to_text(plan: Plan) -> str:
    """The plan as text, as stored in files."""
    match plan:
        case GemvPlan(rows, block_k, warps):
            return f"gemv {rows} {block_k} {warps}"
        case TilePlan():
            sizes = (plan.block_m, plan.block_n, plan.block_k, plan.slice_k, plan.split_k, plan.stages, plan.warps)
            flags = ["swapped"] * plan.is_swapped + ["tma"] * plan.has_tma + ["prefetch"] * plan.is_prefetched
            return " ".join(["tile", *map(str, sizes), *flags])
    return "cublas"


def smaller(plan: Plan) -> Plan | None:
    """The next plan to try if `plan` cannot be launched: fewer stages, smaller blocks, then cuBLAS; None after that."""
    match plan:
        case TilePlan() if plan.has_tma:
            return replace(plan, has_tma=False)
        case TilePlan() if plan.stages > 2:
            return replace(plan, stages=2)
        case TilePlan() if plan.block_n > 16:
            return replace(plan, block_n=plan.block_n // 2)
        case TilePlan() if plan.block_k > 32:
            return replace(plan, block_k=plan.block_k // 2)
        case GemvPlan() if plan.rows > 1:
            return replace(plan, rows=plan.rows // 2)
        case CublasPlan():
            return None
    return CublasPlan(plan.enable_pdl)


def candidates(product: Product, on: Card) -> Iterator[Plan]:
    """Plans worth measuring for `product` on card `on`, cuBLAS last."""
    if product.rows <= 2:
        for rows, warps in itertools.product((1, 2, 4, 8, 16), (2, 4, 8)):
            block_k = min(2048 if rows < 4 else 512, 1 << (product.shape[1] - 1).bit_length())
            if product.fits(plan := GemvPlan(rows, block_k, warps), on):
                yield plan
    if product.itemsize <= 2 and (on.capability >= (8, 0) or on.gfx):
        block_m = next((limit for limit in (16, 32, 64) if product.rows <= limit), 64 if product.rows <= 256 else 128)
        least_n = 16 if on.gfx or block_m >= 64 else 8
        sizes = itertools.product((8, 16, 32, 64, 128), (64, 128, 256), (1, 4), (1, 4), (3, 4, 5))
        for block_n, block_k, slice_k, split_k, stages in sizes:
            # Slice-K pays if dependent sums take longer than memory; split-K costs reading partial sums again.
            if block_n < least_n or (slice_k > 1 and block_m > 32) or (split_k > 1 and block_m < 64):
                continue
            tile = TilePlan(block_m, block_n, block_k, slice_k, split_k, stages, 8 if block_m > 64 else 4, False)
            swapped = [replace(tile, is_swapped=True)] if product.itemsize == 1 and block_n >= 16 else []
            # After the plain tile, which a computed plan prefers: the estimate is the same.
            by_tma = [replace(tile, has_tma=True)] if product.itemsize == 2 and block_m >= 64 and on.has_tma else []
            yield from (one for one in (tile, *swapped, *by_tma) if product.fits(one, on))
    yield CublasPlan()


def variations(plan: Plan, product: Product, on: Card) -> Iterator[Plan]:
    """Plans that differ from `plan` in stages, warps or prefetch only."""
    found: list[Plan] = []
    match plan:
        case GemvPlan():
            sizes = itertools.product((256, 512, 1024, 2048), (2, 4, 8))
            found = [replace(plan, block_k=block_k, warps=warps) for block_k, warps in sizes]
        case TilePlan():
            ahead = (False, True) if on.capability >= (9, 0) else (False,)
            found = [
                replace(plan, stages=stages, is_prefetched=is_prefetched)
                for stages, is_prefetched in itertools.product(range(2, 9), ahead)
            ]
    return (one for one in found if product.fits(one, on))


_DELAY_S = 1e-6
"""Latency of a load while the memory is busy."""
_STEP_S = 25e-9
"""Time of one dependent sum, over 16 of K."""
_LAUNCH_S = 2e-6
"""Cost of an additional kernel."""
_SHARE = 0.8
"""Share of the bandwidth that products of a few rows reach with work for every multiprocessor."""


def estimate_s(plan: Plan, product: Product, on: Card) -> float:
    """Rough time of `plan` for `product` on a card, to rank plans only.
    By Little's law, the memory is busy if enough bytes are in flight; plus waves of programs, chains of dependent sums,
    and launches."""
    (outputs, inputs), count = product.shape, on.multiprocessors
    floor_s = product.weight_bytes / on.bandwidth
    if isinstance(plan, CublasPlan):
        # An 8-bit weight is read, written in 16 bits and read again.
        floor_s *= 5 if product.itemsize == 1 else 1
        busy = min(1.0, -(-outputs // 128) * -(-product.rows // 128) * -(-inputs // 512) / count)
        return floor_s / (_SHARE * busy) + 2 * _LAUNCH_S
    programs = product.programs(plan)
    if isinstance(plan, GemvPlan):
        own = plan.rows * inputs * product.itemsize * product.halves
        at_once, loading, chain_s = 16 // plan.warps, own, product.rows * 1e-6
    else:
        stage = product.stage_bytes(plan)
        used = stage * on.buffers(plan.first_rows, plan.stages)
        weights = product.itemsize * product.halves * plan.slice_k * plan.block_k * plan.block_n
        at_once, loading = max(1, min(16 // plan.warps, on.shared_bytes // used)), weights * (plan.stages - 1)
        chain_s = _STEP_S * inputs / (16 * plan.slice_k * plan.split_k) * max(1, plan.block_m * plan.block_n / 2048)
    waves = -(-programs // (count * at_once))
    here = min(at_once, -(-programs // count))
    busy = min(1.0, programs / count) * programs / (waves * min(programs, count * at_once))
    full = min(1.0, here * loading * count / (on.bandwidth * _DELAY_S))
    again = 1 + 0.3 * (-(-product.rows // getattr(plan, "block_m", product.rows)) - 1)
    last_s, share = (_LAUNCH_S, _SHARE) if isinstance(plan, TilePlan) else (0.0, 1.0)
    return max(floor_s * again / (busy * full * share), waves * chain_s) + last_s * (
        1 + (getattr(plan, "split_k", 1) > 1)
    )


def _column(batch: int) -> int:
    return sum(limit < batch for limit in LIMITS)


@functools.cache
def _plan_for(column: int, shape: tuple[int, int], dtype: torch.dtype, is_gated: bool, on: Card) -> Plan:
    if column == len(LIMITS):
        return CublasPlan()
    product = Product(LIMITS[column], shape, is_gated, dtype.itemsize)
    line = measured(on, _STORED[dtype]).get(shape) if dtype in _STORED else None
    if line is not None and (column < len(line) or dtype == torch.bfloat16):
        return _fitting(line[column], product, on) if column < len(line) else CublasPlan()
    if not on.is_gpu:
        return _untuned_vector(product) if column < 2 else CublasPlan()
    # For 8-bit weights cuBLAS needs a 16-bit copy, which pays with many rows only.
    last = {torch.bfloat16: 5, torch.float16: 5, torch.int8: 6, torch.float8_e4m3fn: 6}.get(dtype, 0)
    choices = [
        plan for plan in candidates(product, on) if not isinstance(plan, TilePlan) or (column > 1 and column <= last)
    ]
    return min(choices, key=lambda plan: estimate_s(plan, product, on))


def _fitting(plan: Plan | None, product: Product, on: Card) -> Plan:
    """`plan`, or the next smaller one that fits the card."""
    while plan is not None and not product.fits(plan, on):
        plan = _fewer_stages(plan, product, on) or smaller(plan)
    return plan or CublasPlan()


def _fewer_stages(plan: Plan, product: Product, on: Card) -> Plan | None:
    if not isinstance(plan, TilePlan):
        return None
    stages = on.fit_stages(plan.first_rows, product.stage_bytes(plan), plan.stages)
    return replace(plan, stages=stages) if 1 < stages < plan.stages else None


def _untuned_vector(product: Product) -> Plan:
    width_in, row_bytes = product.shape[1], product.shape[1] * product.itemsize * product.halves
    block_k = min(512, 1 << (width_in - 1).bit_length())
    for rows in (4, 2, 1):
        if rows * row_bytes <= 128 * REGISTER_BYTES:
            return GemvPlan(rows, block_k, 4)
    return GemvPlan(1, 1024, 8) if row_bytes <= 256 * REGISTER_BYTES else CublasPlan()


_Files = dict[tuple[str, str], dict[tuple[int, int], tuple[Plan, ...]]]
"""Plans by weight shape, for each card and weight format."""


@functools.cache
def _read() -> _Files:
    files: _Files = {}
    for path in sorted(_TUNED.glob("*.json")):
        files |= _parse(path.read_text(encoding="utf-8"))
    return files


def _shape(name: str) -> tuple[int, int]:
    n, k = name.split("x")
    return int(n), int(k)


def _parse(text: str) -> _Files:
    """Parse a file of plans, for each card it applies to. Raises `ValueError`."""
    try:
        file: dict[str, Any] = json.loads(text)
        quantization = file.get("quantization", "none")
        if file["rows"] != list(LIMITS) or file["dtype"] != "bfloat16" or quantization not in (*_STORED.values(), W8A8):
            raise ValueError("its rows, its dtype or its quantization are others")
        plans = {_shape(shape): tuple(from_text(plan) for plan in line) for shape, line in file["plans"].items()}
        return {(name, quantization): dict(plans) for name in (file["device"], *file.get("also", ()))}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no file of plans: {error!r}") from error
