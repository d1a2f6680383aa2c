"""How to run a product of a few rows with a weight [N, K]: kinds of kernel, block sizes, and the measured choices.

Knows sizes and devices, no kernel and no operation; `sonoro.ops.linear` runs what is chosen here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from sonoro.ops.device import capability

__all__ = ["HOPPER", "LIMITS", "CublasPlan", "GemvPlan", "Plan", "TilePlan", "plan_for"]


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
    into the L2 cache before the kernel ahead is done.
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


@dataclass(frozen=True)
class CublasPlan:
    """The product of torch (cuBLAS), with kernels of ours before and after it."""

    enable_pdl: bool = True


Plan = GemvPlan | TilePlan | CublasPlan

LIMITS = (1, 2, 16, 32, 64, 128, 256, 1024)
"""The most rows of each column of the table. Beyond the last of a line, where memory is not what takes time, the
library serves: blocks chosen for fewer rows read the same weights again and again. Most lines end at 256.
"""

REGISTER_BYTES = 256
"""Of weights per thread in an untuned `GemvPlan`: a quarter of its registers, as sums and `x` take more."""

LARGE_BYTES = 24 << 20
"""Of a weight that no plan was measured for, from which on the library is better for 3 to 16 rows as well.

From 17 rows on it always serves: a block size that is safe anywhere made layers 2560 wide take 2.0 times as long as the
best plans for 32 rows and 2.8 times for 64, where the library for 128 rows takes 1.01 times as long (H200).
"""


def plan_for(batch: int, weight: torch.Tensor, is_gated: bool) -> Plan:
    """The plan for `batch` rows and a `weight` [N, K] on its GPU: measured where it was, otherwise safe anywhere."""
    return _plan_for(_column(batch), tuple(weight.shape), weight.dtype, is_gated, capability(weight.device))


def _column(batch: int) -> int:
    return sum(limit < batch for limit in LIMITS)


@functools.cache
def _plan_for(
    column: int, shape: tuple[int, ...], dtype: torch.dtype, is_gated: bool, generation: tuple[int, int]
) -> Plan:
    if column == len(LIMITS):
        return CublasPlan()
    if dtype == torch.bfloat16 and generation == (9, 0) and shape in HOPPER:
        return HOPPER[shape][column] if column < len(HOPPER[shape]) else CublasPlan()
    if column < 2:
        return _untuned_vector(shape[1], dtype.itemsize * (2 if is_gated else 1))
    is_large = shape[0] * shape[1] * dtype.itemsize >= LARGE_BYTES
    if dtype == torch.bfloat16 and column == 2 and generation >= (8, 0) and not is_large:
        # 96 KB of shared memory at most: every GPU since Ampere has them. Few programs must ask for more at a time.
        return TilePlan(16, 8, 128, 4, 1, 3, 4, False) if shape[0] < 2048 else TilePlan(16, 16, 64, 4, 1, 3, 4, False)
    return CublasPlan()


def _untuned_vector(width_in: int, bytes_per_column: int) -> Plan:
    row_bytes = width_in * bytes_per_column
    block_k = min(512, 1 << (width_in - 1).bit_length())
    for rows in (4, 2, 1):
        if rows * row_bytes <= 128 * REGISTER_BYTES:
            return GemvPlan(rows, block_k, 4)
    return GemvPlan(1, 1024, 8) if row_bytes <= 256 * REGISTER_BYTES else CublasPlan()


# Chosen one by one inside chains of whole layers in CUDA graphs, on an H200 (torch 2.11, Triton 3.6): the layers of a
# backbone 2048 wide (28, once) and of a depth model 1024 wide (5, 16 times), and their heads. As printed by
# benchmarks/kernels/linear.py, these products of a frame take 1.85 ms for 1 row (torch's operations: 4.67), 2.59 for 8
# (4.74), 2.95 for 64 (5.06) and 4.36 for 256 (6.50); reading the weights once takes 1.26 at the speed of a copy.
# Layers 2560 wide, each with a head: 6 take 374 us for 1 row, 474 for 2, 469 for 8, 537 for 32, 495 for 64 and 557 for
# 128; a copy takes 316. The head of one row more is not left to the library, for whose kernels its rows are misaligned.
# Layers 1024 wide with 16 query heads: 6 take 119 us for 5 rows, 140 for 22, 198 for 176 and 404 for 704 (torch's
# operations: 200, 192, 218 and 407); a copy takes 49. Layers 2048 wide with 2 key heads: 6 take 173 us for 1 row and
# 239 for 32 (264 and 283); a copy takes 134.
HOPPER: dict[tuple[int, ...], tuple[Plan, ...]] = {
    (4096, 2048): (
        GemvPlan(4, 512, 2),
        TilePlan(16, 16, 128, 4, 1, 4, 4, False),
        TilePlan(16, 16, 128, 4, 1, 4, 4, False),
        CublasPlan(),
        TilePlan(64, 32, 128, 1, 1, 6, 4, False),
        CublasPlan(),
        CublasPlan(),
    ),
    (2048, 2048): (
        GemvPlan(4, 2048, 2),
        GemvPlan(4, 2048, 4),
        TilePlan(16, 16, 256, 4, 1, 3, 4, True),
        TilePlan(32, 16, 128, 4, 1, 4, 4, False),
        TilePlan(64, 64, 128, 1, 4, 4, 4, True),
        TilePlan(64, 32, 128, 1, 1, 6, 4, False),
        CublasPlan(),
    ),
    (12288, 2048): (
        GemvPlan(1, 2048, 2),
        TilePlan(16, 32, 256, 1, 1, 3, 4, False),
        TilePlan(16, 64, 128, 1, 1, 5, 4, False),
        TilePlan(32, 64, 128, 1, 1, 4, 4, False),
        TilePlan(64, 32, 64, 1, 1, 7, 4, False),
        CublasPlan(),
        CublasPlan(),
    ),
    (2048, 6144): (
        GemvPlan(2, 1024, 4),
        TilePlan(16, 16, 256, 4, 1, 3, 4, False),
        TilePlan(16, 8, 256, 4, 1, 3, 4, False),
        TilePlan(32, 16, 128, 4, 1, 4, 4, False),
        TilePlan(64, 64, 128, 1, 4, 4, 4, True),
        TilePlan(64, 32, 128, 1, 1, 6, 4, False),
        CublasPlan(),
    ),
    (3072, 2048): (
        GemvPlan(8, 2048, 4),
        GemvPlan(8, 2048, 4),
        TilePlan(16, 16, 128, 4, 1, 4, 4, True),
        CublasPlan(),
        TilePlan(64, 32, 128, 1, 1, 5, 4, False),
        CublasPlan(),
        CublasPlan(),
    ),
    (4096, 1024): (
        GemvPlan(16, 256, 4),
        GemvPlan(4, 1024, 2),
        TilePlan(16, 32, 128, 4, 1, 4, 4, True),
        TilePlan(32, 32, 128, 1, 1, 6, 4, False),
        TilePlan(64, 32, 128, 1, 1, 5, 4, True),
        TilePlan(64, 64, 128, 1, 1, 5, 4, False),
        CublasPlan(),
    ),
    (1024, 2048): (
        GemvPlan(4, 1024, 4),
        GemvPlan(2, 2048, 4),
        TilePlan(16, 8, 256, 4, 1, 4, 4, True),
        TilePlan(32, 8, 128, 4, 1, 4, 4, True),
        TilePlan(64, 32, 128, 1, 1, 5, 4, True),
        TilePlan(64, 32, 128, 1, 1, 5, 4, True),
        TilePlan(64, 32, 128, 1, 1, 5, 4, False),
    ),
    (6144, 1024): (
        GemvPlan(2, 256, 2),
        TilePlan(16, 32, 256, 1, 1, 4, 4, False),
        TilePlan(16, 32, 256, 1, 1, 4, 4, False),
        TilePlan(32, 16, 256, 1, 1, 4, 2, True),
        TilePlan(64, 32, 64, 1, 1, 8, 4, True),
        TilePlan(64, 64, 64, 1, 1, 7, 4, False),
        CublasPlan(),
    ),
    (1024, 3072): (
        GemvPlan(2, 512, 2),
        GemvPlan(4, 1024, 4),
        TilePlan(16, 8, 256, 4, 1, 4, 4, True),
        TilePlan(32, 8, 128, 4, 1, 4, 4, True),
        TilePlan(64, 64, 128, 1, 4, 4, 4, True),
        TilePlan(64, 64, 128, 1, 4, 4, 4, True),
        TilePlan(64, 32, 128, 1, 1, 5, 4, False),
    ),
    (2048, 1024): (
        GemvPlan(16, 256, 4),
        GemvPlan(8, 1024, 2),
        TilePlan(16, 16, 128, 4, 1, 3, 4, True),
        TilePlan(32, 16, 256, 1, 1, 4, 4, True),
        TilePlan(64, 32, 128, 1, 1, 5, 4, True),
        TilePlan(64, 32, 128, 1, 1, 5, 4, True),
        TilePlan(128, 32, 128, 1, 1, 3, 4, True),
    ),
    (19456, 2560): (
        GemvPlan(2, 512, 2),
        CublasPlan(),
        TilePlan(16, 8, 64, 4, 1, 3, 4, False),
        TilePlan(32, 64, 128, 1, 1, 4, 4, False),
        TilePlan(64, 128, 64, 1, 1, 5, 4, False),
        CublasPlan(),
        CublasPlan(),
    ),
    (2560, 9728): (
        GemvPlan(1, 512, 4),
        GemvPlan(1, 512, 4),
        CublasPlan(),
        CublasPlan(),
        CublasPlan(),
        CublasPlan(),
        CublasPlan(),
    ),
    (6144, 2560): (
        GemvPlan(4, 512, 2),
        GemvPlan(4, 512, 2),
        TilePlan(16, 32, 128, 1, 1, 4, 4, False),
        CublasPlan(),
        TilePlan(64, 64, 128, 1, 1, 5, 4, False),
        CublasPlan(),
        CublasPlan(),
    ),
    (2560, 4096): (
        GemvPlan(2, 1024, 4),
        GemvPlan(2, 2048, 4),
        TilePlan(16, 32, 128, 4, 1, 4, 4, False),
        TilePlan(32, 32, 128, 4, 1, 3, 4, False),
        TilePlan(64, 32, 128, 1, 1, 5, 4, False),
        TilePlan(64, 64, 128, 1, 1, 5, 4, False),
        CublasPlan(),
    ),
    (4096, 2560): (
        GemvPlan(4, 512, 4),
        TilePlan(16, 8, 128, 4, 1, 3, 4, False),
        TilePlan(16, 32, 128, 4, 1, 4, 4, False),
        CublasPlan(),
        TilePlan(64, 32, 128, 1, 1, 5, 4, False),
        TilePlan(64, 64, 128, 1, 1, 5, 4, False),
        CublasPlan(),
    ),
    (4097, 2560): (
        GemvPlan(4, 512, 4),
        TilePlan(16, 8, 128, 4, 1, 3, 4, False),
        TilePlan(16, 32, 128, 4, 1, 4, 4, False),
        TilePlan(32, 32, 128, 4, 1, 3, 4, False),
        TilePlan(64, 32, 128, 1, 1, 5, 4, False),
        TilePlan(64, 64, 128, 1, 1, 5, 4, False),
        TilePlan(64, 64, 128, 1, 1, 5, 4, False),
    ),
    (2560, 1024): (
        GemvPlan(16, 256, 4),
        GemvPlan(8, 1024, 2),
        TilePlan(16, 32, 128, 4, 1, 4, 4, True),
        TilePlan(32, 32, 128, 1, 1, 4, 4, True),
        TilePlan(64, 32, 128, 1, 1, 5, 4, True),
        TilePlan(64, 64, 128, 1, 1, 4, 4, False),
        CublasPlan(),
        TilePlan(128, 128, 64, 1, 1, 4, 8, False),
    ),
    (8192, 1024): (
        GemvPlan(2, 256, 2),
        TilePlan(16, 32, 256, 1, 1, 4, 4, False),
        TilePlan(16, 32, 256, 1, 1, 4, 4, False),
        TilePlan(32, 16, 256, 1, 1, 4, 2, True),
        TilePlan(64, 32, 128, 1, 1, 4, 4, True),
        TilePlan(64, 64, 128, 1, 1, 4, 4, False),
        CublasPlan(),
        CublasPlan(),
    ),
    (1024, 4096): (
        GemvPlan(2, 512, 2),
        GemvPlan(4, 1024, 4),
        TilePlan(16, 8, 256, 4, 1, 4, 4, True),
        TilePlan(32, 8, 128, 4, 1, 4, 4, True),
        TilePlan(64, 64, 128, 1, 4, 4, 4, True),
        TilePlan(64, 64, 128, 1, 4, 4, 4, True),
        TilePlan(64, 32, 128, 1, 1, 5, 4, False),
        TilePlan(128, 64, 128, 1, 1, 3, 8, False),
    ),
    (2560, 2048): (
        GemvPlan(8, 2048, 4),
        GemvPlan(8, 2048, 4),
        TilePlan(16, 8, 128, 4, 1, 4, 4, False),
        CublasPlan(),
        TilePlan(64, 32, 128, 1, 1, 5, 4, False),
        CublasPlan(),
        CublasPlan(),
        CublasPlan(),
    ),
}
