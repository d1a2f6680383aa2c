"""Attention of a decoder stack's step, one position per row or a few, over pages: a kernel beside its torch reference.

With the norms and the rotation before it and the write of the new key and value, and for a few positions of a row as
well. Query heads share key heads in groups.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import can_overlap, unit_rms

try:
    import triton

    from sonoro.ops import attention_kernels
except ImportError:
    triton = None

__all__ = [
    "DTYPES",
    "Tuning",
    "decode_attention",
    "decode_attention_kernel",
    "decode_attention_reference",
    "is_power",
]

Rotary = tuple[Tensor, Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels of attention are made for."""


def decode_attention_reference(  # noqa: PLR0917 (all that a step knows)
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rotary: Rotary,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """Attend with new positions, `qkv` [T * B, (heads + 2 kv heads) * D], to them and all before: [T * B, heads * D].

    Queries and keys are normed (`q_norm`, `k_norm` [D]; or neither) and turned by `rotary`, tables of positions
    [P, 1, D]. Row b is row `slots[b]` int64 of `table` [rows, pages per row] int32, at `positions[b]` int64 and, if T
    is above 1, at those that follow: line t * B + b of `qkv` is its position `positions[b]` + t. Keys and values are
    written into `keys` and `values` [pages, page positions, kv heads, D]. Nothing past a row's position matters, NaN
    included.
    On a CPU it reads live positions only; elsewhere it reads whole rows, may be captured and does not synchronise.
    """
    if qkv.shape[0] > slots.shape[0]:
        shared = (q_norm, k_norm, eps, rotary, keys, values, table, slots)
        turns = enumerate(qkv.split(slots.shape[0]))
        return torch.cat([decode_attention_reference(lines, *shared, positions + turn) for turn, lines in turns])
    kv_heads, width = keys.shape[2:]
    heads = qkv.unflatten(-1, (-1, width))
    # Queries and keys at once: on a CPU calls are what takes time.
    normed = heads[:, :-kv_heads]
    if q_norm is not None and k_norm is not None:
        normed = unit_rms(normed, eps)
        normed[:, :-kv_heads].mul_(q_norm)
        normed[:, -kv_heads:].mul_(k_norm)
    if qkv.is_cpu and qkv.shape[0] == 1:
        # A view of one row takes a quarter of the time of gathering it.
        at = int(positions)
        cos, signed_sin = rotary[0][at : at + 1], rotary[1][at : at + 1]
    else:
        cos, signed_sin = rotary[0].index_select(0, positions), rotary[1].index_select(0, positions)
    turned = torch.addcmul(normed * cos, normed.roll(width // 2, -1), signed_sin)
    queries, new_keys, new_values = turned[:, :-kv_heads], turned[:, -kv_heads:], heads[:, -kv_heads:]
    attend = _attend_rows if qkv.is_cpu else _attend_masked
    return attend(queries, new_keys, new_values, keys, values, table, slots, positions).flatten(1)


def _attend_masked(  # noqa: PLR0917
    queries: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    page, pages = keys.shape[1], table[slots].long()
    current = pages.gather(1, (positions // page)[:, None])[:, 0]
    keys[current, positions % page] = new_keys
    values[current, positions % page] = new_values
    is_dead = torch.arange(pages.shape[1] * page, device=slots.device) > positions[:, None]
    # The copies are cleared too: the mask alone would let NaN through (NaN - inf, 0 * NaN).
    all_keys, all_values = (
        rows[pages].flatten(1, 2).masked_fill_(is_dead[..., None, None], 0.0).transpose(1, 2) for rows in (keys, values)
    )
    mask = ~is_dead[:, None, None, :]
    out = F.scaled_dot_product_attention(queries[:, :, None], all_keys, all_values, attn_mask=mask, enable_gqa=True)
    return out[:, :, 0]


def _attend_rows(  # noqa: PLR0917
    queries: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    page, numbers, at = keys.shape[1], table.numpy(), positions.tolist()
    rows = [numbers[slot, : position // page + 1].tolist() for slot, position in zip(slots.tolist(), at, strict=True)]
    places = torch.tensor([pages[-1] * page + position % page for pages, position in zip(rows, at, strict=True)])
    keys.flatten(0, 1).index_copy_(0, places, new_keys)
    values.flatten(0, 1).index_copy_(0, places, new_values)
    if len(set(at)) == 1:
        return _attend_alike(queries, keys, values, rows, at[0])
    return torch.cat(
        [
            _attend_alike(queries[row : row + 1], keys, values, [pages], position)
            for row, (pages, position) in enumerate(zip(rows, at, strict=True))
        ]
    )


def _attend_alike(queries: Tensor, keys: Tensor, values: Tensor, rows: list[list[int]], position: int) -> Tensor:
    """All rows at one position, each on as many pages."""
    pages = [page for row in rows for page in row]
    first, end = pages[0], pages[-1] + 1
    # Pages that follow one another are read where they are.
    if pages == list(range(first, end)):
        live_keys, live_values = keys[first:end], values[first:end]
    else:
        index = torch.tensor(pages)
        live_keys, live_values = keys.index_select(0, index), values.index_select(0, index)
    shape = (len(rows), -1, *keys.shape[2:])
    key = live_keys.view(shape)[:, : position + 1].transpose(1, 2)
    value = live_values.view(shape)[:, : position + 1].transpose(1, 2)
    return F.scaled_dot_product_attention(queries.unsqueeze(2), key, value, enable_gqa=True).squeeze(2)


class Tuning(NamedTuple):
    """How rows are run: warps of a program, tiles in flight, most parts of a row, and positions of the shortest part.

    All powers of two; the shortest part is at least 16.
    """

    warps: int
    tiles: int
    splits: int
    shortest: int


_MOST_MEMBERS = 4
"""Query heads of a program: with 8 a kernel takes two minutes to compile, and spills."""

_MOST_PAIRS = 1 << 16
"""Rows times kv heads, or parts of those, up to which rows may be divided into parts: as many counters are kept."""


def _tuning(pairs: int, capacity: int) -> Tuning:
    """What was fastest on an H200 for `pairs` of row and kv head and rows of `capacity` positions."""
    # Per layer of 16 heads, 8 kv heads, D 128, bfloat16: one row of at most 16 positions 2.2 us, 256 such rows 5.8.
    if capacity <= 16:
        return Tuning(warps=1, tiles=4, splits=1, shortest=16)
    # One row: 6.1 us at 150 positions, 8.1 at 512, 12.5 at 2000.
    if pairs <= 16:
        return Tuning(warps=2, tiles=4, splits=16, shortest=32)
    # 8 rows: 9.2 us at 150 positions, 12.3 at 512. 16 rows at 300: 13.6; 32 rows: 17.3 (traffic takes 9.3).
    if pairs <= 256:
        splits = max(2, min(8, 512 // pairs))
        return Tuning(warps=2, tiles=8, splits=1 << splits.bit_length() - 1, shortest=64 if pairs <= 64 else 128)
    # At 512 positions: 64 rows 39 us (traffic takes 32), 256 rows 141 (126); at 1 to 1023: 64 rows 50 (31).
    return Tuning(warps=1, tiles=4, splits=4 if pairs <= _MOST_PAIRS else 1, shortest=128)


@functools.cache
def _arrivals(device: torch.device, stream: int) -> Tensor:
    """Counters that every launch of a stream finds at zero and leaves there; launches of two streams may overlap."""
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
    with torch.inference_mode(False):
        return torch.zeros(_MOST_PAIRS, dtype=torch.int32, device=device)


def decode_attention_kernel(  # noqa: PLR0917
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rotary: Rotary,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    tuning: Tuning | None = None,
    is_overlapped: bool = True,
) -> Tensor:
    """`decode_attention_reference` as one Triton kernel, a program per line, kv head and part of the row's positions.

    A kv head with many query heads takes several programs. Parts are added up by the last of them to finish, in the
    order of positions: the same launch gives the same bits. Rows that share a slot write the same place, one of them
    last. No gradient.
    """
    lines, rows, (_, page, kv_heads, width) = qkv.shape[0], slots.shape[0], keys.shape
    group, capacity = qkv.shape[1] // width // kv_heads - 2, table.shape[1] * page
    share, group = max(1, group // _MOST_MEMBERS), min(group, _MOST_MEMBERS)
    parts = kv_heads * share
    warps, tiles, splits, shortest = tuning or _tuning(lines * parts, capacity)
    # As many positions side by side as the warps read in pieces of 16 bytes.
    lanes = min(page, max(1, warps * 32 * 16 // (width * qkv.dtype.itemsize)))
    overlap = is_overlapped and can_overlap(qkv.device)
    out = torch.empty((lines, parts * group * width), dtype=qkv.dtype, device=qkv.device)
    sums = extremes = arrivals = out
    if splits > 1:
        sums = torch.empty((lines, parts, splits, group, width), dtype=torch.float32, device=qkv.device)
        extremes = torch.empty((lines, parts, splits, group, 2), dtype=torch.float32, device=qkv.device)
        arrivals = _arrivals(qkv.device, torch.cuda.current_stream().cuda_stream if qkv.is_cuda else 0)
    attention_kernels.decode[parts, splits, lines](
        qkv,
        # Without norms nothing is read from them: any pointers serve.
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        *rotary,
        keys,
        values,
        table,
        slots,
        positions,
        sums,
        extremes,
        arrivals,
        out,
        rows,
        qkv.stride(0),
        table.stride(0),
        eps,
        # Exponentials to base two are an instruction of their own.
        math.log2(math.e) / math.sqrt(width),
        lines // rows,
        kv_heads,
        share,
        group,
        width,
        page,
        lanes,
        tiles,
        splits,
        shortest,
        capacity <= lanes * tiles,
        q_norm is not None,
        overlap,
        num_warps=warps,
        launch_pdl=overlap,
    )
    return out


def _can_decode(  # noqa: PLR0917
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rotary: Rotary,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> bool:
    _, page, kv_heads, width = keys.shape
    tensors = [tensor for tensor in (q_norm, k_norm, *rotary, keys, values) if tensor is not None]
    return (
        qkv.dtype in DTYPES
        and all(tensor.dtype == qkv.dtype and tensor.is_contiguous() for tensor in tensors)
        and all(tensor.stride(-1) == 1 for tensor in (qkv, table, slots, positions))
        and qkv.numel() > 0
        and qkv.shape[0] % slots.shape[0] == 0
        and is_power(width, 16, 128)
        and is_power(page, 16, 1024)
        and is_power(qkv.shape[1] // width // kv_heads - 2, 1, 8)
    )


def is_power(number: int, low: int, high: int) -> bool:
    """Whether `number` is a power of two from `low` to `high`."""
    return low <= number <= high and number & (number - 1) == 0


decode_attention = Operation("decode_attention", decode_attention_kernel, decode_attention_reference, _can_decode)
