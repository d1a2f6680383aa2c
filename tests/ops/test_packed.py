"""Attention within packed prompts: the reference against each prompt alone, the kernel against its reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from interpreter import in_the_interpreter, interpret
from sonoro.ops.packed import packed_attention, packed_attention_kernel, packed_attention_reference

# Of the outputs, which are averages of values near 1: sums in another order in float32, one rounding in bfloat16.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


def starts_of(lengths: list[int], padding: int) -> Tensor:
    """Prompts of `lengths` back to back, then padding tokens of which each is a prompt of its own."""
    ends = torch.tensor(lengths).cumsum(0)
    begins = torch.repeat_interleave(ends - torch.tensor(lengths), torch.tensor(lengths))
    return torch.cat((begins, ends[-1] + torch.arange(padding)))


def test_packed_equals_each_prompt_alone() -> None:
    starts = starts_of([5, 1, 9], 2)
    queries, keys, values = (torch.randn(17, heads, 6, dtype=torch.float64) for heads in (4, 2, 2))
    found = packed_attention(queries, keys, values, starts)
    assert found.shape == queries.shape
    for low, high in ((0, 5), (5, 6), (6, 15), (15, 16), (16, 17)):
        alone = [rows[low:high].transpose(0, 1)[None] for rows in (queries, keys, values)]
        expected = F.scaled_dot_product_attention(*alone, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(found[low:high], expected, atol=1e-12, rtol=0)


def check_packed(dtype: torch.dtype, lengths: list[int], heads: tuple[int, int, int], device: str = "cpu") -> None:
    starts = starts_of(lengths, 3).to(device)
    query_heads, kv_heads, width = heads
    rows = torch.randn(len(starts), query_heads + 2 * kv_heads, width).to(device, dtype)
    # The values are a part of a wider row, as a fused projection leaves them.
    queries, keys, values = rows.split((query_heads, kv_heads, kv_heads), dim=1)
    found = packed_attention_kernel(queries.contiguous(), keys.contiguous(), values, starts)
    expected = packed_attention_reference(queries, keys, values, starts)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=0)


@in_the_interpreter
def test_interpreted() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_packed(dtype, [20, 1, 50], (2, 1, 16))


def test_the_kernel_equals_the_reference_in_the_interpreter() -> None:
    interpret(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[5], [60, 1, 200], [700, 1300]])
@torch.inference_mode()
def test_packed_on_a_gpu(lengths: list[int], dtype: torch.dtype) -> None:
    check_packed(dtype, lengths, (16, 8, 128), device="cuda")
