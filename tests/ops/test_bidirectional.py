"""Attention of short sequences seen whole: the reference against a plain computation, the kernel against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from without_gpu import INTERPRETED, device_only, in_the_interpreter

from sonoro.ops.bidirectional import (
    bidirectional_attention,
    bidirectional_attention_kernel,
    bidirectional_attention_reference,
)

# Of the outputs, which are averages of values near 1: sums in another order in float32, some roundings in bfloat16,
# which the interpreter truncates where a GPU rounds.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 5e-2 if INTERPRETED else 2e-2}


def case(
    sizes: tuple[int, int, int], tokens: int, sequences: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Any, ...]:
    """Arguments of `bidirectional_attention` for `sizes`: heads, kv heads, width of a head."""
    heads, kv_heads, width = sizes
    make = torch.Generator().manual_seed(tokens)
    angles = torch.arange(tokens)[:, None, None] / 10.0 ** (torch.arange(width // 2) / 8)
    cos, sin = angles.cos(), angles.sin()
    tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    qkv = torch.randn(sequences * tokens, (heads + 2 * kv_heads) * width, generator=make)
    return qkv.to(device, dtype), tuple(table.to(device, dtype) for table in tables), kv_heads, slice(tokens)


def plain(qkv: Tensor, rotary: tuple[Tensor, Tensor], kv_heads: int) -> Tensor:
    """Head by head and token by token, the rotation as complex numbers."""
    tokens, _, width = rotary[0].shape
    turns = torch.complex(rotary[0][:, 0, : width // 2], rotary[1][:, 0, width // 2 :])
    rows = qkv.view(-1, tokens, qkv.shape[1] // width, width)
    heads = rows.shape[2] - 2 * kv_heads
    out = torch.empty(*rows.shape[:2], heads, width, dtype=qkv.dtype)
    for sequence in range(len(rows)):
        pairs = torch.complex(*rows[sequence].chunk(2, dim=-1)) * turns[:, None]
        turned = torch.cat((pairs.real, pairs.imag), dim=-1)
        for head in range(heads):
            shared = heads + head // (heads // kv_heads)
            for token in range(tokens):
                scores = turned[:, shared] @ turned[token, head] / width**0.5
                out[sequence, token, head] = scores.softmax(0) @ rows[sequence, :, shared + kv_heads]
    return out.view(len(qkv), -1)


def test_it_equals_a_plain_computation() -> None:
    given = case((4, 2, 6), 5, 3, torch.float64)
    # Same sums in float64, in another order.
    torch.testing.assert_close(bidirectional_attention(*given), plain(*given[:3]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kept", [slice(0, 1), slice(3, None), slice(-2, None), slice(1, 4)])
def test_tokens_that_are_kept_are_those_of_the_whole(kept: slice) -> None:
    given = case((4, 2, 8), 5, 3, torch.float64)
    expected = bidirectional_attention(*given).view(3, 5, -1)[:, kept].flatten(0, 1)
    # Another number of queries is another product.
    torch.testing.assert_close(bidirectional_attention(*given[:3], kept), expected, atol=1e-12, rtol=0)


def test_it_may_be_captured() -> None:
    given = case((4, 2, 8), 5, 3, torch.float32, "meta")
    with device_only():
        assert bidirectional_attention(*given).shape == (15, 32)


def check(given: tuple[Any, ...], **options: Any) -> None:
    found, expected = bidirectional_attention_kernel(*given, **options), bidirectional_attention_reference(*given)
    torch.testing.assert_close(found, expected, atol=TOLERANCE[found.dtype], rtol=0)


@in_the_interpreter
def test_interpreted() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(case((4, 2, 16), 11, 2, dtype))
        for kept in (slice(0, 1), slice(-4, None)):
            for heads_at_once in (1, 2, 4):
                check((*case((8, 1, 32), 5, 3, dtype)[:3], kept), heads_at_once=heads_at_once)
        check(case((2, 2, 16), 17, 1, dtype))
        # A part of wider rows.
        qkv, *rest = case((2, 1, 16), 5, 2, dtype)
        check((torch.cat((qkv, qkv), dim=1)[:, : qkv.shape[1]], *rest))


@pytest.mark.parametrize(
    ("change", "is_supported"),
    [
        ({}, True),
        ({"dtype": torch.bfloat16}, True),
        ({"sizes": (4, 2, 24)}, False),
        ({"sizes": (4, 2, 256)}, False),
        ({"tokens": 33}, False),
        ({"dtype": torch.float64}, False),
        ({"sequences": 0}, False),
    ],
)
def test_the_kernel_is_offered_what_it_can_do(change: dict[str, Any], is_supported: bool) -> None:
    given = {"sizes": (4, 2, 32), "tokens": 11, "sequences": 2, "dtype": torch.float32} | change
    assert bidirectional_attention.is_supported(*case(**given)) == is_supported


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sequences", [1, 2, 64, 128])
@torch.inference_mode()
def test_it_equals_the_reference_on_a_gpu(sequences: int, dtype: torch.dtype) -> None:
    for tokens, kept in ((11, slice(11)), (11, slice(-4, None)), (5, slice(0, 1))):
        given = (*case((16, 2, 128), tokens, sequences, dtype, "cuda")[:3], kept)
        check(given)
        found = bidirectional_attention_kernel(*given)
        for _ in range(10):
            assert torch.equal(bidirectional_attention_kernel(*given), found)
