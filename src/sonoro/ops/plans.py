"""How to run a product of a few rows with a weight [N, K]: kinds of kernel, block sizes, and how they are chosen.

Measured choices are files by the name of a card in `tuned/` (`sonoro tune` makes one); any other card, and any other
size, gets a plan computed from its multiprocessors, shared memory and bandwidth. Knows sizes and cards, no kernel and
no operation; `sonoro.ops.linear` runs what is chosen here.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sonoro.ops.device import Card, card

__all__ = [
    "LIMITS",
    "CublasPlan",
    "GemvPlan",
    "Plan",
    "Product",
    "TilePlan",
    "candidates",
    "estimate_s",
    "from_text",
    "known_shapes",
    "measured",
    "plan_for",
    "smaller",
    "to_text",
    "use_tuned",
    "variations",
]


@dataclass(frozen=True)
class GemvPlan:
    """A program holds `rows` whole rows of the weight (of each half, if gated) in registers and takes x row by row."""

    rows: int
    block_k: int
    warps: int
    enable_pdl: bool = True


@dataclass(frozen=True)
class TilePlan:
    """A program makes `block_n` columns of `block_m` rows of the output with the tensor cores.

    With `slice_k` > 1 each warp sums a part of K, `block_k` at a time: sums are chains of dependent instructions, and
    with few rows these chains, not the memory, are what takes time. With `split_k` > 1 as many programs share K, and a
    second kernel adds their sums in order (not for gated products). `is_prefetched`: the rows of the weight are called
    into the L2 cache before the kernel ahead is done. Of a gated product a program makes `extra_n` columns more, in a
    block of their own, so that about as many programs as there are multiprocessors share all columns. `is_swapped`: the
    weight is the first operand of the tensor cores, which may come from registers: one of 8 bits is widened there.
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
    extra_n: int = 0
    is_swapped: bool = False

    @property
    def first_rows(self) -> int:
        """Of the first operand."""
        return self.block_n if self.is_swapped else self.block_m


@dataclass(frozen=True)
class CublasPlan:
    """The product of torch (cuBLAS), with kernels of ours before and after it."""

    enable_pdl: bool = True


Plan = GemvPlan | TilePlan | CublasPlan

LIMITS = (1, 2, 16, 32, 64, 128, 256, 1024)
"""The most rows of each column of a file. Beyond the last of a line, where memory is not what takes time, the library
serves: blocks chosen for fewer rows read the same weights again and again. Most lines end at 256.
"""

