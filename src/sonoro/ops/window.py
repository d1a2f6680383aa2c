"""Sliding-window attention with a ring buffer per slot: a Triton kernel beside its torch reference.

The ring buffer [slots, window - 1, 2 * kv heads * D] holds rotated keys, then values; position p is at index
p % (window - 1)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import pdl_options
from sonoro.ops.optional import tl, triton

if triton is not None:
    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait

Past = tuple[Tensor, Tensor, Tensor]
"""Ring buffer, number of columns `seen` [slots] int64 by slot, and the `slots` [B] int64 of a call."""

MAX_COLUMNS = 64
"""Limit of columns per call for the kernel, whose programs hold all of them."""


def window_attention_reference(
    qkv: Tensor,
    heads: tuple[int, int],
    window: int,
    theta: float,
    past: Past | None = None,
    *,
    has_rounded_angles: bool = False,
) -> Tensor:
    """Causal attention of `qkv` [B, T, (heads + 2 * kv heads) * D] over the last `window` columns: [B, T, heads * D].
    Rotary embedding with pairs (i, i + D / 2) and base `theta`; `has_rounded_angles` rounds its cosines and sines to
    bfloat16. With `past`, positions start at `seen[slots[b]]`, earlier columns come from row `slots[b]` of the ring
    buffer, and the new ones are written to it; otherwise positions start at 0. `seen` is not advanced."""
    query_heads, kv_heads = heads
    columns = qkv.shape[1]
    step = torch.arange(columns, device=qkv.device)
    parts = qkv.unflatten(2, (query_heads + 2 * kv_heads, -1))
    queries, keys, values = parts.split((query_heads, kv_heads, kv_heads), dim=2)
    start = step.new_zeros(1) if past is None else past[1].index_select(0, past[2])
    positions = start[:, None] + step
    queries, keys = (_rotate(x, positions, theta, has_rounded_angles) for x in (queries, keys))
    pairs, known = torch.cat([keys, values], dim=2).flatten(2), positions
    if past is not None:
        ring, _, slots = past
        length = window - 1
        newest = start[:, None] - 1
        age = torch.remainder(newest - torch.arange(length, device=qkv.device), length)
        known = torch.cat([newest - age, positions], dim=1)
        fresh = pairs[:, max(0, columns - length) :]
        ring_index = torch.remainder(positions[:, max(0, columns - length) :], length)
        pairs = torch.cat([ring.index_select(0, slots), pairs], dim=1)
        ring.index_put_((slots[:, None], ring_index), fresh)
    distance = positions[:, :, None] - known[:, None]
    mask = (distance >= 0) & (distance < window) & (known >= 0)[:, None]
    keys, values = pairs.unflatten(2, (2, kv_heads, -1)).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(
        queries.transpose(1, 2), keys, values, attn_mask=mask[:, None], enable_gqa=query_heads != kv_heads
    )
    return out.transpose(1, 2).flatten(2)


def _rotate(x: Tensor, positions: Tensor, theta: float, has_rounded_angles: bool) -> Tensor:
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
        # Round to nearest even on the bits: the interpreter's cast truncates.
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)

    @triton.jit
    def _load_rotated(source, cos, sin, mask, HALF: tl.constexpr):
        """Load both halves of heads and apply the rotary embedding, in float32."""
        first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        return first * cos - second * sin, second * cos + first * sin

    @triton.jit
    def _score(query_1, query_2, key_1, key_2):
        """Scores of queries and keys, both given as halves."""
        scores = tl.dot(query_1, tl.trans(key_1), input_precision="ieee")
        return tl.dot(query_2, tl.trans(key_2), scores, input_precision="ieee")

    @triton.jit(do_not_specialize=["columns"])
    def _window_attention(  # noqa: PLR0915 (one pass; a kernel's arguments are positional)
        qkv, out, ring, seen, slots, columns, log2_theta, scale,
        NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, ROUND_ANGLES: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        pdl_wait(ENABLE_PDL)
        # One program per batch index and head: no other reads or writes its part of the ring.
        row, head = tl.program_id(0), tl.program_id(1)
        HALF: tl.constexpr = HEAD_DIM // 2
        RING: tl.constexpr = WINDOW - 1
        dtype = qkv.dtype.element_ty
        start = 0
        if ring is not None:
            slot = tl.load(slots + row)
            start = tl.load(seen + slot)
        step, channel = tl.arange(0, BLOCK_M), tl.arange(0, HALF)
        is_column = step < columns
        angle = (start + step).to(tl.float32)[:, None] * tl.exp2(
            channel.to(tl.float32) * (-2.0 / HEAD_DIM) * log2_theta
        )
        cos, sin = tl.cos(angle), tl.sin(angle)
        if ROUND_ANGLES:
            cos, sin = _round_to_bfloat16(cos), _round_to_bfloat16(sin)
        offset = (
            (row.to(tl.int64) * columns + step)[:, None] * (3 * NUM_HEADS * HEAD_DIM)
            + head * HEAD_DIM
            + channel[None, :]
        )
        mask = is_column[:, None] & (channel < HALF)[None, :]
        query_1, query_2 = _load_rotated(qkv + offset, cos, sin, mask, HALF)
        query_1, query_2 = (query_1 * scale).to(dtype), (query_2 * scale).to(dtype)
        key_1, key_2 = _load_rotated(qkv + offset + NUM_HEADS * HEAD_DIM, cos, sin, mask, HALF)
        key_1, key_2 = key_1.to(dtype), key_2.to(dtype)
        both = tl.arange(0, HEAD_DIM)
        value_offset = (
            (row.to(tl.int64) * columns + step)[:, None] * (3 * NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + both[None, :]
        )
        value = tl.load(qkv + value_offset + 2 * NUM_HEADS * HEAD_DIM, mask=is_column[:, None], other=0.0)
        scores = _score(query_1, query_2, key_1, key_2)
        distance = step[:, None] - step[None, :]
        scores = tl.where((distance >= 0) & (distance < WINDOW) & is_column[None, :], scores, float("-inf"))
        m_i = tl.max(scores, axis=1)
        if ring is not None:
            # Entry j of the ring holds the newest position before `start` that is j modulo its length.
            old = tl.arange(0, BLOCK_N)
            newest = start - 1
            known = newest - ((newest - old) % RING + RING) % RING
            base = ring + slot * (RING * 2 * NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
            old_mask = (old < RING)[:, None] & (channel < HALF)[None, :]
            old_offset = base + old[:, None] * (2 * NUM_HEADS * HEAD_DIM) + channel[None, :]
            old_1 = tl.load(old_offset, mask=old_mask, other=0.0)
            old_2 = tl.load(old_offset + HALF, mask=old_mask, other=0.0)
            old_value = tl.load(
                base + NUM_HEADS * HEAD_DIM + old[:, None] * (2 * NUM_HEADS * HEAD_DIM) + both[None, :],
                mask=(old < RING)[:, None] & (both < HEAD_DIM)[None, :],
                other=0.0,
            )
            past = _score(query_1, query_2, old_1, old_2)
            away = (start + step)[:, None] - known[None, :]
            is_seen = ((known >= 0) & (old < RING))[None, :] & (away < WINDOW)
            past = tl.where(is_seen, past, float("-inf"))
            m_i = tl.maximum(m_i, tl.max(past, axis=1))
        # A column attends at least to itself, so its largest score is finite.
        p = tl.exp(scores - m_i[:, None])
        l_i = tl.sum(p, axis=1)
        acc = tl.dot(p.to(dtype), value, input_precision="ieee")
        if ring is not None:
            old_p = tl.exp(past - m_i[:, None])
            l_i += tl.sum(old_p, axis=1)
            acc = tl.dot(old_p.to(dtype), old_value, acc, input_precision="ieee")
            # All threads have read the entries that are overwritten now.
            tl.debug_barrier()
            fresh = base + ((start + step) % RING)[:, None] * (2 * NUM_HEADS * HEAD_DIM)
            tl.store(fresh + channel[None, :], key_1, mask=mask)
            tl.store(fresh + HALF + channel[None, :], key_2, mask=mask)
            tl.store(fresh + NUM_HEADS * HEAD_DIM + both[None, :], value, mask=is_column[:, None])
        pdl_launch_dependents(ENABLE_PDL)
        acc = acc / l_i[:, None]
        done = (row.to(tl.int64) * columns + step)[:, None] * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + both[None, :]
        tl.store(out + done, acc.to(out.dtype.element_ty), mask=is_column[:, None])


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
    """`window_attention_reference` as one Triton kernel, for kv heads = heads and at most `MAX_COLUMNS` columns."""
    batch, columns, total = qkv.shape
    width = total // (3 * heads[0])
    assert qkv.is_contiguous()
    ring, seen, slots = past if past is not None else (None, None, None)
    out = qkv.new_empty(batch, columns, heads[0] * width)
    _window_attention[(batch, heads[0])](
        qkv=qkv, out=out, ring=ring, seen=seen, slots=slots, columns=columns, log2_theta=math.log2(theta),
        scale=width**-0.5, NUM_HEADS=heads[0], HEAD_DIM=width, WINDOW=window, ROUND_ANGLES=has_rounded_angles,
        BLOCK_M=max(16, triton.next_power_of_2(columns)), BLOCK_N=triton.next_power_of_2(window - 1),
        num_warps=warps, **pdl_options(qkv.device),
    )  # fmt: skip
    return out


def _is_supported(qkv: Tensor, heads: tuple[int, int], window: int, *_: object, **__: object) -> bool:
    width = qkv.shape[2] // (3 * heads[0])
    is_tiled = width >= 32 and width & (width - 1) == 0 and window > 16
    is_short = qkv.shape[1] <= min(MAX_COLUMNS, window - 1)
    return qkv.dtype != torch.float64 and heads[0] == heads[1] and is_tiled and is_short


window_attention = Operation(window_attention_kernel, window_attention_reference, _is_supported)
