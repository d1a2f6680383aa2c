"""Attention over a sliding window whose past is a ring per slot: a Triton kernel beside its torch reference.

A ring [rows, window - 1, 2 * kv heads * D] holds rotated keys, then values; position p is at place p % (window - 1).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import Operation
from .norm import can_overlap

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
else:
    from .norm import launch_dependents, wait_for_inputs

__all__ = ["window_attention"]

Past = tuple[Tensor, Tensor, Tensor]
"""A ring, the columns `seen` [rows] int64 of each of its rows, and the rows `slots` [B] int64 of a call."""

MAX_COLUMNS = 64
"""Columns up to which the kernel serves: a program holds all of a call's."""


def window_attention_reference(
    qkv: Tensor,
    heads: tuple[int, int],
    window: int,
    theta: float,
    past: Past | None = None,
    *,
    has_rounded_angles: bool = False,
) -> Tensor:
    """Each column of `qkv` [B, T, (heads + 2 * kv heads) * D] attends to itself and the window - 1 before it.

    Returns [B, T, heads * D]. Queries and keys are turned by their positions: pairs (i, i + D / 2), base `theta`;
    rounded angles have their cosines and sines in bfloat16. With a past, positions start at `seen[slots[b]]` and the
    columns before are those of row `slots[b]` of the ring, which takes the new ones; without, they start at 0. `seen`
    is not advanced.
    """
    query_heads, kv_heads = heads
    columns = qkv.shape[1]
    step = torch.arange(columns, device=qkv.device)
    parts = qkv.unflatten(2, (query_heads + 2 * kv_heads, -1))
    queries, keys, values = parts.split((query_heads, kv_heads, kv_heads), dim=2)
    start = step.new_zeros(1) if past is None else past[1].index_select(0, past[2])
    positions = start[:, None] + step
    queries, keys = (_turn(x, positions, theta, has_rounded_angles) for x in (queries, keys))
    pairs, known = torch.cat([keys, values], dim=2).flatten(2), positions
    if past is not None:
        ring, _, slots = past
        length = window - 1
        newest = start[:, None] - 1
        age = torch.remainder(newest - torch.arange(length, device=qkv.device), length)
        known = torch.cat([newest - age, positions], dim=1)
        fresh = pairs[:, max(0, columns - length) :]
        places = torch.remainder(positions[:, max(0, columns - length) :], length)
        pairs = torch.cat([ring.index_select(0, slots), pairs], dim=1)
        ring.index_put_((slots[:, None], places), fresh)
    distance = positions[:, :, None] - known[:, None]
    mask = (distance >= 0) & (distance < window) & (known >= 0)[:, None]
    keys, values = pairs.unflatten(2, (2, kv_heads, -1)).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(
        queries.transpose(1, 2), keys, values, attn_mask=mask[:, None], enable_gqa=query_heads != kv_heads
    )
    return out.transpose(1, 2).flatten(2)


def _turn(x: Tensor, positions: Tensor, theta: float, has_rounded_angles: bool) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    width = x.shape[-1]
    precise = torch.float32 if has_rounded_angles else wide
    exponents = torch.arange(0, width, 2, device=x.device, dtype=precise) / width
    angles = positions[..., None, None].to(precise) * (1.0 / theta**exponents)
    first, second = x.to(wide).chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    if has_rounded_angles:
        cos, sin = cos.bfloat16().to(wide), sin.bfloat16().to(wide)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