_STORED = {torch.bfloat16: "none", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
"""What a file calls the weights that it is for."""

REGISTER_BYTES = 256
"""Of weights per thread in an untuned `GemvPlan`: a quarter of its registers, as sums and `x` take more."""

_TUNED = Path(__file__).parent / "tuned"


@dataclass(frozen=True)
class Product:
    """Of `rows` rows with a weight `shape` [N, K], of two halves if gated, elements of `itemsize` bytes; those of the
    rows have as many, but at least 2."""

    rows: int
    shape: tuple[int, int]
    is_gated: bool = False
    itemsize: int = 2

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
        return -(-self.rows // plan.block_m) * -(-outputs // (plan.block_n + plan.extra_n)) * plan.split_k

    def stage_bytes(self, plan: TilePlan) -> int:
        """What one stage keeps in shared memory."""
        column_bytes = max(2, self.itemsize) * plan.block_m + self.itemsize * self.halves * (
            plan.block_n + plan.extra_n
        )
        return plan.slice_k * plan.block_k * column_bytes

    def fits(self, plan: Plan, on: Card) -> bool:
        """Whether `on` has the registers and the shared memory for `plan`, and the plan divides this product."""
        if isinstance(plan, GemvPlan):
            # Those of 8 bits are loaded four at once, and unpacked into other registers.
            if self.itemsize == 1 and self.shape[1] % 4:
                return False
            own, shares = plan.rows * self.shape[1] * self.itemsize * self.halves, (self.itemsize == 1) + 1
            return own <= 2 * REGISTER_BYTES * 32 * plan.warps // (shares * (2 if on.has_few_registers else 1))
        if isinstance(plan, CublasPlan):
            return True
        if plan.extra_n and (not self.is_gated or plan.is_swapped or plan.slice_k * plan.split_k > 1):
            return False
        columns = plan.block_n + plan.extra_n
        span, sums = plan.split_k * plan.slice_k * plan.block_k, plan.block_m * columns * plan.slice_k
        is_small = sums * self.halves <= 32 * 32 * plan.warps or not on.has_few_registers
        has_memory = on.fit_stages(plan.first_rows, self.stage_bytes(plan), plan.stages) == plan.stages
        return is_small and has_memory and (plan.split_k == 1 or not (self.shape[1] % span or self.is_gated))


def plan_for(batch: int, weight: torch.Tensor, is_gated: bool) -> Plan:
    """The plan for `batch` rows and a `weight` [N, K] on its GPU: measured where it was, otherwise computed."""
    n, k = weight.shape
    return _plan_for(_column(batch), (n, k), weight.dtype, is_gated, card(weight.device))


def measured(on: Card, quantization: str = "none") -> dict[tuple[int, int], tuple[Plan, ...]]:
    """The plans that were measured on a card of this name, or of one that is as fast, by shape; for rows in bfloat16
    and weights in it, or as `quantization` says.
    """
    return _measured(on.name, quantization)


def _measured(card_name: str, quantization: str) -> dict[tuple[int, int], tuple[Plan, ...]]:
    known = {name: plans for (name, stored), plans in _read().items() if stored == quantization}
    return known.get(card_name) or next((plans for name, plans in known.items() if card_name.startswith(name)), {})


def known_shapes() -> dict[tuple[int, int], bool]:
    """The weights [N, K] of the package's files, which are those of the models, and whether each is gated."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(_TUNED.glob("*.json"))]
    return {_shape(name): name in file["gated"] for file in files for name in file["plans"]}


def use_tuned(text: str) -> str:
    """Use the plans of a file as `sonoro tune` writes it, over those of the package; the name of its card.

    Raises `ValueError` for what is no such file.
    """
    file = _parse(text)
    for key, plans in file.items():
        # Shapes that the file lacks stay as they are on a card that is as fast.
        _read()[key] = _measured(*key) | plans
    _plan_for.cache_clear()
    return next(iter(file))[0]


def from_text(text: str) -> Plan:
    """The plan that `to_text` wrote. Raises `ValueError`."""
    kind, *rest = text.split()
    flags = {"prefetch", "swapped"}.intersection(rest[-2:])
    extra_n = 0
    if kind == "tile" and len(rest) > 1 and "+" in rest[1]:
        rest[1], _, extra = rest[1].partition("+")
        extra_n = int(extra)
    sizes = [int(size) for size in rest[: len(rest) - len(flags)]]
    match kind, sizes:
        case "gemv", [rows, block_k, warps]:
            return GemvPlan(rows, block_k, warps)
        case "tile", [m, n, k, slice_k, split_k, stages, warps]:
            is_swapped, is_prefetched = "swapped" in flags, "prefetch" in flags
            return TilePlan(m, n, k, slice_k, split_k, stages, warps, is_prefetched, True, extra_n, is_swapped)
        case "cublas", []:
            return CublasPlan()
    raise ValueError(f"no plan: {text!r}")


def to_text(plan: Plan) -> str:
    """A plan as files have it."""
    match plan:
        case GemvPlan(rows, block_k, warps):
            return f"gemv {rows} {block_k} {warps}"
        case TilePlan():
            columns = f"{plan.block_n}+{plan.extra_n}" if plan.extra_n else plan.block_n
            sizes = (plan.block_m, columns, plan.block_k, plan.slice_k, plan.split_k, plan.stages, plan.warps)
            flags = ["swapped"] * plan.is_swapped + ["prefetch"] * plan.is_prefetched
            return " ".join(["tile", *map(str, sizes), *flags])
    return "cublas"


def smaller(plan: Plan) -> Plan | None:
    """The next plan to try where `plan` cannot be launched: fewer stages, smaller blocks, at last the library's."""
    match plan:
        case TilePlan() if plan.stages > 2:
            return replace(plan, stages=2)
        case TilePlan() if plan.extra_n:
            return replace(plan, extra_n=0)
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
    """What may be fastest for `product` on a card: plans that fit it, the library's last."""
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
            # Slices are for chains that take longer than the memory; the sums of a split must be read again.
            if block_n < least_n or (slice_k > 1 and block_m > 32) or (split_k > 1 and block_m < 64):
                continue
            tile = TilePlan(block_m, block_n, block_k, slice_k, split_k, stages, 8 if block_m > 64 else 4, False)
            swapped = [replace(tile, is_swapped=True)] if product.itemsize == 1 and block_n >= 16 else []
            yield from (one for one in (tile, *swapped) if product.fits(one, on))
    yield CublasPlan()


def variations(plan: Plan, product: Product, on: Card) -> Iterator[Plan]:
    """Plans that differ from `plan` in little: stages, warps, what is loaded ahead."""
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
            if plan.block_m >= 32 and plan.block_n in {32, 64} and not plan.is_swapped:
                found += [replace(plan, stages=stages, extra_n=16, is_prefetched=False) for stages in range(2, 9)]
    return (one for one in found if product.fits(one, on))


_DELAY_S = 1e-6
"""From a load to its data, where the memory is busy."""
_STEP_S = 25e-9
"""Of a chain of sums, each of 16 of K."""
_LAUNCH_S = 2e-6
"""Of a kernel more, before or after."""
_SHARE = 0.8
"""Of the bandwidth, what products of a few rows reach where there is work for every multiprocessor."""


def estimate_s(plan: Plan, product: Product, on: Card) -> float:
    """How long `plan` takes for `product` on a card, roughly: to choose by, not to be told.

    By Little's law: the memory is busy if enough bytes are on their way; then waves of programs, the chain of sums of
    each, and launches.
    """
    (outputs, inputs), count = product.shape, on.multiprocessors
    floor_s = product.weight_bytes / on.bandwidth
    if isinstance(plan, CublasPlan):
        # A weight in 8 bits is read, written in 16 and read again.
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
        plan: Plan | None = line[column] if column < len(line) else CublasPlan()
        while plan is not None and not product.fits(plan, on):
            plan = _fewer_stages(plan, product, on) or smaller(plan)
        return plan or CublasPlan()
    if not on.is_gpu:
        return _untuned_vector(product) if column < 2 else CublasPlan()
    # In 8 bits the library is given a copy in 16, which pays where there are many rows alone.
    last = {torch.bfloat16: 5, torch.float16: 5, torch.int8: 6, torch.float8_e4m3fn: 6}.get(dtype, 0)
    choices = [
        plan for plan in candidates(product, on) if not isinstance(plan, TilePlan) or (column > 1 and column <= last)
    ]
    return min(choices, key=lambda plan: estimate_s(plan, product, on))


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
"""By card and what weights are stored as, the plans of each shape."""


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
    """The plans of a file, for each card that they are for."""
    try:
        file: dict[str, Any] = json.loads(text)
        quantization = file.get("quantization", "none")
        if file["rows"] != list(LIMITS) or file["dtype"] != "bfloat16" or quantization not in _STORED.values():
            raise ValueError("its rows, its dtype or its quantization are others")
        plans = {_shape(shape): tuple(from_text(plan) for plan in line) for shape, line in file["plans"].items()}
        return {(name, quantization): dict(plans) for name in (file["device"], *file.get("also", ()))}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no file of plans: {error!r}") from error
