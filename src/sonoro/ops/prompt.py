"""Prefill before attention: q/k norms, rotary embedding, and the write of keys and values to the paged KV cache.

A Triton kernel beside its torch reference."""

import torch
from torch import Tensor

from sonoro.ops.attention import HeadNorms, PagedKV, Rotary, takes_heads
from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import pdl_options
from sonoro.ops.optional import tl, triton

if triton is not None:
    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait, scale_and_weigh

_HEADS = 8
"""Heads of a token per program: 1,024 elements for a head width of 128."""


def keep_prompt_reference(qkv: Tensor, norms: HeadNorms, rotary: Rotary, cache: PagedKV, positions: Tensor) -> Tensor:
    """Apply q/k `norms` and `rotary` (cos and signed sin by position, [P, 1, D]) to the queries and keys of packed
    tokens `qkv` [T, (heads + 2 kv heads) * D] at `positions` [T] int64; returns them, [T, heads + kv heads, D].
    Writes the keys and values of token t to the pages of `cache.slots[t]`. Capturable; no sync."""
    keys, values, page_table, slots = cache
    page, kv_heads, width = keys.shape[1:]
    heads = qkv.unflatten(-1, (-1, width))
    normed = norms.applied(heads[:, :-kv_heads], kv_heads)
    cos, signed_sin = rotary[0].index_select(0, positions), rotary[1].index_select(0, positions)
    rotated = torch.addcmul(normed * cos, normed.roll(width // 2, -1), signed_sin)
    numbers, places = page_table[slots, positions // page].long(), positions % page
    keys[numbers, places] = rotated[:, -kv_heads:]
    values[numbers, places] = heads[:, -kv_heads:]
    return rotated


if triton is not None:

    @triton.jit
    def _keep_prompt_kernel(
        qkv, q_norm, k_norm, cos, sin, keys, values, page_table, slots, positions, out,
        qkv_stride, page_table_stride, eps,
        NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
        HEADS: tl.constexpr, IS_NORMED: tl.constexpr, ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        pdl_launch_dependents(ENABLE_PDL)
        dtype: tl.constexpr = out.dtype.element_ty
        ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
        token = tl.program_id(0).to(tl.int64)
        # Heads in the order of `qkv`: queries, keys, values.
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
        column = tl.arange(0, HEAD_DIM)[None, :]
        partner = (column + HEAD_DIM // 2) % HEAD_DIM
        is_rotated, is_head = head < ROTATED, head < ROTATED + NUM_KV_HEADS
        weight, partner_weight = 1.0, 1.0
        if IS_NORMED:
            is_query = head < NUM_HEADS
            weight = tl.where(is_query, tl.load(q_norm + column), tl.load(k_norm + column))
            partner_weight = tl.where(is_query, tl.load(q_norm + partner), tl.load(k_norm + partner))
        pdl_wait(ENABLE_PDL)
        position = tl.load(positions + token)
        number = tl.load(page_table + tl.load(slots + token) * page_table_stride + position // PAGE_SIZE).to(tl.int64)
        given = qkv + token * qkv_stride + head * HEAD_DIM
        value = tl.load(given + column, mask=is_head, other=0.0)
        other = tl.load(given + partner, mask=is_rotated, other=0.0).to(tl.float32)
        cosine, signed_sine = tl.load(cos + position * HEAD_DIM + column), tl.load(sin + position * HEAD_DIM + column)
        normed = value.to(tl.float32)
        if IS_NORMED:
            inverse = tl.rsqrt(tl.sum(normed * normed, axis=1, keep_dims=True) * (1.0 / HEAD_DIM) + eps)
            normed = scale_and_weigh(normed, inverse, weight, dtype).to(tl.float32)
            other = scale_and_weigh(other, inverse, partner_weight, dtype).to(tl.float32)
        rotated = (normed * cosine.to(tl.float32)).to(dtype).to(tl.float32)
        rotated = (rotated + other * signed_sine.to(tl.float32)).to(dtype)
        tl.store(out + (token * ROTATED + head) * HEAD_DIM + column, rotated, mask=is_rotated)
        kept = (number * PAGE_SIZE + position % PAGE_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
        key, own = kept + (head - NUM_HEADS) * HEAD_DIM + column, kept + (head - ROTATED) * HEAD_DIM + column
        tl.store(keys + key, rotated, mask=is_rotated & (head >= NUM_HEADS))
        tl.store(values + own, value, mask=is_head & (head >= ROTATED))


def keep_prompt_kernel(
    qkv: Tensor, norms: HeadNorms, rotary: Rotary, cache: PagedKV, positions: Tensor, *, enable_pdl: bool = True
) -> Tensor:
    """`keep_prompt_reference` as one Triton kernel, a program per token and group of heads; no gradient."""
    _, page, kv_heads, width = cache.keys.shape
    tokens, heads = qkv.shape[0], qkv.shape[1] // width - 2 * kv_heads
    out = torch.empty((tokens, heads + kv_heads, width), dtype=qkv.dtype, device=qkv.device)
    # Without norms these pointers are not read.
    q_norm, k_norm = (qkv if norm is None else norm for norm in norms[:2])
    _keep_prompt_kernel[tokens, triton.cdiv(heads + 2 * kv_heads, _HEADS)](
        qkv=qkv, q_norm=q_norm, k_norm=k_norm, cos=rotary[0], sin=rotary[1], **cache._asdict(), positions=positions,
        out=out, qkv_stride=qkv.stride(0), page_table_stride=cache.page_table.stride(0), eps=norms.eps,
        NUM_HEADS=heads, NUM_KV_HEADS=kv_heads, HEAD_DIM=width, PAGE_SIZE=page, HEADS=_HEADS,
        IS_NORMED=norms.query is not None, **pdl_options(qkv.device, enable_pdl=enable_pdl),
    )  # fmt: skip
    return out


keep_prompt = Operation(keep_prompt_kernel, keep_prompt_reference, takes_heads)
