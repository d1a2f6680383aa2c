"""Attention of chosen heads to a stretch of positions: reference against full attention, kernel against reference."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from without_gpu import in_the_interpreter

from sonoro.ops.attention import HeadNorms, PagedKV, decode_attention_reference
from sonoro.ops.pointer import Watched, point_kernel, point_reference

EPS = 1e-6
WIDE = 600
"""More than is written at once."""


def pointer_case(
    dtype: torch.dtype, *, heads: tuple[int, int, int] = (4, 2, 16), has_norms: bool = True, device: str = "cpu"
) -> tuple[tuple[Any, ...], Tensor, Tensor, Tensor]:
    """Arguments of `decode_attention` for four requests, then the heads, spans and `out` of `point`."""
    query_heads, kv_heads, width = heads
    make = torch.Generator().manual_seed(3)
    positions = torch.tensor([63, 5, 40, 0])
    spans = torch.tensor([[0, 0], [10, 20], [2, 60], [7, 0], [0, 1], [50, 300]])
    slots = torch.tensor([2, 5, 1, 4])  # the second has no position of its span yet
    keys, values = torch.randn(2, 6 * 4 + 1, 16, kv_heads, width, generator=make).to(dtype)
    table = torch.randperm(6 * 4, generator=make).view(6, 4).int()
    for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
        for rest in (keys, values):
            rest[table[slot, position // 16], position % 16 :] = torch.nan
            rest[table[slot, position // 16 + 1 :].long()] = torch.nan
    qkv = torch.randn(4, (query_heads + 2 * kv_heads) * width, generator=make).to(dtype)
    q_norm, k_norm = (0.5 + torch.rand(2, width, generator=make)).to(device, dtype)
    norms = HeadNorms(q_norm, k_norm, EPS) if has_norms else HeadNorms()
    angles = torch.arange(64)[:, None, None] / 10.0 ** (torch.arange(width // 2) / 8)
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(device, dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(device, dtype)
    cache = PagedKV(*(tensor.to(device) for tensor in (keys, values, table, slots)))
    given = (qkv.to(device), norms, (cos, sin), cache, positions.to(device))
    out = torch.full((6, 2, WIDE), 7.0, device=device)
    return given, torch.tensor([3, 1], device=device), spans.to(device), out


def by_unit_values(given: tuple[Any, ...], heads: Tensor, spans: Tensor) -> dict[int, Tensor]:
    """The same by `decode_attention`: with unit vectors as values it returns its weights, a stretch at a time."""
    qkv, norms, rotary, cache, positions = given
    width, kv_heads = cache.keys.shape[3], cache.keys.shape[2]
    made = {}
    for row, (slot, position) in enumerate(zip(cache.slots.tolist(), positions.tolist(), strict=True)):
        weights = torch.zeros(len(heads), position + 1, dtype=qkv.dtype)
        for begin in range(0, position + 1, width):
            unit = torch.zeros_like(cache.values)
            fresh = qkv[row : row + 1].clone()
            fresh.view(-1, width)[-kv_heads:] = 0
            for at in range(begin, min(begin + width, position + 1)):
                if at == position:
                    fresh.view(-1, width)[-kv_heads:, at - begin] = 1
                else:
                    unit[cache.page_table[slot, at // 16].long(), at % 16, :, at - begin] = 1
            used = PagedKV(cache.keys.clone(), unit, cache.page_table, cache.slots[row : row + 1])
            seen = decode_attention_reference(fresh, norms, rotary, used, positions[row : row + 1]).view(-1, width)
            end = min(begin + width, position + 1)
            weights[:, begin:end] = seen[heads, : end - begin]
        start, count = spans[slot].tolist()
        stretch = weights[:, start : start + count]
        made[slot] = stretch / stretch.sum(1, keepdim=True)
    return made


@pytest.mark.parametrize("has_norms", [True, False])
def test_the_reference_is_full_attention_within_the_stretch(has_norms: bool) -> None:
    given, heads, spans, out = pointer_case(torch.float64, has_norms=has_norms)
    decode_attention_reference(*given)
    expected = by_unit_values(given, heads, spans)
    point_reference(*given, Watched(heads, spans, out := out.double()))
    for slot, weights in expected.items():
        count = weights.shape[1]
        torch.testing.assert_close(out[slot, :, :count], weights, atol=1e-12, rtol=0)
        assert not out[slot, :, count:].any()
    untouched = sorted(set(range(6)) - set(expected))
    assert bool((out[untouched] == 7.0).all())


@in_the_interpreter
def test_interpreted_kernel_equals_reference() -> None:
    for dtype, heads, has_norms in (
        (torch.float32, (4, 2, 16), True),
        (torch.float32, (4, 4, 32), False),
        (torch.bfloat16, (4, 1, 64), True),
    ):
        given, chosen, spans, out = pointer_case(dtype, heads=heads, has_norms=has_norms)
        decode_attention_reference(*given)
        expected = point_reference(*given, Watched(chosen, spans, out.clone()))
        # Sums in another order in float32; in bfloat16 the interpreter truncates queries where a GPU rounds.
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(point_kernel(*given, Watched(chosen, spans, out)), expected, atol=tolerance, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_kernel_equals_the_reference(dtype: torch.dtype) -> None:
    given, chosen, spans, out = pointer_case(dtype, heads=(16, 8, 128), device="cuda")
    with torch.inference_mode():
        decode_attention_reference(*given)
        expected = point_reference(*given, Watched(chosen, spans, out.clone()))
        torch.testing.assert_close(
            point_kernel(*given, Watched(chosen, spans, out)),
            expected,
            atol=1e-4 if dtype == torch.float32 else 2**-6,
            rtol=0,
        )


def test_more_requests_than_one_do_not_touch_each_other() -> None:
    given, heads, spans, out = pointer_case(torch.float64)
    decode_attention_reference(*given)
    together = point_reference(*given, Watched(heads, spans, out.double()))
    qkv, norms, rotary, cache, positions = given
    for row in range(4):
        one = cache._replace(slots=cache.slots[row : row + 1])
        alone = point_reference(
            qkv[row : row + 1], norms, rotary, one, positions[row : row + 1], Watched(heads, spans, out.double())
        )
        slot = int(cache.slots[row])
        torch.testing.assert_close(alone[slot], together[slot], atol=1e-12, rtol=0)
    for head, other in itertools.permutations(range(2), 2):
        assert not torch.equal(together[2, head], together[2, other])
