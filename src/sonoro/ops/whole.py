"""Attention among a few tokens that all see one another: a Triton kernel beside its torch reference.

For stacks that see short sequences whole, many at once. Keys and values are not kept, so there are no pages; a program
takes one query head of one sequence, which fits its registers.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import can_overlap, is_row_major

try:
    import triton
    import triton.language as tl

    from sonoro.ops.norm import launch_dependents, wait_for_inputs
except ImportError:
    triton = None

__all__ = ["whole_attention", "whole_attention_kernel", "whole_attention_reference"]

Rotary = tuple[Tensor, Tensor]

_MOST_TOKENS = 32


def whole_attention_reference(qkv: Tensor, rotary: Rotary, kv_heads: int, kept: slice) -> Tensor:
    """Attend within each sequence of `qkv` [N * T, (heads + 2 kv heads) * D], rows of T tokens back to back.

    Queries and keys are turned by `rotary`, tables of the T positions [T, 1, D]. Only tokens `kept`, of which there
    are K, are asked: [N * K, heads * D]. Capturable; no sync.
    """
    cos, signed_sin = rotary
    tokens, _, width = cos.shape
    heads = qkv.unflatten(-1, (-1, width)).unflatten(0, (-1, tokens))
    given, values = heads[:, :, :-kv_heads], heads[:, :, -kv_heads:]
    turned = (given * cos).addcmul(given.roll(width // 2, -1), signed_sin)
    queries, keys = turned[:, kept, :-kv_heads], turned[:, :, -kv_heads:]
    query, key, value = (rows.transpose(1, 2) for rows in (queries, keys, values))
    out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    return out.transpose(1, 2).flatten(2).flatten(0, 1)


if triton is not None:

    @triton.jit
    def _turn(value, partner, cos, sin):
        """`value` turned as the reference rounds it. `partner` holds the other halves of its pairs."""
        dtype: tl.constexpr = value.dtype
        turned = (value.to(tl.float32) * cos.to(tl.float32)).to(dtype).to(tl.float32)
        return (turned + partner.to(tl.float32) * sin.to(tl.float32)).to(dtype)

    @triton.jit
    def _attend(  # noqa: PLR0917 (a kernel's arguments are positional)
        qkv,
        cos,
        sin,
        out,
        qkv_stride,
        scale,
        heads: tl.constexpr,
        group: tl.constexpr,
        width: tl.constexpr,
        tokens: tl.constexpr,
        first: tl.constexpr,
        kept: tl.constexpr,
        block: tl.constexpr,
        is_interpreted: tl.constexpr,
        overlap: tl.constexpr,
    ):
        launch_dependents(overlap)
        # Triton's interpreter takes the bits of a bfloat16 operand for an integer; products in float32 are the same.
        operand: tl.constexpr = tl.float32 if is_interpreted else out.dtype.element_ty
        sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        token, column = tl.arange(0, block), tl.arange(0, width)
        place, is_token = token[:, None], (token < tokens)[:, None]
        turn_cos = tl.load(cos + place * width + column[None, :], mask=is_token, other=0.0)
        turn_sin = tl.load(sin + place * width + column[None, :], mask=is_token, other=0.0)
        wait_for_inputs(overlap)
        line = qkv + (sequence * tokens + place) * qkv_stride
        own, other = column[None, :], ((column + width // 2) % width)[None, :]
        key_line = line + (heads + head // group) * width
        query = tl.load(line + head * width + own, mask=is_token, other=0.0)
        query_partner = tl.load(line + head * width + other, mask=is_token, other=0.0)
        key = tl.load(key_line + own, mask=is_token, other=0.0)
        key_partner = tl.load(key_line + other, mask=is_token, other=0.0)
        value = tl.load(key_line + heads // group * width + own, mask=is_token, other=0.0)
        query, key = _turn(query, query_partner, turn_cos, turn_sin), _turn(key, key_partner, turn_cos, turn_sin)
        score = tl.dot(query.to(operand), tl.trans(key.to(operand)), input_precision="ieee") * scale
        score = tl.where((token < tokens)[None, :], score, -float("inf"))
        weight = tl.exp2(score - tl.max(score, axis=1)[:, None])
        total = tl.sum(weight, axis=1)
        mixed = tl.dot(weight.to(operand), value.to(operand), input_precision="ieee") / total[:, None]
        is_kept = (place >= first) & (place < first + kept)
        target = out + ((sequence * kept + place - first) * heads + head) * width + column[None, :]
        tl.store(target, mixed.to(out.dtype.element_ty), mask=is_kept)


def whole_attention_kernel(
    qkv: Tensor, rotary: Rotary, kv_heads: int, kept: slice, *, warps: int = 0, is_overlapped: bool = True
) -> Tensor:
    """`whole_attention_reference` as one Triton kernel, a program per sequence and query head; no gradient.

    `warps` of a program: as many as are fastest if 0."""
    cos, signed_sin = rotary
    tokens, _, width = cos.shape
    heads = qkv.shape[1] // width - 2 * kv_heads
    first, end, _ = kept.indices(tokens)
    sequences, overlap = qkv.shape[0] // tokens, is_overlapped and can_overlap(qkv.device)
    out = qkv.new_empty(sequences * (end - first), heads * width)
    _attend[sequences, heads](
        qkv,
        cos,
        signed_sin,
        out,
        qkv.stride(0),
        # Exponentials to base two are an instruction of their own.
        math.log2(math.e) / math.sqrt(width),
        heads,
        heads // kv_heads,
        width,
        tokens,
        first,
        end - first,
        max(16, triton.next_power_of_2(tokens)),
        triton.knobs.runtime.interpret,
        overlap,
        # 64 sequences on an H200: 5.2 us with one warp, 7.1 with two; 2 sequences: 2.6 and 2.3.
        num_warps=warps or (1 if sequences >= 32 else 2),
        launch_pdl=overlap,
    )
    return out


def _can_attend(qkv: Tensor, rotary: Rotary, kv_heads: int, kept: slice) -> bool:
    tokens, _, width = rotary[0].shape
    return (
        is_row_major(qkv, *rotary)
        and all(table.is_contiguous() for table in rotary)
        and tokens <= _MOST_TOKENS
        and 16 <= width <= 128
        and width & (width - 1) == 0
        and kept.indices(tokens)[2] == 1
    )


whole_attention = Operation("whole_attention", whole_attention_kernel, whole_attention_reference, _can_attend)
