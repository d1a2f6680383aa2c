"""Decode attention (GQA) over a paged KV cache, for one or a few new positions per request: a Triton kernel beside its
torch reference.

Fused with q/k norms, rotary embedding and the write of the new keys and values."""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.ops.device import Card, card
from sonoro.ops.dispatch import Operation, shrunk
from sonoro.ops.norm import pdl_options, unit_rms
from sonoro.ops.optional import triton

if triton is not None:
    from sonoro.ops import attention_kernels

Rotary = tuple[Tensor, Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the attention kernels support."""


class HeadNorms(NamedTuple):
    """RMSNorm weights [D] of query and key heads; None for a model without q/k norms."""

    query: Tensor | None = None
    key: Tensor | None = None
    eps: float = 0.0

    def applied(self, heads: Tensor, kv_heads: int) -> Tensor:
        """Norm `heads` [T, heads + kv heads, D]: queries, then `kv_heads` keys. A new tensor, or `heads` without
        norms."""
        if self.query is None or self.key is None:
            return heads
        # One norm for both: on a CPU the number of calls counts.
        normed = unit_rms(heads, self.eps)
        normed[:, :-kv_heads].mul_(self.query)
        normed[:, -kv_heads:].mul_(self.key)
        return normed


class PagedKV(NamedTuple):
    """A layer's KV cache, `keys` and `values` [pages, page size, kv heads, D], and the page tables of a launch: row
    `slots[i]` int64 of `page_table` [slots, pages] int32 lists the pages of request (or token) i."""

    keys: Tensor
    values: Tensor
    page_table: Tensor
    slots: Tensor


def decode_attention_reference(
    qkv: Tensor, norms: HeadNorms, rotary: Rotary, cache: PagedKV, positions: Tensor
) -> Tensor:
    """Causal attention of T new positions per request, `qkv` [T * B, (heads + 2 kv heads) * D]: [T * B, heads * D].

    Row t * B + b of `qkv` is position `positions[b]` + t ([B] int64) of request b. Applies q/k `norms` and `rotary`
    (cos and signed sin by position, [P, 1, D] each), and writes the new keys and values to `cache`. Nothing past a
    request's position matters, NaN included. On a CPU it reads live positions only; elsewhere it reads whole page
    tables, is capturable and does not sync."""
    batch = cache.slots.shape[0]
    if qkv.shape[0] > batch:
        steps = enumerate(qkv.split(batch))
        return torch.cat(
            [decode_attention_reference(rows, norms, rotary, cache, positions + step) for step, rows in steps]
        )
    kv_heads, width = cache.keys.shape[2:]
    heads = qkv.unflatten(-1, (-1, width))
    normed = norms.applied(heads[:, :-kv_heads], kv_heads)
    if qkv.is_cpu and qkv.shape[0] == 1:
        # Slicing one row takes a quarter of the time of gathering it.
        at = int(positions)
        cos, signed_sin = rotary[0][at : at + 1], rotary[1][at : at + 1]
    else:
        cos, signed_sin = rotary[0].index_select(0, positions), rotary[1].index_select(0, positions)
    rotated = torch.addcmul(normed * cos, normed.roll(width // 2, -1), signed_sin)
    queries, new_keys, new_values = rotated[:, :-kv_heads], rotated[:, -kv_heads:], heads[:, -kv_heads:]
    attend = _attend_live_pages if qkv.is_cpu else _attend_masked
    return attend(queries, new_keys, new_values, cache, positions).flatten(1)


def _attend_masked(queries: Tensor, new_keys: Tensor, new_values: Tensor, cache: PagedKV, positions: Tensor) -> Tensor:
    keys, values, page_table, slots = cache
    page, pages = keys.shape[1], page_table[slots].long()
    current = pages.gather(1, (positions // page)[:, None])[:, 0]
    keys[current, positions % page] = new_keys
    values[current, positions % page] = new_values
    is_dead = torch.arange(pages.shape[1] * page, device=slots.device) > positions[:, None]
    # Zeroed, since the mask alone lets NaN through (NaN - inf, 0 * NaN).
    all_keys, all_values = (
        rows[pages].flatten(1, 2).masked_fill_(is_dead[..., None, None], 0.0).transpose(1, 2) for rows in (keys, values)
    )
    mask = ~is_dead[:, None, None, :]
    out = F.scaled_dot_product_attention(queries[:, :, None], all_keys, all_values, attn_mask=mask, enable_gqa=True)
    return out[:, :, 0]


def _attend_live_pages(
    queries: Tensor, new_keys: Tensor, new_values: Tensor, cache: PagedKV, positions: Tensor
) -> Tensor:
    keys, values, page_table, slots = cache
    page, numbers, at = keys.shape[1], page_table.numpy(), positions.tolist()
    rows = [numbers[slot, : position // page + 1].tolist() for slot, position in zip(slots.tolist(), at, strict=True)]
    places = torch.tensor([pages[-1] * page + position % page for pages, position in zip(rows, at, strict=True)])
    keys.flatten(0, 1).index_copy_(0, places, new_keys)
    values.flatten(0, 1).index_copy_(0, places, new_values)
    if len(set(at)) == 1:
        return _attend_same_length(queries, keys, values, rows, at[0])
    return torch.cat(
        [
            _attend_same_length(queries[row : row + 1], keys, values, [pages], position)
            for row, (pages, position) in enumerate(zip(rows, at, strict=True))
        ]
    )


def _attend_same_length(queries: Tensor, keys: Tensor, values: Tensor, rows: list[list[int]], position: int) -> Tensor:
    """Attention of requests at the same position, which have equal numbers of pages (`rows`)."""
    pages = [page for row in rows for page in row]
    first, end = pages[0], pages[-1] + 1
    # Consecutive pages are read without a copy.
    if pages == list(range(first, end)):
        live_keys, live_values = keys[first:end], values[first:end]
    else:
        index = torch.tensor(pages)
        live_keys, live_values = keys.index_select(0, index), values.index_select(0, index)
    shape = (len(rows), -1, *keys.shape[2:])
    key = live_keys.view(shape)[:, : position + 1].transpose(1, 2)
    value = live_values.view(shape)[:, : position + 1].transpose(1, 2)
    return F.scaled_dot_product_attention(queries.unsqueeze(2), key, value, enable_gqa=True).squeeze(2)


class DecodeConfig(NamedTuple):
    """Launch parameters: warps per program, tiles in flight, the most KV splits of a request (split-K), and positions
    of the shortest split.
    All are powers of two; the shortest split is at least 16."""

    warps: int
    tiles: int
    splits: int
    shortest: int


_MAX_GROUP_SIZE = 4
"""Query heads per program: with 8 a kernel takes two minutes to compile, and spills registers."""

_MAX_SEMAPHORES = 1 << 16
"""Number of split-K semaphores: requests times kv heads up to which the KV cache may be split."""


def _choose_config(pairs: int, capacity: int, group_size: int, on: Card) -> DecodeConfig:
    """The fastest on an H200 or H100 for `pairs` of request and kv head, of `group_size` query heads, with page tables
    of `capacity` positions; with fewer tiles on a card with few registers."""
    config = _fastest_config(pairs, capacity, group_size)
    return config._replace(tiles=min(2, config.tiles)) if on.has_few_registers else config


def _fastest_config(pairs: int, capacity: int, group_size: int) -> DecodeConfig:
    # Per layer of 16 heads, 8 kv heads, D 128, bfloat16: 1 request of up to 16 positions 2.2 us, 256 of them 5.8.
    if capacity <= 16:
        # On an H100, 64, 128 and 256 requests with 8 tiles of 2 heads: 4.39, 4.54 and 6.73 us for 4.64, 4.66 and 6.90.
        return DecodeConfig(warps=1, tiles=8 if 512 <= pairs <= 2048 and group_size <= 2 else 4, splits=1, shortest=16)
    # 1 request: 6.1 us at 150 positions, 8.1 at 512, 12.5 at 2000.
    if pairs <= 16:
        return DecodeConfig(warps=2, tiles=4, splits=16, shortest=32)
    # On an H100, 64 requests of 2 programs of 4 heads, two kv heads: at 45 to 135 positions 12.0 us, 16.6 as below.
    if 64 < pairs <= 256 and group_size == _MAX_GROUP_SIZE:
        return DecodeConfig(warps=1, tiles=8, splits=4, shortest=32)
    # 8 requests: 9.2 us at 150 positions, 12.3 at 512; 16 at 300: 13.6; 32 at 300: 17.3 (memory floor 9.3).
    if pairs <= 256:
        splits = max(2, min(8, 512 // pairs))
        return DecodeConfig(warps=2, tiles=8, splits=1 << splits.bit_length() - 1, shortest=64 if pairs <= 64 else 128)
    # 128 requests on an H100: at 45 to 135 positions 26.0 us (26.7 as below), at 150 to 260 46.9 (51.8).
    if pairs <= 1024:
        return DecodeConfig(warps=1, tiles=4, splits=4, shortest=64)
    # 256 requests on an H100: at 45 to 135 positions 45 us (memory floor 32), at 512 193 (179), at 1 to 1023 194 (173),
    # one of 2000 among 255 short ones 77. With four splits programs that have nothing to do take 4 us more.
    return DecodeConfig(warps=2, tiles=4, splits=2 if pairs <= _MAX_SEMAPHORES else 1, shortest=256)


@functools.cache
def _semaphores(device: torch.device, stream: int) -> Tensor:
    """The split-K semaphores of a stream, zero before and after every launch. One set per stream, since launches on two
    streams may overlap."""
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
    with torch.inference_mode(False):
        return torch.zeros(_MAX_SEMAPHORES, dtype=torch.int32, device=device)


def decode_attention_kernel(
    qkv: Tensor,
    norms: HeadNorms,
    rotary: Rotary,
    cache: PagedKV,
    positions: Tensor,
    *,
    tuning: DecodeConfig | None = None,
    shrink: int = 0,
    enable_pdl: bool = True,
) -> Tensor:
    """`decode_attention_reference` as one Triton kernel (flash decoding): a program per token, kv head and KV split.
    A kv head with many query heads takes several programs. The last split to finish combines all of them in order of
    positions, so the same launch gives the same bits. Requests that share a slot write the same positions; either may
    win. No gradient."""
    tokens, batch, (_, page, kv_heads, width) = qkv.shape[0], cache.slots.shape[0], cache.keys.shape
    group_size, capacity = qkv.shape[1] // width // kv_heads - 2, cache.page_table.shape[1] * page
    programs_per_kv_head, group_size = max(1, group_size // _MAX_GROUP_SIZE), min(group_size, _MAX_GROUP_SIZE)
    programs = kv_heads * programs_per_kv_head
    tuning = tuning or _choose_config(tokens * programs, capacity, group_size, card(qkv.device))
    warps, tiles, num_splits, min_split = shrunk(
        tuning, lambda one: one._replace(tiles=one.tiles // 2) if one.tiles > 1 else None, shrink
    )
    # Positions read side by side, with 16 bytes per thread.
    lanes = min(page, max(1, warps * 32 * 16 // (width * qkv.dtype.itemsize)))
    out = torch.empty((tokens, programs * group_size * width), dtype=qkv.dtype, device=qkv.device)
    partial_acc = partial_ml = semaphores = out
    if num_splits > 1:
        partial_acc = torch.empty(
            (tokens, programs, num_splits, group_size, width), dtype=torch.float32, device=qkv.device
        )
        partial_ml = torch.empty((tokens, programs, num_splits, group_size, 2), dtype=torch.float32, device=qkv.device)
        semaphores = _semaphores(qkv.device, torch.cuda.current_stream().cuda_stream if qkv.is_cuda else 0)
    # Without norms these pointers are not read.
    q_norm, k_norm = (qkv if norm is None else norm for norm in norms[:2])
    attention_kernels.decode[programs, num_splits, tokens](
        qkv=qkv, q_norm=q_norm, k_norm=k_norm, cos=rotary[0], sin=rotary[1], **cache._asdict(), positions=positions,
        partial_acc=partial_acc, partial_ml=partial_ml, semaphores=semaphores, out=out, count=batch,
        qkv_stride=qkv.stride(0), page_table_stride=cache.page_table.stride(0), eps=norms.eps,
        scale=exp2_scale(width), NEW_TOKENS=tokens // batch, NUM_KV_HEADS=kv_heads,
        PROGRAMS_PER_KV_HEAD=programs_per_kv_head, GROUP_SIZE=group_size, HEAD_DIM=width, PAGE_SIZE=page,
        LANES=lanes, TILES=tiles, NUM_SPLITS=num_splits, MIN_SPLIT=min_split, IS_SINGLE_BLOCK=capacity <= lanes * tiles,
        IS_NORMED=norms.query is not None, num_warps=warps, **pdl_options(qkv.device, enable_pdl=enable_pdl),
    )  # fmt: skip
    return out


def exp2_scale(width: int) -> float:
    """The scale of attention scores for heads of `width`, times log2(e): kernels use exp2, a single instruction."""
    return math.log2(math.e) / math.sqrt(width)


def takes_heads(qkv: Tensor, norms: HeadNorms, rotary: Rotary, cache: PagedKV, positions: Tensor) -> bool:
    """Whether the kernels support these tensors: one supported dtype, dense rows, a head width that is a power of
    two."""
    keys, values, page_table, slots = cache
    tensors = [tensor for tensor in (*norms[:2], *rotary, keys, values) if tensor is not None]
    return (
        qkv.dtype in DTYPES
        and all(tensor.dtype == qkv.dtype and tensor.is_contiguous() for tensor in tensors)
        and all(tensor.stride(-1) == 1 for tensor in (qkv, page_table, slots, positions))
        and qkv.numel() > 0
        and is_power_of_two(keys.shape[3], 16, 128)
    )


def _can_decode(qkv: Tensor, norms: HeadNorms, rotary: Rotary, cache: PagedKV, positions: Tensor) -> bool:
    _, page, kv_heads, width = cache.keys.shape
    return (
        takes_heads(qkv, norms, rotary, cache, positions)
        and qkv.shape[0] % cache.slots.shape[0] == 0
        and is_power_of_two(page, 16, 1024)
        and is_power_of_two(qkv.shape[1] // width // kv_heads - 2, 1, 8)
    )


def is_power_of_two(number: int, low: int, high: int) -> bool:
    """Whether `number` is a power of two from `low` to `high`."""
    return low <= number <= high and number & (number - 1) == 0


decode_attention = Operation(decode_attention_kernel, decode_attention_reference, _can_decode, can_shrink=True)
