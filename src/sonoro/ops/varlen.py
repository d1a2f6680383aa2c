"""Varlen attention (GQA): prompts packed back to back, each causal and optionally after a cached prefix on pages.

A Triton kernel beside its torch reference."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.ops.attention import DTYPES, PagedKV, exp2_scale, is_power_of_two
from sonoro.ops.device import Card, card
from sonoro.ops.dispatch import Operation, shrunk
from sonoro.ops.optional import triton

if triton is not None:
    from sonoro.ops import attention_kernels

_TOKENS_AT_ONCE = 16
"""Tokens per chunk in the masked reference, which copies the pages of each token."""


def varlen_attention_reference(
    queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, cached_lengths: Tensor, cache: PagedKV
) -> Tensor:
    """Causal attention of packed `queries` [T, heads, D] within their prompts: [T, heads, D].

    Token t attends to `keys` and `values` [T, kv heads, D] of packed indices `starts[t]` to t, where `starts` [T] int64
    is the index at which its prompt starts, and to the `cached_lengths[t]` [T] int64 positions before it,
    the first on the pages of `cache.slots[t]`. Nothing else in `cache` matters, NaN included.
    On a CPU it reads those pages only; elsewhere it reads whole page tables, is capturable and does not sync."""
    if not queries.is_cpu:
        return _attend_masked(queries, keys, values, starts, cached_lengths, cache)
    if not cached_lengths.any():
        return _attend(queries, keys, values, _is_visible(starts))
    page_keys, page_values, page_table, slots = cache
    parts, lows, page = [], starts.unique().tolist(), page_keys.shape[1]
    for low, high in zip(lows, [*lows[1:], len(starts)], strict=True):
        own, cached = slice(low, high), int(cached_lengths[low])
        pages = page_table[slots[low], : -(-cached // page)].long()
        all_keys = torch.cat((page_keys[pages].flatten(0, 1)[:cached], keys[own]))
        all_values = torch.cat((page_values[pages].flatten(0, 1)[:cached], values[own]))
        mask = torch.ones(high - low, len(all_keys), dtype=torch.bool).tril(cached)
        parts.append(_attend(queries[own], all_keys, all_values, mask))
    return torch.cat(parts)


def _attend_masked(
    queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, cached_lengths: Tensor, cache: PagedKV
) -> Tensor:
    page_keys, page_values, page_table, slots = cache
    positions = torch.arange(page_table.shape[1] * page_keys.shape[1], device=slots.device)
    is_visible, parts = _is_visible(starts), []
    for low in range(0, len(queries), _TOKENS_AT_ONCE):
        chunk = slice(low, low + _TOKENS_AT_ONCE)
        pages, is_cached = page_table[slots[chunk]].long(), positions < cached_lengths[chunk, None]
        all_keys, all_values = (
            # Zeroed, since the mask alone lets NaN through (NaN - inf, 0 * NaN).
            torch.cat((old[pages].flatten(1, 2).masked_fill_(~is_cached[..., None, None], 0.0), own), dim=1)
            for old, own in (
                (page_keys, keys.expand(len(pages), *keys.shape)),
                (page_values, values.expand(len(pages), *values.shape)),
            )
        )
        mask = torch.cat((is_cached, is_visible[chunk]), dim=1)[:, None, None]
        query, key, value = queries[chunk, :, None], all_keys.transpose(1, 2), all_values.transpose(1, 2)
        parts.append(F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)[:, :, 0])
    return torch.cat(parts)


def _is_visible(starts: Tensor) -> Tensor:
    """The causal mask within packed prompts, [T, T] bool."""
    token = torch.arange(len(starts), device=starts.device)
    return (token >= starts[:, None]) & (token <= token[:, None])


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (queries, keys, values))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


class _Blocks(NamedTuple):
    m: int
    n: int
    stages: int


def _choose_blocks(tokens: int, width: int, itemsize: int, on: Card) -> _Blocks:
    # Larger blocks spill registers in float32.
    if itemsize != 2 or on.has_few_registers:
        return _Blocks(16, 16, 3)
    # H200, 16 heads of 128: 4.4 us for 128 tokens with blocks of 16, 12.9 for 512 with blocks of 64, 90 for 2048.
    blocks = _Blocks(16, 64, 3) if tokens <= 256 else _Blocks(64, 64, 3)
    queries_and_weights = itemsize * blocks.m * (width + blocks.n)
    stages = on.fit_stages(blocks.m, 2 * itemsize * blocks.n * width, blocks.stages, queries_and_weights)
    return blocks._replace(stages=stages)


def _smaller_blocks(blocks: _Blocks) -> _Blocks | None:
    """The next smaller blocks to try if `blocks` cannot be launched; None after the smallest."""
    if blocks.stages > 2:
        return blocks._replace(stages=2)
    return _Blocks(16, 16, 2) if (blocks.m, blocks.n) != (16, 16) else None


def varlen_attention_kernel(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    cached_lengths: Tensor,
    cache: PagedKV,
    *,
    shrink: int = 0,
) -> Tensor:
    """`varlen_attention_reference` as one Triton kernel, a program per block of tokens and head; no gradient."""
    tokens, heads, width = queries.shape
    blocks = _choose_blocks(tokens, width, queries.dtype.itemsize, card(queries.device))
    block_m, block_n, stages = shrunk(blocks, _smaller_blocks, shrink)
    out = torch.empty((tokens, heads, width), dtype=queries.dtype, device=queries.device)
    attention_kernels.varlen[triton.cdiv(tokens, block_m), heads](
        queries=queries, keys=keys, values=values, starts=starts, cached_lengths=cached_lengths, slots=cache.slots,
        page_keys=cache.keys, page_values=cache.values, page_table=cache.page_table, out=out, tokens=tokens,
        query_stride=queries.stride(0), key_stride=keys.stride(0), value_stride=values.stride(0),
        page_table_stride=cache.page_table.stride(0), scale=exp2_scale(width), NUM_HEADS=heads,
        GROUP_SIZE=heads // keys.shape[1], HEAD_DIM=width, PAGE_SIZE=cache.keys.shape[1], BLOCK_M=block_m,
        # Triton's interpreter reads bfloat16 operands of tl.dot as integers; float32 gives the same products.
        BLOCK_N=block_n, IS_INTERPRETED=triton.knobs.runtime.interpret, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out


def _can_run(
    queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, cached_lengths: Tensor, cache: PagedKV
) -> bool:
    page_keys, page_values, page_table, slots = cache
    width = queries.shape[-1]
    return (
        queries.dtype in DTYPES
        and all(rows.dtype == queries.dtype for rows in (keys, values, page_keys, page_values))
        and all(rows.stride(2) == 1 and rows.stride(1) == width for rows in (queries, keys, values))
        and all(rows.is_contiguous() for rows in (page_keys, page_values))
        and all(rows.stride(-1) == 1 for rows in (starts, cached_lengths, slots, page_table))
        and queries.numel() > 0
        and is_power_of_two(width, 16, 128)
        and is_power_of_two(page_keys.shape[1], 1, 1024)
    )


varlen_attention = Operation(varlen_attention_kernel, varlen_attention_reference, _can_run, can_shrink=True)
