"""Attention over pages, a position per row: reference against a plain computation, kernel against reference."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from processes import run_without_triton
from torch import Tensor
from without_gpu import INTERPRETED, device_only, in_the_interpreter

from sonoro.ops import attention
from sonoro.ops.attention import (
    HeadNorms,
    PagedKV,
    decode_attention,
    decode_attention_kernel,
    decode_attention_reference,
)

EPS = 1e-6
# Of the outputs, which are averages of values near 1: sums in another order in float32, one rounding in bfloat16.
# What is written is compared too; the interpreter truncates to bfloat16 where a GPU rounds, so it is two there.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 5e-2 if INTERPRETED else 2e-2, torch.float16: 2e-3}


def rotary(positions: int, width: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    angles = torch.arange(positions)[:, None, None] / 10.0 ** (torch.arange(width // 2) / 8)
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return tables[0].to(device, dtype), tables[1].to(device, dtype)


def decode_case(
    heads: tuple[int, int, int],
    page: int,
    pages: int,
    positions: list[int],
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    fill: float = torch.nan,
    has_norms: bool = True,
) -> tuple[Any, ...]:
    """Arguments of `decode_attention` for rows at `positions`: pages in any order, `fill` where nothing is live."""
    query_heads, kv_heads, width = heads
    rows = len(positions) + 1
    make = torch.Generator().manual_seed(len(positions) + page)
    keys, values = torch.randn(2, rows * pages + 1, page, kv_heads, width, generator=make).to(dtype)
    table = torch.randperm(rows * pages, generator=make).view(rows, pages).int()
    slots = torch.randperm(rows, generator=make)[:-1]
    for slot, position in zip(slots.tolist(), positions, strict=True):
        for rest in (keys, values):
            rest[table[slot, position // page], position % page :] = fill
            rest[table[slot, position // page + 1 :].long()] = fill
    qkv = torch.randn(len(positions), (query_heads + 2 * kv_heads) * width, generator=make).to(dtype)
    q_norm, k_norm = (0.5 + torch.rand(2, width, generator=make)).to(device, dtype)
    norms = HeadNorms(q_norm, k_norm, EPS) if has_norms else HeadNorms()
    cache = PagedKV(*(tensor.to(device) for tensor in (keys, values, table, slots)))
    turned = rotary(page * pages, width, dtype, device)
    return qkv.to(device), norms, turned, cache, torch.tensor(positions, device=device)


def with_turns(arguments: tuple[Any, ...], turns: int) -> tuple[Any, ...]:
    """The same rows, each with `turns` new positions."""
    qkv, *rest = arguments
    make = torch.Generator().manual_seed(turns)
    more = torch.randn((turns - 1) * len(qkv), qkv.shape[1], generator=make, dtype=torch.float64).to(qkv)
    return (torch.cat((qkv, more)), *rest)


def copies(arguments: Any) -> Any:
    if isinstance(arguments, Tensor):
        return arguments.clone()
    if not isinstance(arguments, tuple):
        return arguments
    values = map(copies, arguments)
    return type(arguments)(*values) if hasattr(arguments, "_fields") else tuple(values)


def plain_decode(arguments: tuple[Any, ...]) -> Tensor:
    """Row by row and head by head, the rotation as complex numbers."""
    qkv, norms, (cos, sin), (keys, values, table, slots), positions = arguments
    page, kv_heads, width = keys.shape[1:]
    half, outs = width // 2, []

    def prepare(x: Tensor, weight: Tensor | None, position: int) -> Tensor:
        x = x if weight is None else x / (x.square().mean() + EPS).sqrt() * weight
        turned = torch.complex(x[:half], x[half:]) * torch.complex(cos[position, 0, :half], sin[position, 0, half:])
        return torch.cat((turned.real, turned.imag))

    for row, slot, position in zip(qkv, slots.tolist(), positions.tolist(), strict=True):
        heads = row.view(-1, width)
        group = len(heads) // kv_heads - 2
        for head in range(group * kv_heads):
            shared = head // group
            query = prepare(heads[head], norms.query, position)
            live = [(table[slot, at // page], at % page, shared) for at in range(position)]
            all_keys = [keys[place] for place in live] + [
                prepare(heads[group * kv_heads + shared], norms.key, position)
            ]
            all_values = [values[place] for place in live] + [heads[(group + 1) * kv_heads + shared]]
            scores = torch.stack([query @ key for key in all_keys]) / width**0.5
            outs.append(scores.softmax(0) @ torch.stack(all_values))
    return torch.stack(outs).view(len(qkv), -1)


@pytest.mark.parametrize("positions", [[0, 3, 4, 11], [2, 2, 2], [6, 6]])
@pytest.mark.parametrize("path", ["rows", "masked"])
def test_decode_equals_a_plain_computation(path: str, positions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "masked":
        monkeypatch.setattr(attention, "_attend_live_pages", attention._attend_masked)
    given = decode_case((4, 2, 6), 4, 3, positions, torch.float64)
    used = copies(given)
    # Same sums in float64, in another order.
    torch.testing.assert_close(decode_attention(*used), plain_decode(given), atol=1e-12, rtol=0)
    qkv, norms, (cos, sin), cache, at = given
    for row, (slot, position) in enumerate(zip(cache.slots.tolist(), at.tolist(), strict=True)):
        fresh = qkv[row].view(-1, 6)
        key = fresh[4:6] / (fresh[4:6].square().mean(-1, keepdim=True) + EPS).sqrt() * norms.key
        key = key * cos[position] + key.roll(3, -1) * sin[position]
        place = (cache.page_table[slot, position // 4].long(), position % 4)
        torch.testing.assert_close(used[3].keys[place], key, atol=1e-12, rtol=0)
        assert torch.equal(used[3].values[place], fresh[6:8])
        for rest, before in zip(used[3][:2], cache[:2], strict=True):
            rest[place] = before[place]
    for rest, before in zip(used[3][:2], cache[:2], strict=True):
        torch.testing.assert_close(rest, before, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("path", ["rows", "masked"])
def test_decode_without_norms_equals_a_plain_computation(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "masked":
        monkeypatch.setattr(attention, "_attend_live_pages", attention._attend_masked)
    given = decode_case((4, 2, 6), 4, 3, [0, 3, 11], torch.float64, has_norms=False)
    # Same sums in float64, in another order.
    torch.testing.assert_close(decode_attention(*copies(given)), plain_decode(given), atol=1e-12, rtol=0)


@pytest.mark.parametrize("path", ["rows", "masked"])
def test_positions_at_once_equal_positions_one_by_one(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "masked":
        monkeypatch.setattr(attention, "_attend_live_pages", attention._attend_masked)
    given = with_turns(decode_case((4, 2, 6), 4, 3, [0, 3, 9], torch.float64), 3)
    used, found = copies(given), []
    for turn, lines in enumerate(given[0].split(3)):
        before = copies(used[3])
        found.append(decode_attention(lines, *used[1:4], given[4] + turn))
        # Of one position alone it is known what is right.
        expected = plain_decode((lines, *given[1:3], before, given[4] + turn))
        torch.testing.assert_close(found[-1], expected, atol=1e-12, rtol=0)
    at_once = copies(given)
    assert torch.equal(decode_attention(*at_once), torch.cat(found))
    for rows, expected in zip(at_once[3][:2], used[3][:2], strict=True):
        torch.testing.assert_close(rows, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("path", ["rows", "masked"])
def test_nothing_past_the_live_length_matters(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "masked":
        monkeypatch.setattr(attention, "_attend_live_pages", attention._attend_masked)
    cases = [decode_case((4, 2, 8), 4, 3, [0, 6], torch.float32, fill=fill) for fill in (0.0, torch.nan, torch.inf)]
    outs = [decode_attention(*case) for case in cases]
    assert torch.isfinite(outs[0]).all()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_pages_in_a_row_are_read_as_pages_anywhere() -> None:
    given = decode_case((4, 2, 8), 4, 3, [11, 9], torch.float64)
    found = decode_attention(*copies(given))
    keys, values, table, slots = given[3]
    order = table.flatten().long()
    moved = PagedKV(keys.clone(), values.clone(), torch.arange(len(order), dtype=torch.int32).view_as(table), slots)
    moved.keys[: len(order)], moved.values[: len(order)] = keys[order], values[order]
    assert torch.equal(decode_attention(*given[:3], moved, given[4]), found)


def test_half_precision_is_rounded_where_the_layers_round() -> None:
    """After the norm, after its weight, after the cosine, and once after the sum with the sine."""
    given = decode_case((2, 1, 8), 4, 2, [5], torch.bfloat16)
    used = copies(given)
    decode_attention(*used)
    key = given[0][0, 16:24].float()
    normed = (key * torch.rsqrt(key.square().mean() + EPS)).bfloat16() * given[1].key
    cos, sin = (table[5, 0] for table in given[2])
    turned = ((normed * cos).float() + normed.roll(4).float() * sin.float()).bfloat16()
    keys, _, table, slots = used[3]
    assert torch.equal(keys[table[slots[0], 1].long(), 1, 0], turned)


def test_decode_may_be_captured() -> None:
    given = decode_case((4, 2, 8), 4, 3, [0, 6], torch.float32, device="meta", fill=0.0)
    with device_only():
        assert decode_attention(*given).shape == (2, 32)
        assert decode_attention(torch.cat((given[0], given[0])), *given[1:]).shape == (4, 32)


def check_decode(given: tuple[Any, ...], tuning: Any = None) -> None:
    ours, theirs = copies(given), copies(given)
    found, expected = decode_attention_kernel(*ours, tuning=tuning), decode_attention_reference(*theirs)
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(ours[3].keys, theirs[3].keys, atol=tolerance, rtol=tolerance, equal_nan=True)
    torch.testing.assert_close(ours[3].values, theirs[3].values, atol=0, rtol=0, equal_nan=True)


@in_the_interpreter
def test_interpreted() -> None:
    tuning = attention.DecodeConfig
    for dtype in (torch.float32, torch.bfloat16):
        # One tile, several blocks, rows in parts of which some have nothing to do, groups of 1 and 4.
        check_decode(decode_case((4, 2, 16), 16, 1, [0, 15], dtype))
        check_decode(decode_case((4, 2, 32), 16, 4, [63, 17], dtype), tuning(warps=1, tiles=2, splits=1, shortest=16))
        check_decode(decode_case((4, 1, 32), 16, 4, [63, 8], dtype), tuning(warps=1, tiles=1, splits=4, shortest=16))
        check_decode(decode_case((2, 2, 32), 32, 2, [40, 31], dtype), tuning(warps=1, tiles=1, splits=2, shortest=16))
        check_decode(decode_case((4, 1, 16), 16, 1, [0, 9], dtype, has_norms=False))
        # A group too large for one program.
        check_decode(decode_case((16, 2, 16), 16, 2, [20, 9], dtype, has_norms=False))
        check_decode(decode_case((8, 1, 32), 16, 4, [63, 8], dtype), tuning(warps=1, tiles=1, splits=4, shortest=16))
        # Two positions of each row, in one part and where a part ends between them.
        check_decode(with_turns(decode_case((4, 1, 16), 16, 1, [0, 9], dtype, has_norms=False), 2))
        pair = with_turns(decode_case((4, 2, 32), 16, 4, [31, 62], dtype), 2)
        check_decode(pair, tuning(warps=1, tiles=1, splits=2, shortest=16))
    # The counters of the parts are left as they were found.
    assert not attention._semaphores(torch.device("cpu"), 0).any()
    shared = list(decode_case((2, 1, 16), 16, 1, [3, 3], torch.float32))
    shared[3] = shared[3]._replace(slots=torch.tensor([2, 2]))
    assert torch.isfinite(decode_attention_kernel(*shared)).all()


@pytest.mark.parametrize(
    ("change", "is_supported"),
    [
        ({}, True),
        ({"heads": (4, 2, 24)}, False),
        ({"heads": (6, 2, 32)}, False),
        ({"page": 12}, False),
        ({"dtype": torch.float64}, False),
    ],
)
def test_the_kernel_is_offered_what_it_can_do(change: dict[str, Any], is_supported: bool) -> None:
    case = {"heads": (4, 2, 32), "page": 16, "pages": 2, "positions": [0, 3], "dtype": torch.float32} | change
    assert decode_attention.is_supported(*decode_case(**case)) == is_supported


def test_without_triton_the_references_serve() -> None:
    code = (
        "import torch; from sonoro.ops.attention import decode_attention\n"
        "from sonoro.ops.attention import PagedKV\n"
        "from sonoro.ops.varlen import varlen_attention\n"
        "assert decode_attention.is_broken and varlen_attention.is_broken\n"
        "x, zeros = torch.randn(3, 2, 4), torch.zeros(3, dtype=torch.int64)\n"
        "table = torch.zeros(1, 1, dtype=torch.int32)\n"
        "cache = PagedKV(x[None], x[None], table, zeros)\n"
        "assert varlen_attention(x, x, x, zeros, zeros, cache).shape == x.shape"
    )
    run = run_without_triton(code)
    assert run.returncode == 0, run.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 64, 256])
@torch.inference_mode()
def test_decode_on_a_gpu(rows: int, dtype: torch.dtype) -> None:
    positions = [random.Random(row).choice((0, 1, 31, 32, 127, 512, 1999, 2047)) for row in range(rows)]
    given = decode_case((16, 8, 128), 32, 64, positions, dtype, device="cuda")
    check_decode(given)
    found = decode_attention_kernel(*given)
    for _ in range(20):
        assert torch.equal(decode_attention_kernel(*given), found)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        decode_attention_kernel(*given)
    with torch.cuda.graph(graph, stream=stream):
        replayed = decode_attention_kernel(*given)
    for _ in range(3):
        replayed.fill_(7)
        graph.replay()
        assert torch.equal(replayed, found)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64])
@torch.inference_mode()
def test_decode_in_a_loop_on_a_gpu(rows: int) -> None:
    for position in (0, 1, 15):
        check_decode(decode_case((16, 8, 128), 16, 1, [position] * rows, torch.bfloat16, device="cuda"))
    for heads, has_norms in (((16, 8, 128), True), ((32, 8, 128), False)):
        first = decode_case(heads, 16, 1, [0] * rows, torch.bfloat16, device="cuda", has_norms=has_norms)
        check_decode(with_turns(first, 2))
    for group in (1, 4, 8):
        check_decode(decode_case((2 * group, 2, 64), 16, 8, [100] * rows, torch.bfloat16, device="cuda"))
