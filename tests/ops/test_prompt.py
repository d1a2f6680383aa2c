"""What a prompt's tokens need before they attend: the kernel against its reference, that against `decode_attention`."""

from typing import Any

import pytest
import torch
from without_gpu import in_the_interpreter

from sonoro.ops.attention import HeadNorms, PagedKV, decode_attention_reference
from sonoro.ops.prompt import keep_prompt, keep_prompt_kernel, keep_prompt_reference

# One rounding of the dtype, of values near 1; in float32 sums of a head in another order.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 4e-2}


def case(
    tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype, *, is_normed: bool = True, device: str = "cpu"
) -> Any:
    """Arguments for tokens of four requests, on pages in any order, of rows that are part of wider ones."""
    heads, kv_heads, width = sizes
    make, page = torch.Generator().manual_seed(tokens), 16
    table = torch.randperm(4 * 3, generator=make).view(4, 3).int()
    slots = torch.arange(tokens) // -(-tokens // 4)
    positions = torch.arange(tokens) % -(-tokens // 4) + 5
    wide = torch.randn(tokens, (heads + 2 * kv_heads) * width + 8, generator=make).to(dtype)
    norms = torch.randn(2, width, generator=make).to(dtype)
    cos, sin = torch.randn(2, 48, 1, width, generator=make).to(dtype)
    keys, values = torch.full((2, 13, page, kv_heads, width), torch.nan, dtype=dtype)
    wide, norms, cos, sin = (tensor.to(device) for tensor in (wide, norms, cos, sin))
    given = HeadNorms(norms[0], norms[1], 1e-6) if is_normed else HeadNorms()
    cache = PagedKV(*(tensor.to(device) for tensor in (keys, values, table, slots)))
    return wide[:, :-8], given, (cos, sin), cache, positions.to(device)


def test_it_keeps_and_rotates_as_a_decode_step_does() -> None:
    given = case(12, (4, 2, 8), torch.float64)
    qkv, norms, rotary, cache, positions = given
    rotated = keep_prompt(*given)
    assert rotated.shape == (12, 6, 8)
    for token in range(12):
        keys, values = torch.zeros_like(cache.keys), torch.zeros_like(cache.values)
        own = PagedKV(keys, values, cache.page_table, cache.slots[token : token + 1])
        decode_attention_reference(qkv[token : token + 1], norms, rotary, own, positions[token : token + 1])
        at = (keys != 0).any(-1).any(-1).nonzero()
        assert len(at) == 1
        page, place = at[0].tolist()
        torch.testing.assert_close(cache.keys[page, place], keys[page, place], atol=1e-12, rtol=0)
        assert torch.equal(cache.values[page, place], values[page, place])
        torch.testing.assert_close(rotated[token, 4:], keys[page, place], atol=1e-12, rtol=0)


def check_kernel(*given_sizes: Any, **how: Any) -> None:
    given, expected = case(*given_sizes, **how), case(*given_sizes, **how)
    assert keep_prompt.is_supported(*given)
    out, reference = keep_prompt_kernel(*given), keep_prompt_reference(*expected)
    tolerance = {"atol": TOLERANCE[out.dtype], "rtol": TOLERANCE[out.dtype]}
    torch.testing.assert_close(out, reference, **tolerance)
    for ours, theirs in zip(given[3][:2], expected[3][:2], strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True, **tolerance)
        assert torch.isnan(ours).any(), "pages of others are left alone"


@in_the_interpreter
def test_interpreted() -> None:
    for dtype in TOLERANCE:
        for sizes in ((16, 8, 32), (3, 1, 16), (16, 2, 128)):
            for is_normed in (True, False):
                check_kernel(9, sizes, dtype, is_normed=is_normed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 8), (16, 2)])
@torch.inference_mode()
def test_on_a_gpu(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    for tokens in (16, 120):
        check_kernel(tokens, (heads, kv_heads, 128), dtype, device="cuda")
        check_kernel(tokens, (heads, kv_heads, 128), dtype, is_normed=False, device="cuda")
