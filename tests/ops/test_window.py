import pytest
import torch
from without_gpu import in_the_interpreter

from sonoro.ops.window import window_attention, window_attention_kernel, window_attention_reference

# Sums in another order, and roundings of queries, keys and weights in the dtype.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
THETA = 10000.0


def check_kernel(device, dtypes):
    """Streams through several turns of the ring: each call's result, and what it leaves in the ring."""
    generator = torch.Generator().manual_seed(0)
    for dtype in dtypes:
        for heads, width, window, columns, calls, is_rounded in (
            (2, 32, 20, 1, 22, False),
            (1, 32, 20, 7, 5, True),
            (1, 64, 72, 12, 8, False),
        ):
            rings = [torch.zeros(4, window - 1, 2 * heads * width, dtype=dtype, device=device) for _ in range(2)]
            seen, slots = torch.tensor([0, 0, 0, 0], device=device), torch.tensor([3, 0], device=device)
            tolerance = TOLERANCE[dtype]
            for _ in range(calls):
                qkv = torch.randn(2, columns, 3 * heads * width, generator=generator).to(dtype).to(device)
                ours, theirs = (
                    attend(qkv, (heads, heads), window, THETA, (ring, seen, slots), has_rounded_angles=is_rounded)
                    for attend, ring in zip((window_attention_kernel, window_attention_reference), rings, strict=True)
                )
                torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
                torch.testing.assert_close(rings[0], rings[1], atol=tolerance, rtol=tolerance)
                seen[slots] += columns
            ours = window_attention_kernel(qkv, (heads, heads), window, THETA)
            theirs = window_attention_reference(qkv, (heads, heads), window, THETA)
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@in_the_interpreter
def test_interpreted():
    # The interpreter multiplies no bfloat16.
    check_kernel("cpu", [torch.float32, torch.float16])


@pytest.mark.gpu
def test_the_kernel_equals_the_reference_on_a_gpu():
    check_kernel("cuda", [torch.float32, torch.float16, torch.bfloat16])


@pytest.mark.parametrize("chunks", [[1] * 30, [7, 7, 7, 9], [4, 1, 20, 5], [30]])
def test_any_split_attends_as_the_whole(chunks):
    heads, window = (4, 2), 6
    qkv = torch.randn(2, 30, 8 * 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = window_attention(qkv, heads, window, THETA)
    ring, seen, slots = torch.randn(4, 5, 16, dtype=torch.float64), torch.tensor([0, 9, 0, 0]), torch.tensor([2, 0])
    parts = []
    for chunk in qkv.split(chunks, dim=1):
        parts.append(window_attention(chunk, heads, window, THETA, (ring, seen, slots)))
        seen[slots] += chunk.shape[1]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-12, rtol=0)


def test_a_column_sees_its_window_and_no_more():
    heads, window = (1, 1), 4
    qkv = torch.randn(1, 12, 3 * 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = window_attention(qkv, heads, window, THETA)
    qkv[0, 5] += 1.0
    changed = (window_attention(qkv, heads, window, THETA) != before).any(-1)[0].nonzero().flatten()
    assert changed.tolist() == [5, 6, 7, 8]


def test_rounded_angles_turn_otherwise_but_stream_as_exactly():
    heads, window = (2, 2), 6
    qkv = torch.randn(1, 40, 6 * 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = window_attention(qkv, heads, window, THETA, has_rounded_angles=True)
    # 8 bits of cosine and sine.
    assert 1e-4 < (whole - window_attention(qkv, heads, window, THETA)).abs().max() < 0.05
    ring, seen, slots = torch.zeros(1, 5, 16, dtype=torch.float64), torch.tensor([0]), torch.tensor([0])
    parts = []
    for chunk in qkv.split([1, 9, 7, 23], dim=1):
        parts.append(window_attention(chunk, heads, window, THETA, (ring, seen, slots), has_rounded_angles=True))
        seen += chunk.shape[1]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-12, rtol=0)
