"""Attention of packed prompts: the references against each prompt alone, the kernel against its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from without_gpu import device_only, in_the_interpreter

from sonoro.ops import varlen
from sonoro.ops.attention import PagedKV
from sonoro.ops.varlen import varlen_attention, varlen_attention_kernel, varlen_attention_reference

# Of the outputs, which are averages of values near 1: sums in another order in float32, one rounding in bfloat16.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


def case(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    page: int = 16,
    padding: int = 3,
    fill: float = torch.nan,
    device: str = "cpu",
) -> tuple[Any, ...]:
    """Arguments of `varlen_attention` for prompts of (pages shared, own rows) each, then `padding` prompts of a row.

    Pages are in any order, `fill` where nothing is shared.
    """
    query_heads, kv_heads, width = heads
    make = torch.Generator().manual_seed(len(lengths) + page)
    most, rows = max(count for count, _ in lengths) + 1, len(lengths) + 1
    table = torch.randperm(rows * most, generator=make).view(rows, most).int()
    # As at the end of every table: the scratch page, for a row that has fewer.
    table[-1] = rows * most
    slots = torch.randperm(len(lengths), generator=make)
    page_rows = torch.full((2, rows * most + 1, page, kv_heads, width), fill)
    for slot, (count, _) in zip(slots.tolist(), lengths, strict=True):
        page_rows[:, table[slot, :count].long()] = torch.randn(2, count, page, kv_heads, width, generator=make)
        table[slot, count + 1 :] = rows * most
    own = torch.tensor([length for _, length in lengths] + [1] * padding)
    starts = torch.repeat_interleave(own.cumsum(0) - own, own)
    shared = torch.repeat_interleave(torch.tensor([count * page for count, _ in lengths] + [0] * padding), own)
    of = torch.repeat_interleave(torch.cat((slots, torch.full((padding,), rows - 1))), own)
    packed = torch.randn(len(starts), query_heads + 2 * kv_heads, width, generator=make).to(device, dtype)
    # The values are a part of a wider row, as a fused projection leaves them.
    queries, keys, values = packed.split((query_heads, kv_heads, kv_heads), dim=1)
    page_keys, page_values = page_rows.to(device, dtype)
    starts, shared, of, table = (tensor.to(device) for tensor in (starts, shared, of, table))
    return queries.contiguous(), keys.contiguous(), values, starts, shared, PagedKV(page_keys, page_values, table, of)


def prompts_alone(given: tuple[Any, ...]) -> Tensor:
    """Each prompt by itself, with what it has on pages before it, causally; the answers of its own rows."""
    queries, keys, values, starts, shared, (page_keys, page_values, table, slots) = given
    outs, page = [], page_keys.shape[1]
    for low in starts.unique().tolist():
        own = starts == low
        before = int(shared[low])
        numbers = table[slots[low]].long().tolist()
        places = [(numbers[at // page], at % page) for at in range(before)]
        all_keys, all_values = (
            torch.stack([*(old[place] for place in places), *new[own]]).transpose(0, 1)[None]
            for old, new in ((page_keys, keys), (page_values, values))
        )
        # What the earlier rows asked does not matter.
        asked = torch.cat((torch.zeros(before, *queries.shape[1:], dtype=queries.dtype), queries[own]))
        query = asked.transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(query, all_keys, all_values, is_causal=True, enable_gqa=True)
        outs.append(out[0].transpose(0, 1)[before:])
    return torch.cat(outs)


FILLS = [0.0, torch.nan, torch.inf]
SHAPES = [
    [(0, 5), (0, 1), (0, 9)],
    [(2, 5), (0, 3), (1, 1), (3, 9)],
    [(1, 1)],
]


@pytest.mark.parametrize("path", ["prompts", "masked"])
@pytest.mark.parametrize("lengths", SHAPES, ids=str)
def test_varlen_equals_each_prompt_alone(
    lengths: list[tuple[int, int]], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = case(lengths, (4, 2, 6), torch.float64, page=4)
    operation = varlen_attention if path == "prompts" else varlen._attend_masked
    found = operation(*given)
    assert found.shape == given[0].shape
    # Same sums in float64, in another order.
    torch.testing.assert_close(found, prompts_alone(given), atol=1e-12, rtol=0)


@pytest.mark.parametrize("path", ["prompts", "masked"])
def test_what_lies_on_other_pages_does_not_matter(path: str) -> None:
    operation = varlen_attention if path == "prompts" else varlen._attend_masked
    outs = [operation(*case(SHAPES[1], (4, 2, 8), torch.float32, page=4, fill=fill)) for fill in FILLS]
    assert torch.isfinite(outs[0]).all()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_varlen_may_be_captured() -> None:
    given = case(SHAPES[1], (4, 2, 8), torch.float32, device="meta")
    with device_only():
        assert varlen_attention(*given).shape == given[0].shape


def check_kernel(given: tuple[Any, ...]) -> None:
    tolerance = TOLERANCE[given[0].dtype]
    assert varlen_attention.is_supported(*given)
    found, expected = varlen_attention_kernel(*given), varlen_attention_reference(*given)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


@in_the_interpreter
def test_interpreted() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_kernel(case([(0, 20), (0, 1), (0, 50)], (2, 1, 16), dtype))
        # Prompts that go on from pages within a block, over a block's end, and beside others that do not.
        check_kernel(case([(3, 20), (0, 1), (1, 50), (5, 2), (2, 1)], (2, 1, 16), dtype))
        check_kernel(case([(2, 7)], (4, 2, 32), dtype, page=32, padding=0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "lengths", [[(0, 5)], [(0, 60), (0, 1), (0, 200)], [(0, 700), (0, 1300)], [(20, 30)], [(7, 90), (0, 40), (23, 300)]]
)
@torch.inference_mode()
def test_varlen_on_a_gpu(lengths: list[tuple[int, int]], dtype: torch.dtype) -> None:
    check_kernel(case(lengths, (16, 8, 128), dtype, page=32, device="cuda"))
