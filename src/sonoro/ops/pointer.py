"""Attention weights of some heads of a layer over a span of positions: softmax over that span alone.

Runs after `decode_attention` with the same arguments: the new position's key is in the cache by then. A Triton kernel
beside its torch reference."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sonoro.ops.attention import DTYPES, HeadNorms, PagedKV, Rotary, exp2_scale, is_power_of_two
from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import pdl_options, unit_rms
from sonoro.ops.optional import tl, triton

if triton is not None:
    from sonoro.ops.attention_kernels import _load_norm, _norm_and_rotate
    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait

_BLOCK, _OUT_BLOCK, _WARPS = 128, 512, 8
"""Positions scored and weights written per iteration (fewer iterations are faster), and warps of a program."""


class Watched(NamedTuple):
    """The query `heads` [H] int64 whose attention weights over the slots' `spans` [slots, 2] int64 (start, count) are
    written to `out` [slots, H, W] float32."""

    heads: Tensor
    spans: Tensor
    out: Tensor


def point_reference(
    qkv: Tensor, norms: HeadNorms, rotary: Rotary, cache: PagedKV, positions: Tensor, watched: Watched
) -> Tensor:
    """Write the attention weights of the `watched` heads to row `slots[b]` of their `out`, which is returned.

    Column w is position start + w of the slot's span; the softmax is over the span's positions up to `positions[b]`,
    and later columns are zero. Other arguments as for `decode_attention`, with one new position per request. Nothing
    else in the cache matters, NaN included.
    On a CPU it reads live positions only; elsewhere it is capturable and does not sync."""
    (keys, _, page_table, slots), (heads, spans, out) = cache, watched
    page, kv_heads, width = keys.shape[1:]
    chosen = qkv.unflatten(-1, (-1, width))[:, heads]
    if norms.query is not None:
        chosen = unit_rms(chosen, norms.eps) * norms.query
    cos, signed_sin = rotary[0].index_select(0, positions), rotary[1].index_select(0, positions)
    queries = torch.addcmul(chosen * cos, chosen.roll(width // 2, -1), signed_sin)
    group = qkv.shape[1] // width // kv_heads - 2
    start, count = spans[slots].unbind(1)
    columns = out.shape[2]
    if qkv.is_cpu:
        columns = min(columns, int(torch.minimum(count, positions + 1 - start).clamp(min=0).max()))
    offset = torch.arange(columns, device=qkv.device)
    at = start[:, None] + offset
    is_live = (offset < count[:, None]) & (at <= positions[:, None])
    # Columns past the last page are clamped; they are masked below.
    pages = page_table[slots].long().gather(1, (at // page).clamp(max=page_table.shape[1] - 1))
    read = keys[pages, at % page].masked_fill(~is_live[..., None, None], 0.0)[:, :, heads // group]
    wide = torch.promote_types(qkv.dtype, torch.float32)
    scores = torch.einsum("bhd,bwhd->bhw", queries.to(wide), read.to(wide)) / math.sqrt(width)
    shares = scores.masked_fill(~is_live[:, None], -torch.inf).softmax(-1)
    made = torch.zeros_like(out[:1]).expand(len(slots), -1, -1).clone()
    made[..., :columns] = shares.masked_fill(~is_live[:, None], 0.0)
    return out.index_copy_(0, slots, made)


if triton is not None:

    @triton.jit
    def _point(
        qkv, q_norm, cos, sin, keys, page_table, slots, positions, heads, spans, out,
        qkv_stride, page_table_stride, out_stride, head_stride, columns, eps, scale,
        NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
        PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, OUT_BLOCK: tl.constexpr, IS_NORMED: tl.constexpr,
        ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        """One program per head and request: writes scores to `out`, then their softmax in place."""
        pdl_launch_dependents(ENABLE_PDL)
        POSITION_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
        number, batch = tl.program_id(0), tl.program_id(1)
        flat = tl.arange(0, HEAD_DIM)
        partner = (flat + HEAD_DIM // 2) % HEAD_DIM
        weight, partner_weight = _load_norm(q_norm, flat, partner, IS_NORMED)
        head = tl.load(heads + number)
        pdl_wait(ENABLE_PDL)
        slot, position = tl.load(slots + batch), tl.load(positions + batch).to(tl.int32)
        start, count = tl.load(spans + slot * 2).to(tl.int32), tl.load(spans + slot * 2 + 1).to(tl.int32)
        live = tl.minimum(tl.minimum(count, position + 1 - start), columns)
        given = qkv + batch * qkv_stride + head * HEAD_DIM
        query = _norm_and_rotate(
            tl.load(given + flat), tl.load(given + partner), weight, partner_weight,
            tl.load(cos + position * HEAD_DIM + flat), tl.load(sin + position * HEAD_DIM + flat),
            eps, HEAD_DIM, IS_NORMED,
        ).to(tl.float32) * scale  # fmt: skip
        page_numbers = page_table + slot * page_table_stride
        target = out + slot * out_stride + number * head_stride
        m_i, l_i = -1e30, 0.0
        for begin in tl.range(0, live, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            at, is_live = start + column, column < live
            page = tl.load(page_numbers + at // PAGE_SIZE, mask=is_live, other=0).to(tl.int64)
            base = (page * PAGE_SIZE + at % PAGE_SIZE) * POSITION_STRIDE + (head // GROUP_SIZE) * HEAD_DIM
            key = tl.load(keys + base[:, None] + flat[None, :], mask=is_live[:, None], other=0.0)
            score = tl.where(is_live, tl.sum(query[None, :] * key.to(tl.float32), axis=1), -float("inf"))
            m_new = tl.maximum(m_i, tl.max(score, axis=0))
            l_i = l_i * tl.exp2(m_i - m_new) + tl.sum(tl.exp2(score - m_new), axis=0)
            m_i = m_new
            tl.store(target + column, score, mask=is_live)
        # Threads read scores stored by other threads of the program.
        tl.debug_barrier()
        for begin in tl.range(0, columns, OUT_BLOCK):
            column = begin + tl.arange(0, OUT_BLOCK)
            is_live = column < live
            score = tl.load(target + column, mask=is_live, other=-float("inf"))
            share = tl.where(is_live, tl.exp2(score - m_i) / tl.maximum(l_i, 1e-30), 0.0)
            tl.store(target + column, share, mask=column < columns)


def point_kernel(
    qkv: Tensor, norms: HeadNorms, rotary: Rotary, cache: PagedKV, positions: Tensor, watched: Watched
) -> Tensor:
    """`point_reference` as one Triton kernel, a program per head and request. No gradient."""
    (page, kv_heads, width), (heads, spans, out) = cache.keys.shape[1:], watched
    # Without norms this pointer is not read.
    query_norm = qkv if norms.query is None else norms.query
    _point[heads.shape[0], cache.slots.shape[0]](
        qkv=qkv, q_norm=query_norm, cos=rotary[0], sin=rotary[1], keys=cache.keys, page_table=cache.page_table,
        slots=cache.slots, positions=positions, heads=heads, spans=spans, out=out, qkv_stride=qkv.stride(0),
        page_table_stride=cache.page_table.stride(0), out_stride=out.stride(0), head_stride=out.stride(1),
        columns=out.shape[2], eps=norms.eps, scale=exp2_scale(width), NUM_KV_HEADS=kv_heads,
        GROUP_SIZE=qkv.shape[1] // width // kv_heads - 2, HEAD_DIM=width, PAGE_SIZE=page, BLOCK=_BLOCK,
        OUT_BLOCK=_OUT_BLOCK, IS_NORMED=norms.query is not None, num_warps=_WARPS, **pdl_options(qkv.device),
    )  # fmt: skip
    return out


def _can_point(
    qkv: Tensor, norms: HeadNorms, rotary: Rotary, cache: PagedKV, positions: Tensor, watched: Watched
) -> bool:
    tensors = [tensor for tensor in (norms.query, *rotary, cache.keys) if tensor is not None]
    return (
        qkv.dtype in DTYPES
        and all(tensor.dtype == qkv.dtype and tensor.is_contiguous() for tensor in tensors)
        and all(tensor.stride(-1) == 1 for tensor in (qkv, cache.page_table, cache.slots, positions, watched.out))
        and watched.spans.is_contiguous()
        and qkv.shape[0] == cache.slots.shape[0] > 0
        and is_power_of_two(cache.keys.shape[3], 16, 128)
    )


point = Operation(point_kernel, point_reference, _can_point)