if triton is not None:

    @triton.jit
    def _round_to_bfloat16(x):
        # To nearest, ties to even, on the bits: the interpreter's cast would cut.
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)

    @triton.jit(do_not_specialize=["columns"])
    def _window_attention(  # noqa: PLR0915, PLR0917 (one pass; a kernel's arguments are positional)
        qkv, out, ring, seen, slots, columns, log2_theta, scale,
        heads: tl.constexpr, width: tl.constexpr, window: tl.constexpr, has_rounded_angles: tl.constexpr,
        block_t: tl.constexpr, block_l: tl.constexpr, overlap: tl.constexpr,
    ):  # fmt: skip
        wait_for_inputs(overlap)
        # One program per row and head: nobody else reads or writes its part of the ring.
        row, head = tl.program_id(0), tl.program_id(1)
        half: tl.constexpr = width // 2
        length: tl.constexpr = window - 1
        dtype = qkv.dtype.element_ty
        start = 0
        if ring is not None:
            slot = tl.load(slots + row)
            start = tl.load(seen + slot)
        step, channel = tl.arange(0, block_t), tl.arange(0, half)
        real = step < columns
        angle = (start + step).to(tl.float32)[:, None] * tl.exp2(channel.to(tl.float32) * (-2.0 / width) * log2_theta)
        cos, sin = tl.cos(angle), tl.sin(angle)
        if has_rounded_angles:
            cos, sin = _round_to_bfloat16(cos), _round_to_bfloat16(sin)
        place = (row.to(tl.int64) * columns + step)[:, None] * (3 * heads * width) + head * width + channel[None, :]
        mask = real[:, None] & (channel < half)[None, :]
        first = tl.load(qkv + place, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(qkv + place + half, mask=mask, other=0.0).to(tl.float32)
        query_1 = ((first * cos - second * sin) * scale).to(dtype)
        query_2 = ((second * cos + first * sin) * scale).to(dtype)
        first = tl.load(qkv + place + heads * width, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(qkv + place + heads * width + half, mask=mask, other=0.0).to(tl.float32)
        key_1, key_2 = (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)
        both = tl.arange(0, width)
        value_place = (row.to(tl.int64) * columns + step)[:, None] * (3 * heads * width) + head * width + both[None, :]
        value = tl.load(qkv + value_place + 2 * heads * width, mask=real[:, None], other=0.0)
        scores = tl.dot(query_1, tl.trans(key_1), input_precision="ieee")
        scores = tl.dot(query_2, tl.trans(key_2), scores, input_precision="ieee")
        distance = step[:, None] - step[None, :]
        scores = tl.where((distance >= 0) & (distance < window) & real[None, :], scores, float("-inf"))
        largest = tl.max(scores, axis=1)
        if ring is not None:
            # Of the positions before `start`, place j holds the newest that is j modulo the length.
            old = tl.arange(0, block_l)
            newest = start - 1
            known = newest - ((newest - old) % length + length) % length
            base = ring + slot * (length * 2 * heads * width) + head * width
            old_mask = (old < length)[:, None] & (channel < half)[None, :]
            old_place = base + old[:, None] * (2 * heads * width) + channel[None, :]
            old_1 = tl.load(old_place, mask=old_mask, other=0.0)
            old_2 = tl.load(old_place + half, mask=old_mask, other=0.0)
            old_value = tl.load(
                base + heads * width + old[:, None] * (2 * heads * width) + both[None, :],
                mask=(old < length)[:, None] & (both < width)[None, :],
                other=0.0,
            )
            past = tl.dot(query_1, tl.trans(old_1), input_precision="ieee")
            past = tl.dot(query_2, tl.trans(old_2), past, input_precision="ieee")
            away = (start + step)[:, None] - known[None, :]
            is_seen = ((known >= 0) & (old < length))[None, :] & (away < window)
            past = tl.where(is_seen, past, float("-inf"))
            largest = tl.maximum(largest, tl.max(past, axis=1))
        # A column sees itself at least, so its largest score is finite.
        weight = tl.exp(scores - largest[:, None])
        total = tl.sum(weight, axis=1)
        result = tl.dot(weight.to(dtype), value, input_precision="ieee")
        if ring is not None:
            old_weight = tl.exp(past - largest[:, None])
            total += tl.sum(old_weight, axis=1)
            result = tl.dot(old_weight.to(dtype), old_value, result, input_precision="ieee")
            # All threads have read the places that are overwritten now.
            tl.debug_barrier()
            fresh = base + ((start + step) % length)[:, None] * (2 * heads * width)
            tl.store(fresh + channel[None, :], key_1, mask=mask)
            tl.store(fresh + half + channel[None, :], key_2, mask=mask)
            tl.store(fresh + heads * width + both[None, :], value, mask=real[:, None])
        launch_dependents(overlap)
        result = result / total[:, None]
        done = (row.to(tl.int64) * columns + step)[:, None] * (heads * width) + head * width + both[None, :]
        tl.store(out + done, result.to(out.dtype.element_ty), mask=real[:, None])


def window_attention_kernel(
    qkv: Tensor,
    heads: tuple[int, int],
    window: int,
    theta: float,
    past: Past | None = None,
    *,
    has_rounded_angles: bool = False,
    warps: int = 4,
) -> Tensor:
    """`window_attention_reference` as one Triton kernel; as many kv heads as heads, at most `MAX_COLUMNS` columns."""
    batch, columns, total = qkv.shape
    width = total // (3 * heads[0])
    assert qkv.is_contiguous()
    ring, seen, slots = past if past is not None else (None, None, None)
    out = qkv.new_empty(batch, columns, heads[0] * width)
    overlap = can_overlap(qkv.device)
    _window_attention[(batch, heads[0])](
        qkv, out, ring, seen, slots, columns, math.log2(theta), width**-0.5,
        heads[0], width, window, has_rounded_angles,
        max(16, triton.next_power_of_2(columns)), triton.next_power_of_2(window - 1), overlap,
        num_warps=warps, launch_pdl=overlap,
    )  # fmt: skip
    return out


def _is_supported(qkv: Tensor, heads: tuple[int, int], window: int, *_: object, **__: object) -> bool:
    width = qkv.shape[2] // (3 * heads[0])
    is_tiled = width >= 32 and width & (width - 1) == 0 and window > 16
    is_short = qkv.shape[1] <= min(MAX_COLUMNS, window - 1)
    return qkv.dtype != torch.float64 and heads[0] == heads[1] and is_tiled and is_short


window_attention = Operation(
    "window_attention",
    window_attention_kernel if triton is not None else window_attention_reference,
    window_attention_reference,
    _is_supported,
)
